"""The label `fleet`: which fleet a process or a command belongs to."""

import re

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from fleet.settings import ExporterSettings, MonitorSettings
from imagefleet.telemetry import metrics, settings
from imagefleet.telemetry.settings import FleetSettings
from worker.settings import WorkerSettings

KEY = "c2VjcmV0LWtleQ=="
SIGNATURE = "sv=2023-11-03&sp=raup&sig=secret%3D"


@pytest.mark.parametrize(
    "storage",
    [
        f"AccountName=Acme;AccountKey={KEY};EndpointSuffix=core.windows.net",
        "https://acme.blob.core.windows.net",
        "https://acme.queue.core.windows.net/",
        f" https://acme.blob.core.windows.net?{SIGNATURE}",
        f"BlobEndpoint=https://acme.blob.core.windows.net/;SharedAccessSignature={SIGNATURE}",
        "QueueEndpoint=https://acme.z01.queue.storage.azure.net;SharedAccessSignature=sig=x",
    ],
)
def test_every_way_to_name_an_account_gives_the_same_fleet(storage: str):
    assert settings.fleet_name(storage, "jobs") == "acme/jobs"


@pytest.mark.parametrize(
    "storage",
    [
        "UseDevelopmentStorage=true",
        f"AccountName=devstoreaccount1;AccountKey={KEY};BlobEndpoint=http://azurite:10000/other;",
        "BlobEndpoint=http://azurite:10000/devstoreaccount1;SharedAccessSignature=sig=secret",
    ],
)
def test_an_emulators_account_is_in_its_path(storage: str):
    assert settings.fleet_name(storage, "jobs") == "devstoreaccount1/jobs"


def test_a_local_storage_is_its_folder_however_it_is_written(tmp_path, monkeypatch):
    folder = tmp_path / "my data"
    folder.mkdir()
    monkeypatch.chdir(folder)

    for storage in (f"local:{folder}", "local:.", f"local:../{folder.name}/"):
        assert settings.fleet_name(storage, "spring") == "my-data/spring"


@pytest.mark.parametrize(
    "storage",
    [
        f"AccountKey={KEY}",
        f"https://user:{KEY}@hooks.example.com/services/{KEY}?{SIGNATURE}",
        f"https://[{KEY}",
        "local:",
        "local:/",
        "",
        KEY,
    ],
)
def test_an_address_that_cannot_be_opened_gives_a_name_without_its_secret(
    storage: str,
):
    name = settings.fleet_name(storage, "jobs")

    assert name.endswith("/jobs")
    assert FleetSettings(fleet=name).fleet_name == name
    assert "secret" not in name
    assert KEY.strip("=") not in name


def test_worker_exporter_and_commands_agree():
    names = {"storage": "https://acme.blob.core.windows.net", "queue": "spring"}

    worker = WorkerSettings(model="m", **names)
    exporter = ExporterSettings(**names, sas=f"?{SIGNATURE}")
    console = MonitorSettings(
        storage=f"AccountName=acme;AccountKey={KEY}",
        queue="spring",
        prometheus="http://x",
    )

    assert (
        worker.fleet_name
        == exporter.fleet_name
        == console.queried_fleet
        == "acme/spring"
    )
    assert WorkerSettings(model="m", **names, fleet="mine").fleet_name == "mine"


def test_all_stands_for_every_fleet_and_names_none():
    assert MonitorSettings(fleet="all").queried_fleet is None
    with pytest.raises(ValueError, match="should name one fleet"):
        WorkerSettings(model="m", fleet="all")
    with pytest.raises(ValueError, match="should name one fleet"):
        ExporterSettings(fleet="all")


@pytest.mark.parametrize("name", ['a"b', "a b", "a{b}", "-x", "x" * 200])
def test_a_name_that_queries_would_have_to_quote_is_refused(name: str):
    with pytest.raises(ValueError, match="fleet"):
        FleetSettings(fleet=name)


def test_every_line_of_the_text_has_the_label():
    registry = metrics.LabelledRegistry({"fleet": "acme/jobs"})
    Counter("done", "Done.", ["kind"], registry=registry).labels("a").inc()
    Gauge("left", "Left.", registry=registry)

    for _ in range(2):  # nothing piles up from one scrape to the next
        lines = metrics.render(registry).decode().splitlines()
        done, left = (line for line in lines if not line.startswith("#"))
        assert re.fullmatch(
            r'done_total{fleet="acme/jobs",kind="a",process="\w{12}"} 1\.0', done
        )
        assert left == 'left{fleet="acme/jobs"} 0.0'


def test_a_counter_that_begins_anew_at_its_address_is_a_series_of_its_own():
    registries = [
        metrics.LabelledRegistry({"fleet": "acme/jobs", "device": "0"})
        for _ in range(2)
    ]
    for registry in registries:
        Counter("done", "Done.", registry=registry)
        Histogram("seconds", "Seconds.", registry=registry)
        Gauge("left", "Left.", registry=registry)

    first, second = (
        set(metrics.render(each).decode().splitlines()) for each in registries
    )

    assert [line for line in first & second if line[0] != "#"] == [
        'left{device="0",fleet="acme/jobs"} 0.0'
    ]


def test_without_labels_nothing_is_added():
    plain = CollectorRegistry()
    labelled = metrics.LabelledRegistry({})
    for registry in (plain, labelled):
        Gauge("left", "Left.", registry=registry)

    assert metrics.render(labelled) == metrics.render(plain)
