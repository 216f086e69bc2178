import pytest
from pydantic import SecretStr

from imagefleet import errors
from imagefleet.storage.azure.storage import AzureStorage
from imagefleet.storage.open import LocalStorage, open_storage
from imagefleet.storage.settings import StorageSettings

ACCOUNT = "https://fleet.blob.core.windows.net"
SECRET = "c2VjcmV0"
SAS = SecretStr(f"sv=2023-11-03&sp=raup&sig={SECRET}")
KEY = f"AccountName=fleet;AccountKey={SECRET}"


def settings_for(storage: str, **settings: object) -> AzureStorage:
    opened = open_storage(StorageSettings(storage=storage, **settings))
    assert isinstance(opened, AzureStorage)
    return opened


def urls(opened: AzureStorage) -> list[str]:
    clients = (
        *(queue._client for queue in opened.queues.values()),
        opened.poison._client,
        opened.blobs._client,
        opened.files._client,
    )
    return [client.url for client in clients]


def test_a_folder_is_a_local_storage(tmp_path):
    opened = open_storage(StorageSettings(storage=f"local:{tmp_path}"))
    assert isinstance(opened, LocalStorage)
    assert opened.url == f"local:{tmp_path}"


def test_a_tilde_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/fox")
    opened = open_storage(StorageSettings(storage="local:~/fleet"))
    assert opened.url == "local:/home/fox/fleet"


@pytest.mark.parametrize(
    "address",
    [
        ACCOUNT,
        f"{ACCOUNT}/",
        "https://fleet.queue.core.windows.net",
        "https://FLEET.Queue.core.windows.net",
    ],
)
def test_the_url_of_either_service_implies_the_other(address: str):
    opened = settings_for(address, sas=SAS)
    assert urls(opened) == [
        "https://fleet.queue.core.windows.net/jobs-high",
        "https://fleet.queue.core.windows.net/jobs",
        "https://fleet.queue.core.windows.net/jobs-low",
        "https://fleet.queue.core.windows.net/jobs-poison",
        "https://fleet.blob.core.windows.net/images",
        "https://fleet.blob.core.windows.net/files",
    ]
    assert opened.url == ACCOUNT


def test_a_url_may_contain_the_token():
    assert settings_for(f"{ACCOUNT}?{SAS.get_secret_value()}").url == ACCOUNT


def test_a_connection_string_names_the_account():
    assert settings_for(f"DefaultEndpointsProtocol=https;{KEY}").url == ACCOUNT


def test_azurites_short_connection_string_is_accepted():
    assert (
        settings_for("UseDevelopmentStorage=true").url
        == "http://127.0.0.1:10000/devstoreaccount1"
    )


def test_an_account_without_credentials_names_the_setting():
    with pytest.raises(errors.SetupError, match="set IMAGEFLEET_SAS or"):
        open_storage(StorageSettings(storage=ACCOUNT))


@pytest.mark.parametrize(
    "address",
    [
        "",
        "local:",
        "./data",
        "s3://bucket",
        f"http://fleet.blob.core.windows.net?sig={SECRET}",
        f"https://example.com?sig={SECRET}",
        f"{ACCOUNT}/images?sig={SECRET}",
        f"AccountKey={SECRET}",
        f"BlobEndpoint=https://x;AccountKey={SECRET}",
        f"BlobEndpoint;AccountName=x;AccountKey={SECRET}",
    ],
)
def test_an_invalid_address_is_one_line_without_secrets(address: str):
    with pytest.raises(errors.SetupError) as caught:
        open_storage(StorageSettings(storage=address))
    assert SECRET not in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY"])
def test_a_proxy_in_the_environment_is_used(monkeypatch, variable: str):
    for name in (
        "HTTPS_PROXY",
        "https_proxy",
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    assert not settings_for(KEY)._through_proxy
    monkeypatch.setenv(variable, "http://proxy:3128")
    assert settings_for(KEY)._through_proxy


@pytest.mark.parametrize(
    "address",
    [
        f"{KEY};BlobEndpoint=https://fleet.blob.core.windows.net",
        f"{KEY};BlobEndpoint=https://fleet.privatelink.blob.core.windows.net",
        f"{KEY};BlobEndpoint=http://127.0.0.1:10000/fleet",
        f"{KEY};BlobEndpoint=http://azurite:10000/fleet",
    ],
)
def test_a_fleet_has_one_name_whatever_address_it_is_reached_by(address: str):
    opened = settings_for(
        f"{address};QueueEndpoint=https://fleet.queue.core.windows.net"
    )
    assert (
        opened.scope.fleet()
        == settings_for(ACCOUNT, sas=SAS).scope.fleet()
        == "fleet/images"
    )


def test_a_local_fleet_keeps_its_name_where_its_folder_is_moved(tmp_path, monkeypatch):
    def name(address: str) -> str:
        return open_storage(StorageSettings(storage=address)).scope.fleet()

    monkeypatch.chdir(tmp_path)
    made = name("local:a")
    assert made == name(f"local:{tmp_path / 'a'}") != name("local:b")
    (tmp_path / "a").rename(tmp_path / "c")
    assert name("local:c") == made
