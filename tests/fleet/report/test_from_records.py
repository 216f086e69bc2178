"""The report from the workers' records: no image is listed, and no record is trusted."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import sent_jobs
from fleet.keys import mint
from fleet.report import records as report_records
from imagefleet.job.message import Job
from imagefleet.records.log import RecordLog, Totals, shard_part
from imagefleet.records.record import UNKNOWN_WORKER, Record
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import BlobRecord
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from in_process import Imagefleet
from worker.jobs import stored

Add = Callable[..., Awaitable[Any]]

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)

LINE = {
    "outcome": "completed",
    "id": "x",
    "campaign": "spring",
    "at": "2026-11-01T12:00:00Z",
    "blob": "spring/x.png",
    "seconds": 2.0,
    "worker": "w9",
}

HOSTILE: JSONDict = {
    "seconds": 1e300,
    "price_per_hour": 1e308,
    "start_up_seconds": -1,
    "attempts": 10**400,
    "id": "../../etc/passwd",
    "blob": "-replaced/spring/x.png",
    "at": "0001-01-01T00:00:00+14:00",
    "started_at": "9999-12-31T23:59:59-14:00",
    "campaign": "autumn",
    "size_bytes": 2**80,
    "worker": "w" * 5_000,
    "index": -1,
}


async def report(
    in_process: Imagefleet,
    settings: StorageSettings,
    *arguments: str,
    campaign: str = "spring",
) -> tuple[JSONDict, str, str]:
    """The command's figures, its page and its warnings."""
    result = await asyncio.to_thread(
        in_process,
        "report",
        campaign,
        "--storage",
        settings.storage,
        "--queue",
        settings.queue,
        "--container",
        settings.container,
        "--files-container",
        settings.files_container,
        "--json-file",
        "figures.json",
        *arguments,
    )
    assert result.returncode == 0, result.stderr
    texts = [text_of(name) for name in ("figures.json", f"{campaign}-report.html")]
    return json.loads(texts[0], parse_constant=pytest.fail), texts[1], result.stderr


def text_of(name: str) -> str:
    return Path(name).read_text()


async def test_images_are_counted_by_model(
    storage: Storage,
    storage_settings: StorageSettings,
    in_process: Imagefleet,
    store_images: Add,
):
    await store_images(storage, "0001", model="<b>red")
    _, page, _ = await report(in_process, storage_settings)
    assert "<h2>Models</h2>" not in page, "there is one"
    await store_images(storage, "0002", "0003", model="blue")
    figures, page, _ = await report(in_process, storage_settings)
    counted = [(each["name"], each["images"]) for each in figures["models"]]
    assert counted == [("blue", 2), ("<b>red", 1)]
    assert "<h2>Models</h2>" in page
    assert "&lt;b&gt;red" in page


async def test_a_workers_cost_is_split_between_its_models(
    storage: Storage, storage_settings: StorageSettings, in_process: Imagefleet
):
    """By its time: SDXL's images take longer, and a change of models is the next one's cost."""
    known = LINE | {"seconds": 4.0, "price_per_hour": 3.6, "start_up_seconds": 30.0}
    stored = [("red", "00:00"), ("red", "00:02"), ("blue", "01:00"), ("blue", "01:20")]
    lines = [
        {**known, "model": model, "at": f"2026-11-01T12:{at}Z"} for model, at in stored
    ]
    lines += [{**known, "model": "red", "at": "2026-11-01T12:01:21Z"}]
    lines += [{**LINE, "model": "grey", "worker": "w1", "seconds": 4.0}]
    records = [
        Record.model_validate(
            {**line, "id": str(number), "blob": f"spring/{number}.png"}
        )
        for number, line in enumerate(lines)
    ]
    await storage.create()
    await RecordLog(storage.blobs, "w9").add(records)

    figures, page, _ = await report(in_process, storage_settings, "--limit", "0")

    assert page.count('<td data-name="images per dollar"') == len(figures["models"])
    red, blue, grey = figures["models"]
    assert (red["name"], red["gpu_seconds"]) == ("red", 30 + 4 + 2 + 1)
    assert (blue["name"], blue["gpu_seconds"]) == ("blue", 78)
    worker = next(each for each in figures["workers"] if each["name"] == "w9")
    assert red["gpu_dollars"] + blue["gpu_dollars"] == pytest.approx(
        worker["gpu_dollars"]
    )
    assert blue["images_per_dollar_gpu_only"] == pytest.approx(2 / 0.078)
    assert (grey["gpu_seconds"], grey["gpu_dollars"]) == (4, None), (
        "its price is not known"
    )


