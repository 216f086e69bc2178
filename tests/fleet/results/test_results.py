"""`imagefleet results`: every result once in every form, whatever the records hold."""

import asyncio
import dataclasses
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

import sent_jobs
from fleet.results.command import best
from imagefleet.keeping.rule import Keep
from imagefleet.records import reader
from imagefleet.records.catalog import RecordParts
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from in_process import Imagefleet

Add = Callable[..., Awaitable[Any]]

#: Sets the title, clears the screen, and is a formula to a spreadsheet.
HOSTILE = '=HYPERLINK("http://x")\x1b]0;owned\x07\x1b[2J\u202e'


@pytest.fixture
async def stored(
    local_settings: StorageSettings, store_images: Add, add_job: Add
) -> AsyncIterator[Storage]:
    """Three images, a failed and a cancelled job, and one that was replayed."""
    async with open_storage(local_settings) as storage:
        await store_images(storage, "0001", "0002", "0003", metadata={"order": 7})
        await add_job(storage, "0004", "failed", attempts=5)
        await add_job(storage, "0005", "cancelled", error=None, reason=None)
        await add_job(storage, "0006", "failed")
        await add_job(storage, "0006", "replayed")
        await sent_jobs.note(storage, "spring", 7, ids=(f"{n:04}" for n in range(1, 7)))
        yield storage


@pytest.fixture
def results(
    in_process: Imagefleet, local_settings: StorageSettings
) -> Callable[..., Any]:
    """Runs the command for the campaign `spring`, in a thread."""

    async def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        storage = ("spring", "--storage", local_settings.storage)
        result = await asyncio.to_thread(in_process, "results", *storage, *arguments)
        assert result.returncode == code, result.stderr
        return result

    return run


def lines_of(result: subprocess.CompletedProcess[str]) -> list[JSONDict]:
    return [json.loads(line) for line in result.stdout.splitlines()]


async def test_json_has_every_result_with_all_that_is_known(stored: Storage, results):
    found = lines_of(await results("--json"))
    images = found[:3]
    ended = sorted(found[3:], key=lambda each: str(each["id"]))

    assert [(each["id"], each["outcome"]) for each in images + ended] == [
        *((f"000{number}", "completed") for number in (1, 2, 3)),
        ("0004", "failed"),
        ("0005", "cancelled"),
    ]
    assert images[1] == {
        "outcome": "completed",
        "campaign": "spring",
        "id": "0002",
        "index": 0,
        "stage": 1,
        "prompt": "a house 0002, <lora:outline-style:0.8>",
        "negative_prompt": "blurry",
        "seed": 1,
        "model": "dreamshaper",
        "loras": [{"name": "outline-style", "weight": 0.8}],
        "embeddings": [],
        "sampler": "euler_a",
        "steps": 20,
        "cfg_scale": 7.5,
        "clip_skip": None,
        "width": 32,
        "height": 32,
        "mark": None,
        "scores": {},
        "dropped": [],
        "worker": "w1",
        "gpu": None,
        "seconds": 1.5,
        "attempts": 1,
        "at": "2026-11-01T12:00:01+00:00",
        "size_bytes": images[1]["size_bytes"],
        "blob": "spring/0002.png",
        "address": stored.blobs.address("spring/0002.png"),
        "pack": None,
        "offset": None,
        "error": None,
        "reason": None,
        "metadata": {"order": 7},
    }
    assert (ended[0]["error"], ended[0]["reason"], ended[0]["attempts"]) == (
        "MissingFileError",
        "there is no LoRA fox",
        5,
    )


async def test_a_filter_and_a_limit(stored: Storage, results):
    failed = lines_of(await results("--json", "--outcome", "failed"))
    both = lines_of(
        await results("--json", "--outcome", "failed", "--outcome", "cancelled")
    )
    two = lines_of(await results("--json", "--limit", "2"))

    assert [each["id"] for each in failed] == ["0004"]
    assert {each["id"] for each in both} == {"0004", "0005"}
    assert [each["id"] for each in two] == ["0001", "0002"]


async def test_people_see_counts_and_some_results(stored: Storage, results):
    result = await results("--limit", "2")

    shown = " ".join(result.stdout.split())
    for fact in (
        "jobs sent 7",
        "jobs queued or running 2",
        "images 3",
        "jobs failed 1",
    ):
        assert fact in shown
    assert "0002 1 32x32 20 1.5 w1 a house 0002" in shown
    assert "0003" not in shown
    assert "0004 failed MissingFileError 5 there is no LoRA fox" in shown
    assert "4 of 5 results shown: --limit COUNT" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--download", "a", "--outcome", "failed"), "--download is for images"),
    ],
)
async def test_options_that_do_not_go_together_are_one_line(
    stored: Storage, results, arguments: tuple[str, ...], says: str
):
    result = await results(*arguments, code=2)

    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


async def test_operations_do_not_grow_with_the_images(
    storage: Storage, store_images: Add
):
    (record,) = await store_images(storage, "0001")
    more = [
        record.model_copy(update={"id": f"{number}", "blob": f"spring/{number}.png"})
        for number in range(1_000)
    ]
    failed = record.model_copy(update={"outcome": "failed", "id": "0002", "blob": None})
    await RecordLog(storage.blobs, "w2").add([*more, failed])
    before = dataclasses.replace(storage.operations)

    found = [each async for each in reader.images(storage, "spring")]
    counts = await reader.counts(storage, "spring")

    assert (len(found), counts.images, counts.failed) == (1_001, 1_001, 1)
    reads = storage.operations.blob_reads - before.blob_reads
    looked_up, of_ends = 3, 1  # the failed job's image in each format; its shard
    assert reads == 2 + looked_up + of_ends + 3 + 1, (
        "all three shards to count, and the ledger"
    )
    assert storage.operations.blob_writes - before.blob_writes == 6, "listings"


def test_every_field_of_a_record_is_a_result_or_left_out_on_purpose():
    from imagefleet.records import columns

    of_jobs = {"body", "source", "images", "completes", "stages"}
    left_out = of_jobs | {
        "started_at",
        "start_up_seconds",
        "price_per_hour",
        "digest",
        "sha256",
        "proof",
        "keep",
        "phash",
    }
    assert set(Record.model_fields) - left_out == set(columns.COLUMNS) - {"address"}


async def test_a_hostile_record_controls_no_terminal(
    stored: Storage, results, store_images: Add
):
    await store_images(stored, "0009", prompt=HOSTILE, worker=HOSTILE, size_bytes=2**25)

    for arguments in ((), ("--json",)):
        assert not set((await results(*arguments)).stdout) & set("\x1b\x07\u202e")


async def test_the_best_are_sorted_once_and_not_with_each_part_that_is_read(
    monkeypatch,
):
    ranked = []
    monkeypatch.setattr(Keep, "rank", lambda _, scores: ranked.append(scores) or 0)
    moment = datetime(2026, 12, 1, tzinfo=UTC)
    image = Record(outcome="completed", id="a", at=moment, scores={"clip": 9})

    async def parts() -> RecordParts:
        for _ in range(50):
            yield [image]

    (found,) = [each async for each in best(parts(), Keep(minimum={"clip": 9}), 99)]
    assert len(found) == len(ranked) == 50
