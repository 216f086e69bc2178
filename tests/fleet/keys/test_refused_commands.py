"""A command whose tokens do not suffice names the role that does: on Azurite, for every role."""

import asyncio
import re
from datetime import UTC, datetime, timedelta

import pytest

from fleet.keys import mint
from imagefleet.records.log import RecordLog
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.dead_letter import FailedJob
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet

FAILED_JOB = FailedJob(
    outcome="failed",
    id="j1",
    campaign="spring",
    error="MissingFileError",
    reason="there is no LoRA",
    attempts=1,
    worker="w",
    at=datetime.now(UTC),
    body='{"prompt": "a fox"}',
)

#: Commands, and the roles whose tokens suffice.
COMMANDS: dict[tuple[str, ...], set[str]] = {
    ("load", "jobs.jsonl", "--restart"): {"load", "operator"},
    ("load", "loras.txt", "--check"): {"files", "monitor", "operator"},
    ("status",): {"monitor", "operator"},
    ("failed",): {"monitor", "operator"},
    ("failed", "spring/j1"): {"monitor", "operator"},
    ("replay", "spring/j1"): {"operator"},
    ("discard", "spring/j1", "--yes"): {"operator"},
    ("report", "spring", "--json"): {"monitor", "operator"},
    ("verify",): {"monitor", "operator"},
    ("redo", "--worker", "nobody"): {"operator"},
    ("files", "list", "lora"): {"files", "monitor", "operator"},
}


@pytest.fixture
def with_a_failed_job(azurite_settings: StorageSettings, tmp_path) -> StorageSettings:
    async def fill() -> None:
        async with open_storage(azurite_settings) as storage:
            await storage.create()
            await storage.poison.send([FAILED_JOB.encode()])
            await RecordLog(storage.blobs, "w").add([FAILED_JOB])

    (tmp_path / "jobs.jsonl").write_text('{"prompt": "a fox"}\n')
    (tmp_path / "loras.txt").write_text("a <lora:fox:1>\n")
    asyncio.run(fill())
    return azurite_settings


def flags(settings: StorageSettings, role: str, life: timedelta) -> list[str]:
    minted = mint.Minter(settings).mint(ROLES[role], life)
    found = ["--storage", minted.storage, "--queue", settings.queue]
    found += [
        "--container",
        settings.container,
        "--files-container",
        settings.files_container,
    ]
    return [*found, "--sas", minted.sas]


@pytest.mark.parametrize("role", ROLES)
def test_a_role_that_does_not_suffice_is_told_of_one_that_does(
    with_a_failed_job: StorageSettings, in_process: Imagefleet, role: str
):
    tokens = flags(with_a_failed_job, role, timedelta(hours=1))
    for command, able in COMMANDS.items():
        result = in_process(*command, *tokens)
        if role in able:
            assert "imagefleet keys" not in result.stderr, (command, result.stderr)
            continue
        assert result.returncode == 2, (command, result.stdout, result.stderr)
        assert len(result.stderr.splitlines()) == 1, result.stderr
        named = re.findall(r"`imagefleet keys mint (\w+)`", result.stderr)
        assert able & set(named), (command, result.stderr)
        assert "sig=" not in result.stderr


@pytest.mark.parametrize("role", ROLES)
def test_every_command_with_expired_tokens_says_when_they_expired(
    with_a_failed_job: StorageSettings, in_process: Imagefleet, role: str
):
    tokens = flags(with_a_failed_job, role, timedelta(days=-2))
    ended = datetime.now(UTC) - timedelta(days=2)
    for command, able in COMMANDS.items():
        if (role == "files") != ("files" in able):
            continue  # there is no token that could have expired
        result = in_process(*command, *tokens)
        assert result.returncode == 2
        assert re.search(rf"expired on {ended:%Y-%m-%d} \d\d:\d\d UTC", result.stderr)
        assert "mint others: `imagefleet keys mint`" in result.stderr
        assert len(result.stderr.splitlines()) == 1
