"""Tokens of a stored policy on Azurite: they expire by themselves, and are revoked at once."""

import asyncio
import json
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs

import pytest
from azure.storage.queue import QueueClient, QueueServiceClient
from pydantic import SecretStr

from fleet.keys import mint
from imagefleet import concurrency, errors
from imagefleet.storage.azure.roles import RESOURCES, ROLES
from imagefleet.storage.azure.storage import API_VERSION
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet, assert_refused

ONE_HOUR = timedelta(hours=1)


@pytest.fixture
def account(azurite_settings: StorageSettings, created: None) -> list[str]:
    """The storage and the account's key as flags."""
    return ["--storage", azurite_settings.storage, *names_of(azurite_settings)]


def names_of(settings: StorageSettings) -> list[str]:
    containers = [
        "--container",
        settings.container,
        "--files-container",
        settings.files_container,
    ]
    return ["--queue", settings.queue, *containers]


async def work(settings: StorageSettings, record: dict[str, str]) -> None:
    """Does with a record's tokens what workers do; raises SetupError where they do not allow it."""
    tokens = {"storage": record["storage"], "sas": SecretStr(json.dumps(record))}
    async with open_storage(
        settings.model_copy(update=tokens), concurrency.NEVER
    ) as storage:
        await storage.queue.depth()
        assert await storage.queue.receive(1, 30) == []
        assert await storage.blobs.create(
            f"spring/{uuid.uuid4()}.png", b"", "image/png", {}
        )
        assert await storage.files.read("loras/none.safetensors") is None


def test_a_policys_tokens_expire_by_themselves_and_are_revoked_at_once(
    azurite_settings: StorageSettings, account: list[str], in_process: Imagefleet
):
    """Azure takes the expiry from the token or from the policy, and the permissions likewise."""
    mint_two_hours = (
        "keys",
        "mint",
        "worker",
        "--token-hours",
        "2",
        "--policy",
        "spring",
        "--json",
        *account,
    )
    minted = [in_process(*mint_two_hours) for _ in range(2)]
    records = [json.loads(each.stdout) for each in minted]
    for resource, token in records[0].items():
        if resource in RESOURCES:
            fields = parse_qs(token)
            assert (fields["si"], fields.get("sp")) == (["spring"], None)
            ends = datetime.fromisoformat(fields["se"][0]) - datetime.now(UTC)
            assert timedelta(minutes=119) < ends <= timedelta(hours=2)
    policies = asyncio.run(_policies(azurite_settings))
    assert sorted(each.permission for each in policies) == sorted(
        [*3 * ["rup"], "a", "ac", "rc", "r"]
    )
    assert not any(each.expiry for each in policies)
    for record in records:
        asyncio.run(work(azurite_settings, record))

    revoked = in_process("keys", "revoke", "spring", *account)
    assert revoked.returncode == 0
    names = (azurite_settings.queue, azurite_settings.files_container)
    assert all(name in revoked.stdout for name in names)
    ended = "was revoked with its stored policy"
    for record in records:
        with pytest.raises(errors.SetupError, match=ended):
            asyncio.run(work(azurite_settings, record))
    again = in_process("keys", "revoke", "spring", *account)
    assert "there is no policy 'spring'" in again.stderr


def test_a_policy_ends_the_tokens_of_a_models_queues_too(
    azurite_settings: StorageSettings,
    account: list[str],
    in_process: Imagefleet,
    tmp_path,
):
    file = tmp_path / "tokens.json"
    made = in_process(
        "keys",
        "mint",
        "worker",
        "--policy",
        "spring",
        "--model",
        "a model",
        "--file",
        str(file),
        *account,
    )
    assert made.returncode == 0, made.stderr
    assert "add messages" in made.stderr, "a worker moves jobs to their models' queues"
    tokens = json.loads(file.read_text())["models"]["a model"]
    assert parse_qs(tokens["queue_high"])["si"] == ["spring"]
    names = list(azurite_settings.queues_of("a model").values())
    revoked = in_process("keys", "revoke", "spring", *account)
    assert all(name in revoked.stdout for name in names)


def test_a_policy_is_revoked_even_where_a_container_is_gone(
    azurite_settings: StorageSettings, account: list[str], in_process: Imagefleet
):
    gone = ["--container", "no-such-images"]
    assert (
        in_process(
            "keys", "mint", "files", "--policy", "spring", *account, *gone
        ).returncode
        == 0
    )
    revoked = in_process("keys", "revoke", "spring", *account, *gone)
    assert revoked.stdout == f"revoked spring on {azurite_settings.files_container}\n"


def test_a_token_of_a_policy_is_refused_after_its_own_expiry(
    azurite_settings: StorageSettings, account: list[str]
):
    asyncio.run(mint.store_policy(azurite_settings, ROLES["worker"], "spring"))
    minted = mint.Minter(azurite_settings).mint(ROLES["worker"], -ONE_HOUR, "spring")
    record = {"storage": minted.storage, **minted.fields}
    expired = r"expired on .*`imagefleet keys mint` with a --policy of another name"
    with pytest.raises(errors.SetupError, match=expired):
        asyncio.run(work(azurite_settings, record))


def test_a_policy_is_for_one_role(
    azurite_settings: StorageSettings, account: list[str], in_process: Imagefleet
):
    assert (
        in_process("keys", "mint", "worker", "--policy", "spring", *account).returncode
        == 0
    )
    result = in_process("keys", "mint", "load", "--policy", "spring", *account)
    assert_refused(result, "use one name per role")


def test_a_sixth_policy_is_refused_with_the_names_of_the_five(
    azurite_settings: StorageSettings, account: list[str], in_process: Imagefleet
):
    for number in range(5):
        policy = f"p{number}"
        assert (
            in_process("keys", "mint", "load", "--policy", policy, *account).returncode
            == 0
        )
    result = in_process("keys", "mint", "load", "--policy", "p5", *account)
    assert_refused(result, "p0, p1, p2, p3, p4")


async def _policies(settings: StorageSettings) -> list[Any]:
    found: list[Any] = []

    for resource in RESOURCES:
        async with mint._stored(settings, mint.Place(resource)) as policies:
            found.extend(policies.values())
    return found


def test_a_policy_makes_the_queues_of_other_priorities(
    azurite_settings: StorageSettings, account: list[str], in_process: Imagefleet
):
    """Its tokens for a queue that is made later would have no permissions."""
    address = azurite_settings.storage
    names = azurite_settings.queues_of(None)
    for priority in ("high", "low"):
        with QueueClient.from_connection_string(
            address, names[priority], api_version=API_VERSION
        ) as queue:
            queue.delete_queue()
    assert asyncio.run(mint.policies(azurite_settings, ROLES["worker"])) == set()
    assert (
        in_process("keys", "mint", "worker", "--policy", "spring", *account).returncode
        == 0
    )
    assert asyncio.run(mint.policies(azurite_settings, ROLES["worker"])) == {"spring"}


def test_a_misspelt_queue_is_an_error_and_makes_no_other(
    azurite_settings: StorageSettings, account: list[str], in_process: Imagefleet
):
    result = in_process(
        "keys", "mint", "load", "--policy", "spring", *account, "--queue", "jbos"
    )
    assert result.returncode == 2
    with QueueServiceClient.from_connection_string(
        azurite_settings.storage, api_version=API_VERSION
    ) as queues:
        assert list(queues.list_queues(name_starts_with="jbos")) == []
