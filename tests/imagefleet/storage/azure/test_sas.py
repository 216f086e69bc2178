"""SAS tokens that change while a process runs."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import SecretStr, ValidationError

import polling
from fleet.keys import mint as keys_mint
from imagefleet import concurrency, errors
from imagefleet.storage.azure import credentials, sas
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.azure.storage import AzureStorage
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.proofs import Prover
from imagefleet.storage.settings import StorageSettings

LEASE_SECONDS = 30
ONE_HOUR = timedelta(hours=1)
ENDED = -timedelta(minutes=5)

Mint = Callable[..., str]


@pytest.fixture
def mint(azurite_settings: StorageSettings) -> Mint:
    """Mints a worker's tokens as JSON."""
    minter = keys_mint.Minter(azurite_settings)

    def mint_tokens(life: timedelta = ONE_HOUR) -> str:
        return json.dumps(minter.mint(ROLES["worker"], life).record)

    return mint_tokens


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "tokens.json"


@pytest.fixture
def settings(azurite_settings: StorageSettings, file: Path) -> StorageSettings:
    """Settings of a worker whose tokens are in the file."""
    storage = keys_mint.Minter(azurite_settings).storage
    return azurite_settings.model_copy(update={"storage": storage, "sas_file": file})


@pytest.fixture
def broker_settings(settings: StorageSettings, broker) -> StorageSettings:
    return settings.model_copy(update={"sas_file": None, "broker_url": broker.url})


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch) -> None:
    """Checks the file on each request."""
    monkeypatch.setattr(sas, "FILE_CHECK_SECONDS", 0.0)


async def identity_token() -> str:
    return "a.signed.token"


def opened(settings: StorageSettings) -> AzureStorage:
    """The storage of a worker on SaladCloud, without retries."""
    return AzureStorage(settings, concurrency.NEVER, identity_token=identity_token)


def answer(body: str, **headers: str) -> web.Response:
    return web.Response(text=body, content_type="application/json", headers=headers)


def tokens_of(storage: AzureStorage) -> credentials.RotatingTokens:
    rotating = storage._credentials._rotating
    assert isinstance(rotating, credentials.RotatingTokens)
    return rotating


def expire(storage: AzureStorage, mint: Mint) -> None:
    """Gives it tokens whose time is over in place of those in force, as if it had passed."""
    ended = sas.read_tokens(mint(ENDED))
    for key, credential in tokens_of(storage).credentials.items():
        if token := ended.of(*key):
            credential.update(token)


def replace(file: Path, text: str | None) -> None:
    """Replaces the file atomically, as `imagefleet keys --file` does; None removes it."""
    if text is None:
        file.unlink(missing_ok=True)
        return
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


# A file


async def test_a_request_with_expired_tokens_fails_until_there_are_new_ones(
    owner: Storage, settings: StorageSettings, file: Path, mint: Mint
):
    replace(file, mint())
    async with opened(settings) as storage:
        await storage.check()
        await owner.queue.send(["a job"])
        (message,) = await storage.queue.receive(1, LEASE_SECONDS)
        expire(storage, mint)
        requests: list[Callable[[], Any]] = [
            lambda: storage.queue.renew(message, LEASE_SECONDS),
            lambda: storage.queue.receive(1, LEASE_SECONDS),
            lambda: storage.poison.send(["a job"]),
            lambda: storage.blobs.create("fox.png", b"pixels", "image/png", {}),
        ]
        for request in requests:
            with pytest.raises(
                errors.NoAccessError,
                match=r"expired on .*waiting for the file .*tokens\.json",
            ):
                await request()
        replace(file, mint())
        message = await storage.queue.renew(message, LEASE_SECONDS)
        assert await storage.blobs.create("fox.png", b"pixels", "image/png", {})
        await storage.queue.delete(message)
    assert (await owner.poison.depth()).messages == 0


