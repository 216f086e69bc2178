"""`imagefleet keys` on Azurite: each token allows what it should and nothing else."""

import itertools
import json
import shlex
import stat
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs

import pytest

from fleet.campaigns import job
from fleet.campaigns.table import Campaigns
from fleet.keys import command as keys
from fleet.keys import mint
from fleet.monitor import command as monitor
from fleet.salad.groups import MAX_VALUE
from imagefleet import aio, cancelled, concurrency, errors
from imagefleet.records import reader
from imagefleet.records.log import RecordLog
from imagefleet.storage import dead_letter_queue
from imagefleet.storage.azure import sas
from imagefleet.storage.azure.roles import ROLES, Role
from imagefleet.storage.azure.storage import AzureStorage
from imagefleet.storage.dead_letter import FailedJob, Selection
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet, assert_refused
from tokens import by_tokens

LEASE_SECONDS = 30
ONE_HOUR = timedelta(hours=1)

#: A made-up account name and key.
REAL_ACCOUNT = (
    "DefaultEndpointsProtocol=https;AccountName=pictures;AccountKey=a2V5a2V5;"
    "EndpointSuffix=core.windows.net"
)


async def refused(request: Any) -> None:
    with pytest.raises(errors.SetupError, match=r"may not|there is no SAS token"):
        await request


# The permissions of each role, used as the role uses them


@pytest.mark.parametrize(
    ("role", "notices"),
    [(ROLES["load"], 0), (Role("load", "of before 0.4", queue="a"), 1)],
)
async def test_load_adds_messages_counts_them_and_reads_what_is_cancelled(
    azurite_settings: StorageSettings,
    owner: Storage,
    tmp_path,
    role: Role,
    notices: int,
):
    from loadgen import sources
    from loadgen.load import Load
    from loadgen.settings import LoadSettings

    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"prompt": "a fox"}\n{"prompt": "an owl"}\n')
    noticed: list[str] = []
    storage = AzureStorage(by_tokens(azurite_settings, role), concurrency.NEVER)
    async with storage:
        source = sources.open_source(str(jobs), count=None, seed=None)
        load = Load(
            storage,
            source,
            LoadSettings(),
            on_notice=noticed.append,
        )
        summary = await load.run(lambda _confirmed: None)
        assert summary.sent == 2
        assert len(noticed) == notices
        assert all("imagefleet keys mint load" in each for each in noticed)
        await refused(storage.queue.receive(1, LEASE_SECONDS))
        await refused(storage.queue.depth())
        await refused(storage.poison.send(["x"]))
        await refused(anext(storage.blobs.names()))
        await refused(anext(storage.files.names()))
    assert (await owner.queue.depth()).messages == 2
    assert (await reader.counts(owner, "default")).sent == (None if notices else 2)


async def test_a_monitor_reads_everything_and_changes_nothing(
    azurite_settings: StorageSettings, owner: Storage
):
    await owner.queue.send(["a job"])
    await owner.blobs.create("spring/fox.png", b"pixels", "image/png", {"job": "1"})
    async with AzureStorage(
        by_tokens(azurite_settings, ROLES["monitor"]), concurrency.NEVER
    ) as storage:
        await storage.check()
        campaigns = Campaigns(storage)
        found = await monitor.read_status(aio.Fleet(storage), None, campaigns)
        assert found["queue"]["messages"] == 1
        assert campaigns.refusal is None
        assert [each.name async for each in storage.blobs.records("spring/")] == [
            "spring/fox.png"
        ]
        assert await storage.blobs.read("spring/fox.png") == b"pixels"
        assert (await job.look_up(storage, "spring", "nobody"))[
            "state"
        ] == "queued or in flight"
        assert [name async for name in reader.campaigns(storage)] == []
        assert (await reader.counts(storage, "spring")).images == 0
        await refused(cancelled.cancel(storage, "spring"))
        await refused(storage.queue.send(["x"]))
        await refused(storage.queue.receive(1, LEASE_SECONDS))
        await refused(storage.poison.receive(1, LEASE_SECONDS))
        await refused(storage.blobs.create("owl.png", b"pixels", "image/png", {}))


async def test_an_operator_lists_replays_and_discards_failed_jobs(
    azurite_settings: StorageSettings, owner: Storage
):
    record = FailedJob(
        outcome="failed",
        id="j1",
        error="MissingFileError",
        reason="there is no LoRA",
        attempts=1,
        worker="w",
        at=datetime.now(UTC),
        body='{"prompt": "a fox"}',
    )
    records = [record.model_copy(update={"id": f"j{number}"}) for number in range(40)]
    await owner.poison.send(each.encode() for each in records)
    await RecordLog(owner.blobs, "w").add(records)
    async with AzureStorage(
        by_tokens(azurite_settings, ROLES["operator"]), concurrency.NEVER
    ) as storage:
        await storage.check()
        one = Selection(id="j1")
        everything = Selection()
        assert (await dead_letter_queue.discard(storage, one)).done == 1
        assert (await dead_letter_queue.replay(storage, everything)).done == 39
        assert (await owner.queue.depth()).messages == 39
        assert (await owner.poison.depth()).messages == 0
        await refused(storage.queue.receive(1, LEASE_SECONDS))
        await owner.blobs.create("owl.png", b"pixels", "image/png", {})
        await refused(storage.blobs.replace("owl.png", b"", "image/png", '"1"'))
        assert await storage.blobs.delete("owl.png")