async def test_what_redo_has_replaced_and_what_was_drawn_twice_was_paid_and_has_rows_of_its_own(
    storage: Storage,
    storage_settings: StorageSettings,
    in_process: Imagefleet,
    store_images: Add,
):
    bad = {"worker": "bad", "price_per_hour": 3.6, "start_up_seconds": 10}
    good = {**bad, "worker": "good", "price_per_hour": 1.8, "started_at": NOON}
    wrong = await store_images(storage, *(f"{number:04}" for number in range(9)), **bad)
    notes = [
        each.model_copy(update={"outcome": "replaced", "at": NOON, "source": "journal"})
        for each in wrong[:6]
    ]
    # Stored by workers that were killed before they had written it down; of one there is nothing.
    lost = [
        {"id": "lost", "worker": each, "blob": f"spring/{each}.png"}
        for each in ("bad", "gone")
    ]
    notes += [notes[0].model_copy(update=each) for each in lost]
    await RecordLog(storage.files, "redo").add(notes)
    for each in wrong[:6]:
        assert each.blob is not None
        await storage.blobs.delete(each.blob)
    await store_images(storage, *(f"{number:04}" for number in range(6)), **good)
    doubled = wrong[8].model_copy(update={"worker": "late", "started_at": NOON})
    await RecordLog(storage.blobs, "late").add([doubled, wrong[7]], again=True)

    figures, page, _ = await report(in_process, storage_settings)

    seconds = {each["name"]: each["seconds"] for each in figures["workers"]}
    assert seconds == {"bad": 10 + 1.5 + 8, "good": 10 + 1.5 + 5, "late": 10 + 1.5}
    kept = {
        each["name"]: (each["images"], each["replaced"], each["doubled"])
        for each in figures["workers"]
    }
    assert kept == {"bad": (3, 7, 0), "good": (6, 0, 0), "late": (0, 0, 1)}
    assert figures["images_replaced"] == 7 + 1
    money = figures["money"]
    assert money["gpu_dollars"] == pytest.approx(
        (19.5 * 3.6 + 16.5 * 1.8 + 11.5 * 3.6) / 3600
    )
    assert money["images_per_dollar_gpu_only"] == pytest.approx(
        9 / money["gpu_dollars"]
    )
    split = money["split"]
    assert sum(split.values()) == pytest.approx(money["dollars"], rel=1e-9)
    assert split["images_replaced"] == pytest.approx(7 / 10 * 9.5 * 3.6 / 3600)
    assert split["images_doubled"] == pytest.approx(1.5 * 3.6 / 3600)
    assert split["start_up"] == pytest.approx((10 * 3.6 + 10 * 1.8 + 10 * 3.6) / 3600)
    assert "images replaced" in page
    assert '<td data-name="replaced or doubled" class="number">7</td>' in page


async def test_what_a_killed_worker_had_stored_is_its_own_however_often_it_is_found(
    storage: Storage, storage_settings: StorageSettings, in_process: Imagefleet
):
    """The images of a worker that was killed, whose records others read back from the pictures."""
    await storage.create()
    killed = {
        "worker": "killed",
        "started_at": storage.blobs.clock.now().isoformat(timespec="milliseconds"),
        "start_up_seconds": "30.000",
        "price_per_hour": "0.36",
        "seconds": "2.000",
    }
    jobs = [Job(prompt="a house", id=name, campaign="spring", seed=1) for name in "abc"]
    for job in jobs:
        told = {**killed, "job": str(job.id), "digest": job.stage_digest}
        await storage.blobs.create(job.blob_name(0), b"...", "image/png", told)
    known, _ = await stored.find_stored(storage.blobs, jobs[0], "m", [0])
    await RecordLog(storage.blobs, "killed").add(known)
    for finder in ("w2", "w3"):
        for job in jobs:
            found, _ = await stored.find_stored(storage.blobs, job, "m", [0])
            await RecordLog(storage.blobs, finder).add(found, again=True)

    figures, _, _ = await report(in_process, storage_settings)

    (worker,) = figures["workers"]
    assert (worker["images"], worker["replaced"], worker["doubled"]) == (3, 0, 0)
    assert worker["start_up_seconds"] == 30
    last_at = max(
        [(await storage.blobs.record(job.blob_name(0))).created_at for job in jobs]
    )
    assert datetime.fromisoformat(worker["last_image_at"]) == last_at
    assert figures["image_bytes"] == 9
    assert figures["money"]["split"]["images_doubled"] == 0

    # `redo` has replaced one that others alone have a record of.
    (again,) = found
    note = again.model_copy(update={"outcome": "replaced", "source": "journal"})
    await RecordLog(storage.files, "redo").add([note])
    await storage.blobs.delete(jobs[2].blob_name(0))
    figures, _, _ = await report(in_process, storage_settings)
    (worker,) = figures["workers"]
    assert (worker["images"], worker["replaced"], worker["doubled"]) == (2, 1, 0)