async def test_new_tokens_are_used_before_the_old_ones_expire(
    owner: Storage, settings: StorageSettings, file: Path, mint: Mint, caplog
):
    caplog.set_level(logging.INFO, "imagefleet")
    replace(file, mint())
    async with opened(settings) as storage:
        await storage.check()
        first = caplog.text.count("new SAS tokens from the file")
        replace(file, mint(2 * ONE_HOUR))
        await storage.queue.depth()
        await polling.until(
            lambda: caplog.text.count("new SAS tokens from the file") == first + 1
        )
        for _ in range(3):
            await storage.queue.depth()
    assert caplog.text.count("new SAS tokens from the file") == first + 1
    assert "sig=" not in caplog.text


async def test_an_updated_kubernetes_secret_is_read(
    owner: Storage, settings: StorageSettings, file: Path, tmp_path, mint: Mint
):
    data = tmp_path / "..data"

    def mount(folder: Path, text: str) -> None:
        folder.mkdir()
        (folder / file.name).write_text(text)
        (tmp_path / "..new").symlink_to(folder)
        (tmp_path / "..new").replace(data)

    mount(tmp_path / "..1", mint())
    await asyncio.to_thread(file.symlink_to, data / file.name)
    async with opened(settings) as storage:
        await storage.check()
        expire(storage, mint)
        mount(tmp_path / "..2", mint(2 * ONE_HOUR))
        await storage.queue.depth()


async def test_a_broken_file_leaves_the_last_good_tokens_and_is_logged_once(
    owner: Storage,
    settings: StorageSettings,
    file: Path,
    mint: Mint,
    caplog,
):
    for broken in (
        '{"queue": "sv=1&si',
        '{"queue": "sv=1&se=2"}',
        '{"queue": "sig=a b"}',
        "",
        "[]",
        "{}",
        None,
    ):
        caplog.clear()
        replace(file, mint())
        async with opened(settings) as storage:
            await storage.check()
            replace(file, broken)
            for _ in range(5):
                await storage.queue.depth()
                await tokens_of(storage)._refresh()
        warnings = [each for each in caplog.messages if "holds no SAS tokens" in each]
        assert len(warnings) == 1, broken
        assert "sv=1" not in warnings[0]


@pytest.mark.parametrize("text", [None, "", '{"queue": "no token"}'])
async def test_a_broken_file_at_the_start_is_a_setup_error(
    settings: StorageSettings, file: Path, text: str | None
):
    replace(file, text)
    async with opened(settings) as storage:
        with pytest.raises(
            errors.SetupError, match=r"tokens\.json holds no SAS tokens: \w"
        ):
            await storage.check()


async def test_tokens_that_were_never_accepted_are_a_setup_error(
    owner: Storage, settings: StorageSettings, file: Path, mint: Mint
):
    for text in (mint(ENDED), mint().replace("sig=", "sig=abc")):
        replace(file, text)
        async with opened(settings) as storage:
            with pytest.raises(
                errors.SetupError, match=r"\(the token came from the file"
            ):
                await storage.check()


async def test_a_missing_permission_is_not_waited_for(
    owner: Storage, settings: StorageSettings, file: Path, mint: Mint
):
    replace(file, mint())
    async with opened(settings) as storage:
        await storage.check()
        with pytest.raises(errors.SetupError, match="AuthorizationPermissionMismatch"):
            await storage.queue.send(["a job"])


# A broker


async def test_a_broker_is_asked_once_while_its_tokens_are_valid(
    owner: Storage, broker_settings: StorageSettings, broker, mint: Mint
):
    broker.answer = lambda: answer(mint())
    async with opened(broker_settings) as storage:
        await asyncio.gather(*(storage.queue.depth() for _ in range(20)))
        await storage.check()
    assert broker.identity_tokens == ["a.signed.token"]