@pytest.mark.usefixtures("cancel_at_once")
async def test_an_operator_cancels_a_campaign_and_does_not_purge(
    azurite_settings: StorageSettings,
    owner: Storage,
):
    await owner.queue.send(["a job"])
    async with AzureStorage(
        by_tokens(azurite_settings, ROLES["operator"]), concurrency.NEVER
    ) as storage:
        assert await cancelled.cancel(storage, "spring")
        with pytest.raises(errors.SetupError, match="takes the account key"):
            await storage.queue.clear()
    assert (await owner.queue.depth()).messages == 1


# Creating tokens


def test_azure_tokens_require_https_and_fit_into_saladclouds_variables():
    settings = StorageSettings(
        storage=REAL_ACCOUNT,
        queue="q" * 56,
        container="c" * 56,
        files_container="f" * 56,
    )
    for role, policy in itertools.product(ROLES.values(), (None, "p" * 16)):
        minted = mint.Minter(settings).mint(role, ONE_HOUR, policy)
        assert minted.storage == "https://pictures.blob.core.windows.net"
        for token in minted.fields.values():
            fields = parse_qs(token)
            assert fields["spr"] == ["https"]
            assert "st" not in fields, "a slow clock would reject it"
        assert len(minted.sas) < MAX_VALUE


def test_an_account_with_custom_domains_keeps_them():
    address = (
        "AccountName=pictures;AccountKey=a2V5a2V5;BlobEndpoint=https://pictures.example.com/;"
        "QueueEndpoint=https://jobs.example.com/"
    )
    minter = mint.Minter(StorageSettings(storage=address))
    assert minter.storage == (
        "BlobEndpoint=https://pictures.example.com;QueueEndpoint=https://jobs.example.com"
    )


def test_the_output_is_shell_commands_without_the_account_key(
    in_process: Imagefleet, monkeypatch
):
    monkeypatch.setenv("IMAGEFLEET_STORAGE", REAL_ACCOUNT)
    result = in_process("keys", "mint", "worker", "--queue", "spring")
    assert result.returncode == 0, result.stderr
    variables = {}
    for line in result.stdout.splitlines():
        export, assignment = shlex.split(line)
        assert export == "export"
        name, _, value = assignment.partition("=")
        variables[name] = value
    assert (
        variables.pop("IMAGEFLEET_STORAGE") == "https://pictures.blob.core.windows.net"
    )
    assert variables.pop("IMAGEFLEET_QUEUE") == "spring"
    assert variables.pop("IMAGEFLEET_CONTAINER") == "images"
    assert variables.pop("IMAGEFLEET_FILES_CONTAINER") == "files"
    tokens = json.loads(variables.pop("IMAGEFLEET_SAS"))
    assert {name: parse_qs(value)["sp"] for name, value in tokens.items()} == {
        "queue": ["rup"],
        "queue_high": ["rup"],
        "queue_low": ["rup"],
        "poison": ["a"],
        "blob": ["ac"],
        "packs": ["rc"],
        "files": ["r"],
    }
    assert not variables
    assert "create blobs, never overwrite one" in result.stderr
    assert "a2V5a2V5" not in result.stdout + result.stderr


def test_the_token_file_is_private_and_replaced_atomically(
    in_process: Imagefleet, tmp_path, monkeypatch
):
    monkeypatch.setenv("IMAGEFLEET_STORAGE", REAL_ACCOUNT)
    file = tmp_path / "tokens.json"
    file.write_text("the old ones")
    file.chmod(0o644)
    result = in_process("keys", "mint", "worker", "--file", str(file))
    assert result.returncode == 0, result.stderr
    assert "sig=" not in result.stdout + result.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]
    tokens = sas.read_tokens(file.read_bytes())
    assert tokens.ends_at is not None
    hours = (tokens.ends_at - datetime.now(UTC)) / ONE_HOUR
    assert keys.DEFAULT_HOURS - 0.1 < hours <= keys.DEFAULT_HOURS


def test_long_lived_tokens_come_with_a_warning(in_process: Imagefleet):
    arguments = ["keys", "mint", "worker", "--storage", REAL_ACCOUNT]
    assert "warning" not in in_process(*arguments).stderr
    assert (
        "warning: tokens for 30 days"
        in in_process(*arguments, "--token-hours", "720").stderr
    )
    assert in_process(*arguments, "--token-hours", "9000").returncode == 2


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("local:somewhere", "a local folder needs no tokens"),
        ("https://pictures.blob.core.windows.net", "signed with the account key"),
        (
            "BlobEndpoint=https://a.b;QueueEndpoint=https://c.d;SharedAccessSignature=sv=1&sig=x",
            "signed with the account key",
        ),
    ],
)
def test_tokens_need_an_account_key(
    in_process: Imagefleet, address: str, complaint: str
):
    assert_refused(
        in_process("keys", "mint", "worker", "--storage", address), complaint
    )