async def test_the_reports_of_several_campaigns_add_up_to_what_their_workers_cost(
    storage: Storage,
    storage_settings: StorageSettings,
    in_process: Imagefleet,
    store_images: Add,
):
    """One after the other, and mixed: the start-up is paid once, and no second twice.

    Half of the third one's jobs keep no image.
    """
    known = {"start_up_seconds": 100, "seconds": 2.0}
    w1 = {**known, "worker": "w1", "price_per_hour": 0.36}
    w2 = {**known, "worker": "w2", "price_per_hour": 3.6}
    drawn = [("spring", w1, second) for second in range(50)]
    drawn += [("summer", w1, second) for second in range(60, 100)]
    mixed = ["spring", "summer", "autumn", "autumn"]
    drawn += [(mixed[second % 4], w2, second) for second in range(2, 42)]
    for place, (campaign, of_worker, second) in enumerate(drawn):
        at = NOON + timedelta(seconds=second)
        name = f"{place:04}"
        blob = f"{campaign}/{name}.png"
        is_dropped = of_worker is w2 and second % 4 == 3
        written = Record.model_validate(
            {
                **LINE,
                **of_worker,
                "id": name,
                "campaign": campaign,
                "blob": blob,
                "at": at,
            }
            | ({"outcome": "dropped", "blob": None} if is_dropped else {})
        )
        await storage.create()
        await RecordLog(storage.blobs, of_worker["worker"]).add([written])
        await sent_jobs.note(storage, campaign, 1, ids=[name])
    made_up = written.model_copy(
        update={"campaign": "winter", "blob": f"winter/{name}.png"}
    )
    await RecordLog(storage.blobs, "w2").add([made_up])

    told = {}
    for campaign in ("spring", "summer", "autumn"):
        figures, _, _ = await report(in_process, storage_settings, campaign=campaign)
        told[campaign] = figures
    seconds = {
        (campaign, worker["name"]): worker["seconds"]
        for campaign, figures in told.items()
        for worker in figures["workers"]
    }
    assert seconds["spring", "w1"] == 100 + 2 + 49
    assert seconds["summer", "w1"] == 50
    assert sum(seconds[each, "w2"] for each in told) == pytest.approx(100 + 2 + 39)
    # The first image, and all that is before it, is autumn's.
    assert seconds["autumn", "w2"] == pytest.approx(100 + 2 + 20 - 1)
    paid = (201 * 0.36 + 141 * 3.6) / 3600
    money = [figures["money"] for figures in told.values()]
    assert sum(each["gpu_dollars"] for each in money) == pytest.approx(paid)
    for each in money:
        assert sum(each["split"].values()) == pytest.approx(each["dollars"], rel=1e-9)
    assert sum(each["split"]["start_up"] for each in money) == pytest.approx(
        100 * (0.36 + 3.6) / 3600
    )
    for figures in told.values():
        worked = sum(each["seconds"] for each in figures["workers"])
        assert all(each["gpu_seconds"] == worked for each in figures["models"])


async def test_images_of_nobody_are_counted_and_leave_the_others_their_price(
    storage: Storage,
    storage_settings: StorageSettings,
    in_process: Imagefleet,
    store_images: Add,
):
    """Found by a worker whose token cannot read by whom they are."""
    await store_images(storage, "0001", price_per_hour=0.36)
    await store_images(storage, "0002", worker=UNKNOWN_WORKER)
    figures, _, _ = await report(in_process, storage_settings)
    assert [each["name"] for each in figures["workers"]] == ["w1"]
    assert figures["images"] == 2
    assert figures["money"]["gpu_dollars"] == pytest.approx(1.5 * 0.36 / 3600)


