"""The command: its secret, its address, its state, and how it ends."""

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest
from standardwebhooks import Webhook

import polling
import sent_jobs
from cli import console
from fleet.webhooks.endpoint import read_secrets, signed_headers
from imagefleet.records.record import Record
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet, assert_refused
from stored_images import ImageLog

SECRETS = [f"whsec_{base64.b64encode(bytes([n]) * 24).decode()}" for n in range(2)]

URL = (
    "webhooks",
    "--url",
    "https://example.com/hook?token=T0ken",
    "--secret-file",
    "secret",
)


@pytest.fixture
def jobs(tmp_path) -> Path:
    """A storage with three jobs that have ended, and a secret."""
    (tmp_path / "secret").write_text(f"{SECRETS[0]}\n")
    address = f"local:{tmp_path / 'imagefleet-data'}"

    async def prepare() -> None:
        async with open_storage(StorageSettings(storage=address)) as storage:
            await storage.create()
            log = ImageLog(storage.blobs, "w1")
            await sent_jobs.note(
                storage, "spring", 4, ids=(f"job-{n}" for n in range(3))
            )
            await log.add(
                Record(
                    outcome="completed",
                    id=f"job-{number}",
                    campaign="spring",
                    at=datetime.now(UTC),
                    blob=f"spring/job-{number}.png",
                )
                for number in range(3)
            )

    asyncio.run(prepare())
    return tmp_path


def test_both_secrets_sign_while_one_replaces_the_other(tmp_path):
    (tmp_path / "secret").write_text("\n".join(SECRETS))
    now = int(datetime.now(UTC).timestamp())
    secrets = read_secrets(tmp_path / "secret")
    headers = signed_headers(secrets, "msg_1", b'{"a":"\xc3\xbc"}', now)
    for secret in SECRETS:
        assert Webhook(secret).verify(b'{"a":"\xc3\xbc"}', headers) == {"a": "ü"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no secret"),
        ("hunter2hunter2hunter2hunter2", "should be whsec_"),
        ("whsec_hunter2", "should be whsec_"),
        (f"whsec_{base64.b64encode(b'hunter2' * 3).decode()}", "24 to 64 bytes"),
    ],
)
def test_a_secret_that_is_none_is_not_quoted(
    in_process: Imagefleet, tmp_path, text: str, reason: str
):
    (tmp_path / "secret").write_text(text)
    ended = in_process(*URL)
    assert_refused(ended, reason)
    assert not text or text not in ended.stderr


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/hook",
        "http://127.0.0.1.example.com",
        "ftp://example.com",
        "x",
    ],
)
def test_only_this_machine_gets_webhooks_without_tls(
    in_process: Imagefleet, tmp_path, url: str
):
    ended = in_process("webhooks", "--url", url, "--secret-file", "secret")
    assert_refused(ended, "https://")


def test_what_no_campaign_is_called_is_refused_not_waited_for(
    jobs: Path, in_process: Imagefleet
):
    assert_refused(in_process(*URL, "spring 2026", "--once"), "CAMPAIGN: use 1 to 128")


async def test_the_service_sends_until_it_is_stopped(
    jobs: Path, receiver, unused_port: int
):
    receiver.secret = SECRETS[0]
    command = ["--url", receiver.url, "--secret-file", "secret", "--each-job"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "fleet.entry",
        "webhooks",
        *command,
        "--port",
        str(unused_port),
        cwd=jobs,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stderr=subprocess.PIPE,
    )
    await polling.until(lambda: len(receiver.events) >= 3)
    async with aiohttp.ClientSession() as client:
        page = await (
            await client.get(f"http://127.0.0.1:{unused_port}/metrics")
        ).text()
    process.send_signal(signal.SIGTERM)
    _, logged = await process.communicate()
    assert process.returncode == console.EXIT_DONE, logged
    assert (
        'imagefleet_webhook_attempts_total{fleet="imagefleet-data/jobs",outcome='
        in page
    )
    lines = [json.loads(line) for line in logged.splitlines()]
    assert "webhook_delivered" in {each["action"] for each in lines}
    assert b"token=x" not in logged
    state = json.loads((jobs / "webhooks.json").read_text())
    assert len(state["position"]) == 1
    assert not state.get("waiting")


def test_a_receiver_that_is_gone_ends_the_service(
    jobs: Path, receiver, in_process: Imagefleet
):
    receiver.secret = SECRETS[0]
    command = (
        "webhooks",
        "--url",
        receiver.url,
        "--secret-file",
        "secret",
        "--each-job",
        "--once",
    )
    receiver.always = 410
    ended = in_process(*command)
    assert_refused(ended, "410 Gone")
    assert receiver.requests.total() == 3
    receiver.always = 204
    ended = in_process(*command)
    assert ended.returncode == console.EXIT_DONE, ended.stderr
    assert len(receiver.events) == 3
    moved = (
        "webhooks",
        "--url",
        "https://example.com",
        "--secret-file",
        "secret",
        "--once",
    )
    ended = in_process(*moved)
    assert "is the state for http://127.0.0.1" in ended.stderr


def test_only_one_service_has_the_state(jobs: Path, in_process: Imagefleet):
    with console.only_one(jobs / "webhooks.json"):
        ended = in_process(*URL)
    assert_refused(ended, "another `imagefleet` is at work with")
