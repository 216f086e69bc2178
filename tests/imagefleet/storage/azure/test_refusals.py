"""What a refused request says: when the token ended, or which role would suffice."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest
from azure.storage.blob import ContainerSasPermissions, generate_container_sas
from azure.storage.queue import QueueSasPermissions, generate_queue_sas
from pydantic import SecretStr

from imagefleet import errors
from imagefleet.concurrency import NEVER
from imagefleet.storage.azure import roles
from imagefleet.storage.azure.errors import Credential, refusal
from imagefleet.storage.azure.storage import AzureStorage
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

ONE_HOUR = timedelta(hours=1)
NOON = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


@pytest.fixture
async def created(azurite_settings: StorageSettings) -> StorageSettings:
    async with open_storage(azurite_settings) as storage:
        await storage.create()
    return azurite_settings


def with_tokens(
    settings: StorageSettings, begin: timedelta | None, end: timedelta
) -> Any:
    """Tokens of the role `worker` that are valid between these times from now."""
    name, key = re.findall(r"Account(?:Name|Key)=([^;]+)", settings.storage)
    now = datetime.now(UTC)
    terms: dict[str, Any] = {
        "account_name": name,
        "account_key": key,
        "start": None if begin is None else now + begin,
        "expiry": now + end,
    }
    tokens = {
        queue: generate_queue_sas(
            queue_name=queue_name,
            permission=QueueSasPermissions.from_string(letters),
            **terms,
        )
        for queue, queue_name, letters in (
            ("queue", settings.queue, "rup"),
            ("poison", settings.poison_queue, "a"),
        )
    }
    tokens["blob"] = generate_container_sas(
        container_name=settings.container,
        permission=ContainerSasPermissions.from_string(roles.ROLES["worker"].blob),
        **terms,
    )
    endpoints = ";".join(re.findall(r"\w+Endpoint=[^;]+", settings.storage))
    return having(settings.model_copy(update={"storage": endpoints}), tokens)


def having(settings: StorageSettings, tokens: dict[str, str]) -> StorageSettings:
    return settings.model_copy(update={"sas": SecretStr(json.dumps(tokens))})


def tokens_of(settings: StorageSettings) -> dict[str, str]:
    assert settings.sas is not None
    tokens: dict[str, str] = json.loads(settings.sas.get_secret_value())
    return tokens


async def complaints(settings: StorageSettings) -> list[str]:
    """What a request to each of the three resources says."""
    found = []
    async with AzureStorage(settings, NEVER) as storage:
        for request in (
            storage.queue.receive(1, 30),
            storage.poison.send(["x"]),
            storage.blobs.create("fox.png", b"pixels", "image/png", {}),
        ):
            with pytest.raises(errors.SetupError) as caught:
                await request
            found.append(caught.value.message)
    return found


async def test_an_expired_token_says_when_it_expired_and_how_to_get_a_new_one(
    created: StorageSettings,
):
    settings = with_tokens(created, None, timedelta(days=-2, minutes=-1))
    ended = datetime.now(UTC) - timedelta(days=2, minutes=1)
    names = (
        f"the queue '{created.queue}'",
        f"the queue '{created.poison_queue}'",
        f"the container '{created.container}'",
    )
    for name, complaint in zip(names, await complaints(settings), strict=True):
        assert complaint == (
            f"the SAS token of {name} expired on {ended:%Y-%m-%d %H:%M} UTC, by Azure's clock;"
            " mint others: `imagefleet keys mint`"
        )


async def test_a_token_of_the_future_may_not_be_valid_yet(created: StorageSettings):
    settings = with_tokens(created, timedelta(hours=3, minutes=1), timedelta(hours=9))
    for complaint in await complaints(settings):
        assert "is not valid yet" in complaint


async def test_a_damaged_token_is_not_called_expired(created: StorageSettings):
    settings = with_tokens(created, None, ONE_HOUR)
    damaged = {
        resource: re.sub(r"sig=.{4}", "sig=AAAA", each)
        for resource, each in tokens_of(settings).items()
    }
    for complaint in await complaints(having(settings, damaged)):
        assert complaint.startswith("Azure refuses access to the ")
        assert "the SAS token is not signed with the account's present key" in complaint


async def test_a_missing_token_is_named_and_the_role_that_has_one(
    created: StorageSettings,
):
    settings = with_tokens(created, None, ONE_HOUR)
    settings = having(settings, {"queue": tokens_of(settings)["queue"]})
    async with AzureStorage(settings, NEVER) as storage:
        with pytest.raises(errors.SetupError) as caught:
            await anext(storage.blobs.names())
    message = caught.value.message
    assert message.startswith(
        f"there is no SAS token for the container '{created.container}'"
    )
    assert re.findall(r"`imagefleet keys mint (\w+)`", message) == [
        "monitor",
        "operator",
    ]


async def test_the_check_names_every_role_with_a_token_for_what_has_none(
    created: StorageSettings,
):
    """A worker checks its storage before it needs a permission: the role `worker` must be named."""
    settings = with_tokens(created, None, ONE_HOUR)
    settings = having(settings, {"queue": tokens_of(settings)["queue"]})
    async with AzureStorage(settings, NEVER) as storage:
        await storage.queue.check()
        for resource, others in ((storage.poison, set()), (storage.blobs, {"load"})):
            with pytest.raises(
                errors.SetupError, match="there is no SAS token"
            ) as caught:
                await resource.check()
            named = set(
                re.findall(r"`imagefleet keys mint (\w+)`", caught.value.message)
            )
            assert named == {"worker", "monitor", "operator"} | others


async def test_a_token_in_a_connection_string_is_explained_as_well(
    created: StorageSettings,
):
    expired = tokens_of(with_tokens(created, None, -ONE_HOUR))["queue"]
    endpoints = ";".join(re.findall(r"\w+Endpoint=[^;]+", created.storage))
    settings = created.model_copy(
        update={"storage": f"{endpoints};SharedAccessSignature={expired}"}
    )
    async with AzureStorage(settings, NEVER) as storage:
        with pytest.raises(errors.SetupError, match=r"the SAS token of .* expired on "):
            await storage.queue.receive(1, 30)


def token(**fields: str) -> str:
    known = {"sp": "rup", "sig": "c2lnbmF0dXJl", **fields}
    return "&".join(f"{name}={quote(value)}" for name, value in known.items())


def sentence(
    credential: Credential, permission: str, code: str, at: datetime = NOON
) -> str:
    answer = f"{code} (HTTP 403)"
    return refusal("the queue 'jobs'", credential, permission, answer, at)


def test_azures_clock_decides_whether_a_token_is_expired():
    credential = Credential("queue", token(se="2026-11-22T12:00:00Z"))
    before, after = (
        sentence(
            credential, "p", "AuthenticationFailed", NOON + timedelta(minutes=each)
        )
        for each in (-1, 1)
    )
    assert "expired" not in before
    assert "expired on 2026-11-22 12:00 UTC" in after


def test_the_tokens_of_a_revoked_policy_say_so():
    text = sentence(Credential("queue", "sig=x&si=spring"), "p", "AuthenticationFailed")
    assert "was revoked with its stored policy" in text


def test_the_tokens_of_a_broker_are_not_minted_by_hand():
    credential = Credential(
        "queue", token(se="2026-11-20T08:00:00Z"), is_from_broker=True
    )
    text = sentence(credential, "p", "AuthenticationFailed")
    assert text.startswith(
        "the SAS token of the queue 'jobs' expired on 2026-11-20 08:00 UTC"
    )
    assert "imagefleet keys" not in text


def test_a_permission_that_the_token_lacks_is_named_whatever_azure_calls_it():
    credential = Credential("queue", token(se="2099-01-01"))
    text = sentence(credential, "a", "AuthorizationFailure")
    assert "may not add messages" in text
    assert "`imagefleet keys mint load`" in text


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("AuthorizationFailure", "firewall"),
        ("AuthorizationSourceIPMismatch", "another IP address"),
        ("AuthorizationProtocolMismatch", "requires https"),
    ],
)
def test_other_refusals_have_their_own_reason(code: str, reason: str):
    assert reason in sentence(Credential("queue", token(se="2099-01-01")), "p", code)


@pytest.mark.parametrize(
    ("resource", "letter", "role"),
    [
        ("queue", "p", "Storage Queue Data Message Processor"),
        ("queue", "a", "Storage Queue Data Message Sender"),
        ("queue", "u", "Storage Queue Data Contributor"),
        ("blob", "c", "Storage Blob Data Contributor"),
        ("blob", "l", "Storage Blob Data Reader"),
        ("files", "r", "Storage Blob Data Reader"),
        ("files", "w", "Storage Blob Data Contributor"),
        ("queue", "", "Storage Queue Data Contributor"),
    ],
)
def test_an_identity_is_told_azures_role(resource, letter: str, role: str):
    credential = Credential(resource, is_identity=True)
    text = sentence(credential, letter, "AuthorizationPermissionMismatch")
    assert text.startswith("the pod's identity may not ")
    assert f"assign it the Azure role '{role}'" in text
    assert "imagefleet keys" not in text


def test_every_permission_of_every_role_has_words_and_a_role():
    for role in roles.ROLES.values():
        for resource in roles.RESOURCES:
            for letter in role.letters(resource):
                assert roles.explain(resource, letter) != [letter]
                assert role in roles.with_permission(resource, letter)