async def test_a_broker_is_asked_again_before_its_tokens_expire(
    owner: Storage, broker_settings: StorageSettings, broker, mint: Mint
):
    broker.answer = lambda: answer(mint())
    async with opened(broker_settings) as storage:
        await storage.check()
        source = tokens_of(storage).source
        assert 1_700 < source.due_at - time.monotonic() < 2_800
        source.due_at = 0.0  # as if so much time had passed
        await storage.queue.depth()  # without retries, a single refusal would be raised
        await polling.until(lambda: len(broker.identity_tokens) == 2)
        await tokens_of(storage)._refreshing  # type: ignore[misc]
        for _ in range(5):
            await storage.queue.depth()
    assert len(broker.identity_tokens) == 2


async def test_a_brokers_key_proves_what_its_machine_stores_and_is_not_shown(
    owner: Storage,
    broker_settings: StorageSettings,
    broker,
    mint: Mint,
    caplog,
):
    caplog.set_level("DEBUG")
    machine = "0d8f5c1e-77a2-4c1b-9a3e-5b2f0e7d9c11"
    key = "5ec2e7" * 10
    broker.answer = lambda: answer(
        json.dumps(json.loads(mint()) | {"machine": machine, "machine_key": key})
    )
    async with opened(broker_settings) as storage:
        assert storage.prover is None, "before the first tokens"
        await storage.check()
        assert storage.prover == Prover(machine, key)
        assert (
            key not in repr((storage.prover, tokens_of(storage).tokens)) + caplog.text
        )
        broker.answer = lambda: answer(
            json.dumps(json.loads(mint()) | {"machine_key": [key]})
        )
        tokens_of(storage).source.due_at = 0.0
        await storage.queue.depth()
        await polling.until(lambda: "invalid answer of the broker" in caplog.text)
    assert key not in caplog.text


async def test_a_wrong_clock_does_not_shorten_a_tokens_life(
    owner: Storage, broker_settings: StorageSettings, broker, mint: Mint
):
    tomorrow = datetime.now(UTC) + timedelta(
        days=1
    )  # this machine's clock is a day behind
    text = json.loads(mint()) | {"expires_at": (tomorrow + ONE_HOUR).isoformat()}
    broker.answer = lambda: answer(
        json.dumps(text), Date=tomorrow.strftime("%a, %d %b %Y %H:%M:%S GMT")
    )
    source = sas.TokenBroker(broker.url, identity_token)
    await source.read()
    assert 1_700 < source.due_at - time.monotonic() < 2_800


async def test_while_a_broker_is_down_the_old_tokens_are_used_until_they_expire(
    owner: Storage,
    broker_settings: StorageSettings,
    broker,
    mint: Mint,
    caplog,
    monkeypatch,
):
    monkeypatch.setattr(sas, "FIRST_PAUSE_SECONDS", 600.0)
    monkeypatch.setattr(sas, "LONGEST_PAUSE_SECONDS", 600.0)
    broker.answer = lambda: answer(mint())
    async with opened(broker_settings) as storage:
        await storage.check()
        broker.answer = lambda: web.Response(status=503)
        tokens_of(storage).source.due_at = 0.0
        await storage.queue.depth()
        await polling.until(lambda: "the broker answered HTTP 503" in caplog.text)
        await storage.queue.depth()
        expire(storage, mint)
        asked = len(broker.identity_tokens)
        for _ in range(20):
            with pytest.raises(errors.NoAccessError, match="waiting for the broker"):
                await storage.queue.depth()
        assert len(broker.identity_tokens) == asked, (
            "requests to a broker that is down back off"
        )
        broker.answer = lambda: answer(mint(2 * ONE_HOUR))
        tokens_of(storage).source.retry_at = 0.0  # the pause is over
        await storage.queue.depth()


async def test_revoked_tokens_are_replaced_at_once(
    owner: Storage, broker_settings: StorageSettings, broker, mint: Mint
):
    answers = iter((mint(), mint(2 * ONE_HOUR)))
    broker.answer = lambda: answer(next(answers))
    async with opened(broker_settings) as storage:
        await storage.check()
        tokens_of(storage).source.retry_at = 0.0  # the first pause is over
        expire(storage, mint)
        await storage.queue.depth()
    assert len(broker.identity_tokens) == 2