async def test_images_from_before_the_fleet_had_proofs_are_reported_without_hours_and_costs(
    azurite_settings: StorageSettings, in_process: Imagefleet, store_images: Add
):
    async with open_storage(azurite_settings) as storage:
        await store_images(storage, "0001", "0002", price_per_hour=0.36)
    await mint.proof_secret(azurite_settings)
    figures, page, warnings = await report(in_process, azurite_settings)
    assert (figures["images"], figures["workers"]) == (2, [])
    assert figures["money"]["gpu_dollars"] is None
    assert "no proof that w1 has drawn it" in warnings
    assert page.count("data:image/jpeg") == 2


async def test_figures_come_from_records_without_listing_an_image(
    storage: Storage,
    storage_settings: StorageSettings,
    in_process: Imagefleet,
    store_images: Add,
    add_job: Add,
    monkeypatch,
):
    known = {"gpu": "RTX 4090", "price_per_hour": 0.36, "start_up_seconds": 30}
    stored = await store_images(storage, "0001", "0002", "0003", **known)
    await add_job(storage, "0004", "failed")
    await add_job(storage, "0005", "failed")
    await add_job(storage, "0005", "replayed")
    await add_job(storage, "0006", "cancelled", error=None, reason=None)
    real = type(storage.blobs).records

    async def no_images(self: Any, prefix: str = "") -> AsyncIterator[BlobRecord]:
        assert prefix.startswith(("-records/", "-sent/")), "images are not listed"
        async for record in real(self, prefix):
            yield record

    monkeypatch.setattr(type(storage.blobs), "records", no_images)

    figures, page, warnings = await report(in_process, storage_settings)

    assert (
        figures["images"],
        figures["jobs"],
        figures["failed"],
        figures["cancelled"],
    ) == (
        3,
        3,
        1,
        1,
    )
    assert figures["image_bytes"] == sum(record.size_bytes for record in stored)
    assert figures["failures"] == [
        {"error": "MissingFileError", "reason": "there is no LoRA fox", "count": 1}
    ]
    (worker,) = figures["workers"]
    assert worker["seconds"] == 30 + 1.5 + 2
    assert figures["began_at"] == (stored[0].at - timedelta(seconds=31.5)).isoformat()
    assert page.count("data:image/jpeg") == 3
    assert "the workers&#39; records" in page
    assert warnings == ""


async def test_hostile_records_are_left_out_with_their_number_and_reasons(
    local_settings: StorageSettings, in_process: Imagefleet, store_images: Add
):
    async with open_storage(local_settings) as storage:
        await store_images(storage, "0001", price_per_hour=1.0)
        lines = [
            json.dumps(LINE | {name: bad}).encode() for name, bad in HOSTILE.items()
        ]
        lines += [b"[" * 100_000, b"\xff", b"null", b"{" * 10]
        data = shard_part([line + b"\n" for line in lines], Totals(len(lines), 0))
        name = "-records/spring/20261101T120000Z-w9-00000000.images.jsonl.gz"
        await storage.blobs.append(name, data, 0)
        await storage.blobs.append(name.replace("w9", "w8"), b"\x1f\x8b no gzip", 0)
        await storage.blobs.append(name.replace("images", "jobs"), data, 0)

    figures, page, warnings = await report(in_process, local_settings, "--limit", "200")

    assert figures["images"] == 1
    assert figures["damaged"] == 2 * len(lines) + 1, "each once"
    assert len(figures["damage"]) == 10
    assert f"{2 * len(lines) + 1} records do not fit: " in warnings
    assert f"; and {2 * len(lines) + 1 - 3} more" in warnings
    assert len(page) < 300_000


async def test_forged_records_do_not_fill_the_memory(
    local_settings: StorageSettings, store_images: Add, monkeypatch
):
    monkeypatch.setattr(report_records, "_MAX_WORKERS", 3)
    monkeypatch.setattr(report_records, "_MAX_SECONDS", 5)
    monkeypatch.setattr(report_records, "_MAX_MODELS", 4)
    async with open_storage(local_settings) as storage:
        for number in range(10):
            at = f"2026-11-01T12:00:{number:02}Z"
            names = {"worker": f"w{number}", "model": f"m{number}"}
            await store_images(storage, f"{number:04}", at=at, **names)

        records = await report_records.read_records(storage, "spring", samples=2)

    assert (len(records.workers), len(records.stored_in_second), records.images) == (
        3,
        5,
        10,
    )
    assert len(records.models) == 4
    assert records.damaged.count == 7