async def test_repeated_refusals_of_the_broker_are_a_setup_error(
    owner: Storage, broker_settings: StorageSettings, broker
):
    policy = concurrency.RetryPolicy(
        tries=6, first_wait_seconds=0.01, on_retry=lambda _: None
    )
    for status in (401, 403, 404, 302):
        broker.identity_tokens.clear()
        broker.answer = lambda status=status: web.Response(
            status=status, headers={"Location": "/elsewhere"}
        )
        async with AzureStorage(
            broker_settings, policy, identity_token=identity_token
        ) as storage:
            with pytest.raises(
                errors.SetupError, match=f"refuses this worker: HTTP {status}"
            ):
                await storage.check()
        assert len(broker.identity_tokens) == 3


async def test_an_invalid_answer_of_the_broker_is_a_transient_error(
    broker_settings: StorageSettings, broker
):
    for body in ("<html>", '{"queue": "x"}', "null", ""):
        broker.answer = lambda body=body: answer(body)
        async with opened(broker_settings) as storage:
            with pytest.raises(
                errors.TransientError, match="invalid answer of the broker"
            ):
                await storage.check()


async def test_the_identity_token_is_not_sent_to_a_broker_with_an_untrusted_certificate(
    broker_settings: StorageSettings, broker, monkeypatch
):
    monkeypatch.delenv("SSL_CERT_FILE")
    async with opened(broker_settings) as storage:
        with pytest.raises(
            errors.TransientError, match=r"broker: the certificate .* SSL_CERT_FILE"
        ):
            await storage.check()
    assert broker.identity_tokens == []


@pytest.mark.parametrize(
    "error", [errors.TransientError("no answer"), OSError("no route")]
)
async def test_a_missing_identity_token_is_a_transient_error(
    broker_settings: StorageSettings, error: Exception
):
    async def no_identity_token() -> str:
        raise error

    async with AzureStorage(
        broker_settings, concurrency.NEVER, identity_token=no_identity_token
    ) as storage:
        with pytest.raises(errors.TransientError, match="this node's identity token"):
            await storage.check()


# Settings


@pytest.mark.parametrize(
    "url",
    [
        "http://broker.example/tokens",
        "https://user:word@broker.example",
        "broker.example",
    ],
)
def test_a_broker_url_must_be_https_without_a_password(url: str):
    with pytest.raises(ValidationError):
        StorageSettings(broker_url=url)


@pytest.mark.parametrize(
    "two",
    [
        {"sas_file": Path("tokens.json"), "broker_url": "https://broker.example"},
        {"sas_file": Path("tokens.json"), "sas": SecretStr("sig=x")},
        {"sas": SecretStr("sig=x"), "broker_url": "https://broker.example"},
    ],
)
def test_two_sources_of_tokens_are_a_setup_error(two: dict[str, Any]):
    settings = StorageSettings(storage="https://pictures.blob.core.windows.net", **two)
    with pytest.raises(errors.SetupError, match="keep one"):
        open_storage(settings, identity_token=identity_token)


def test_a_broker_needs_an_identity_token():
    settings = StorageSettings(
        storage="https://pictures.blob.core.windows.net",
        broker_url="https://broker.example",
    )
    with pytest.raises(errors.SetupError, match="for workers on SaladCloud"):
        open_storage(settings)


def test_tokens_expire_with_the_first_of_them():
    tokens = sas.read_tokens(
        '{"queue": "?se=2026-11-22T10%3A00%3A00Z&sig=x", "poison": "se=2026-11-22&sig=y"}'
    )
    assert tokens.ends_at == datetime(2026, 11, 22, tzinfo=UTC)
    assert tokens.of("queue") == "se=2026-11-22T10%3A00%3A00Z&sig=x"
    assert tokens.of("blob") == ""
    assert "sig" not in repr(tokens)
