"""The report of a campaign, from the records in storage."""

import html
import json
import re
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
import pytest

from fleet.report import figures as report_figures
from fleet.report import page
from fleet.report import records as report_records
from imagefleet import errors
from imagefleet.job.message import DEFAULT_CAMPAIGN, Job, Output
from imagefleet.pricing import prices
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.open import LocalStorage, Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet
from stored_images import member, store_alone, store_pack
from worker.stages import encode

NOON = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)
PIXELS = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)


def record(worker: str = "w1", seconds: float = 2.0, **more: str) -> dict[str, str]:
    """The metadata that a worker stores with an image."""
    return {"worker": worker, "seconds": str(seconds), "attempt": "1", **more}


@pytest.fixture
async def local_storage(tmp_path) -> AsyncIterator[LocalStorage]:
    settings = StorageSettings(storage=f"local:{tmp_path / 'storage'}")
    async with open_storage(settings) as opened:
        assert isinstance(opened, LocalStorage)
        await opened.create()
        yield opened


async def keep(
    storage: Storage, name: str, data: bytes, at: datetime = NOON, **facts: str
) -> None:
    """Stores an image and its record, as a worker does."""
    await storage.blobs.create(name, data, "image/png", facts)
    campaign, _, file = name.partition("/")
    known = facts | {"id": facts.get("job") or file.partition(".")[0]}
    known |= {"attempts": known.pop("attempt", "1"), "campaign": campaign, "blob": name}
    line = Record.model_validate(
        {**known, "outcome": "completed", "at": at, "size_bytes": len(data)}
    )
    await RecordLog(storage.blobs, "w").add([line])


@pytest.fixture
def stored(local_storage: LocalStorage) -> Callable[..., object]:
    """Stores an image of the campaign `spring` as if at so many seconds after noon."""

    async def store(name: str, after_noon: float, **facts: str) -> None:
        data = encode.encode(PIXELS, Output(), "a house\nSteps: 1").data
        at = NOON + timedelta(seconds=after_noon)
        await keep(local_storage, f"spring/{name}", data, at, **facts)

    return store


async def add(storage: Storage, job: Job | None, error: errors.FleetError) -> None:
    """Records a job that failed; an invalid message has none."""
    failed = Record(
        outcome="failed",
        id=job.id if job and job.id else "a-message",
        campaign=job.campaign if job and job.campaign else DEFAULT_CAMPAIGN,
        at=NOON,
        error=type(error).__name__,
        reason=error.message,
    )
    await RecordLog(storage.blobs, "w1").add([failed])


def figures_of(records: report_records.Records) -> report_figures.Figures:
    return report_figures.compute(records, "local:x", prices.BUILT_IN)


async def test_a_campaign_is_separated_from_others_on_every_storage(
    storage: Storage,
):
    for name in (
        "spring/j1.png",
        "spring/j2.png",
        "spring/j2~1.png",
        "springtime/j3.png",
    ):
        job = re.sub(r"(~\d)?\.png$", "", name.rpartition("/")[2])
        facts = record(job=job, attempt="2")
        if job == "j2":
            index = "~" in name
            facts |= {"index": str(int(index)), "images": "2", "completes": str(index)}
        await keep(storage, name, b"12345", **facts)
    error = errors.MissingFileError("there is no LoRA x")
    await add(storage, Job(prompt="x", id="a", campaign="spring"), error)
    await add(storage, Job(prompt="x", id="b", campaign="autumn"), error)
    await add(storage, None, errors.InvalidMessageError("the message is not JSON"))

    records = await report_records.read_records(storage, "spring", samples=2)

    assert (records.images, records.jobs, records.image_bytes) == (3, 2, 15)
    assert records.images_redelivered == 3
    assert records.failed_by_error == {("MissingFileError", "there is no LoRA x"): 1}
    assert len({sample.blob for sample in records.samples}) == 2
    # An invalid message names no campaign: it counts as failed with the jobs that name none.
    without = await report_records.read_records(storage, "default", samples=2)
    assert without.failed_by_error == {
        ("InvalidMessageError", "the message is not JSON"): 1
    }


async def test_a_workers_time_is_its_start_up_plus_first_pull_to_last_image(
    local_storage: LocalStorage, stored: Callable[..., AsyncIterator[None]]
):
    facts = {"gpu": "RTX 4090", "price_per_hour": "0.36", "start_up_seconds": "30"}
    await stored("a.png", 10, **record(seconds=4, job="a", **facts))
    await stored("b.png", 106, **record(seconds=2, job="b", **facts))

    figures = figures_of(
        await report_records.read_records(local_storage, "spring", samples=0)
    )

    (worker,) = figures["workers"]
    assert worker["seconds"] == pytest.approx(
        130
    )  # 30 to start, from 12:00:06 to 12:01:46
    assert worker["images_per_second"] == pytest.approx(2 / 100)
    assert figures["share_before_first_image"] == pytest.approx(34 / 130)
    assert figures["began_at"] == NOON - timedelta(seconds=24)
    assert figures["money"]["gpu_dollars"] == pytest.approx(0.013)
    storage_dollars = prices.BUILT_IN.storage.dollars(prices.operations(2, 2))
    assert figures["money"]["dollars"] == pytest.approx(0.013 + storage_dollars)
    assert figures["money"]["images_per_dollar"] == pytest.approx(
        2 / (0.013 + storage_dollars)
    )
    assert figures["money"]["images_per_dollar_gpu_only"] == pytest.approx(2 / 0.013)


async def test_the_time_between_two_runs_of_a_machine_is_not_billed(
    local_storage: LocalStorage, stored: Callable[..., AsyncIterator[None]]
):
    for name, at, started in (
        ("a.png", 10, "1"),
        ("b.png", 7210, "2"),
        ("c.png", 7215, "2"),
    ):
        await stored(
            name, at, **record(seconds=5, started_at=started, price_per_hour="1")
        )

    figures = figures_of(
        await report_records.read_records(local_storage, "spring", samples=0)
    )

    assert sorted(worker["seconds"] for worker in figures["workers"]) == pytest.approx(
        [5, 10]
    )


async def test_a_given_price_overrides_the_recorded_one(
    local_storage: LocalStorage, stored: Callable[..., AsyncIterator[None]]
):
    await stored("a.png", 3600, **record(seconds=3600, price_per_hour="0.5"))

    for given, dollars in ((None, 0.5), (2.0, 2.0)):
        records = await report_records.read_records(local_storage, "spring", 0, given)
        assert figures_of(records)["money"]["gpu_dollars"] == pytest.approx(dollars)


async def test_an_unknown_price_gives_no_cost_and_a_note(
    local_storage: LocalStorage, stored: Callable[..., AsyncIterator[None]]
):
    await stored("a.png", 1, **record("w1", price_per_hour="0.5"))
    await stored("b.png", 1, **record("w2"))

    figures = figures_of(
        await report_records.read_records(local_storage, "spring", samples=0)
    )

    assert (
        figures["money"]["gpu_dollars"] is figures["money"]["images_per_dollar"] is None
    )
    assert any("--price-per-hour" in note for note in figures["notes"])


async def test_a_pause_shows_in_the_throughput(
    local_storage: LocalStorage, stored: Callable[..., AsyncIterator[None]]
):
    for number, at in enumerate([0, 0.5, 4]):
        await stored(f"{number}.png", at, **record())

    figures = figures_of(
        await report_records.read_records(local_storage, "spring", samples=0)
    )

    assert figures["bin_seconds"] == 1
    assert [rate["images_per_second"] for rate in figures["throughput"]] == [
        2,
        0,
        0,
        0,
        1,
    ]


async def test_a_worker_is_slow_compared_with_its_own_gpu_class(
    local_storage: LocalStorage, stored: Callable[..., AsyncIterator[None]]
):
    speeds = {"a": ("x", 1), "b": ("x", 1), "slow": ("x", 3), "other": ("y", 3)}
    for worker, (gpu, seconds) in speeds.items():
        for number in range(1, 11):
            facts = record(worker, seconds, gpu=gpu)
            await stored(f"{worker}-{number}.png", number * seconds, **facts)

    figures = figures_of(
        await report_records.read_records(local_storage, "spring", samples=0)
    )

    assert [worker["name"] for worker in figures["workers"] if worker["is_slow"]] == [
        "slow"
    ]


HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
async def hostile_storage(
    local_storage: LocalStorage, stored: Callable[..., AsyncIterator[None]]
) -> str:
    """The URL of a storage whose texts all try to inject HTML."""
    facts = {"price_per_hour": "0.03", "gpu": "<b>"}
    await stored("a.png", 1, **record(HOSTILE, **facts))
    await stored("b.png", 2, **record(HOSTILE, **facts))
    job = Job(prompt="x", id="c", campaign="spring")
    await add(local_storage, job, errors.JobError(f"no {HOSTILE}"))
    return local_storage.url


def test_the_page_is_self_contained_and_escapes_every_text(
    hostile_storage: str, in_process: Imagefleet
):
    result = in_process(
        "report",
        "spring",
        "--storage",
        hostile_storage,
        "--output",
        "out/page.html",
        "--json-file",
        "out/figures.json",
    )

    assert result.returncode == 0, result.stderr
    text = Path("out/page.html").read_text()
    assert "<script" not in text
    assert "<b>" not in text
    assert text.count(html.escape(HOSTILE)) >= 2
    assert not re.search(r"src=.(?!data:)|url\(|@import|<link", text), (
        "something is loaded"
    )
    for address in re.findall(r'href="([^"]*)"', text):
        assert Path(url2pathname(urlsplit(address).path)).is_file(), address
    assert text.count('src="data:image/jpeg;base64,') == 2
    figures = json.loads(Path("out/figures.json").read_text())
    assert (figures["images"], figures["failed"]) == (2, 1)
    assert figures["money"]["storage_dollars"] == 0  # a local folder
    assert figures["began_at"] == "2026-11-01T11:59:59+00:00"


async def test_the_page_shows_many_workers(
    local_storage: LocalStorage, stored: Callable[..., AsyncIterator[None]]
):
    for worker in range(30):
        for number in range(2):
            facts = record(f"w{worker}", 1 + worker / 10, price_per_hour="0.1")
            await stored(f"{worker}-{number}.png", 10 + worker * number, **facts)
    figures = figures_of(
        await report_records.read_records(local_storage, "spring", samples=0)
    )
    html_page = page.render(figures, [], NOON)

    widths = re.findall(r'<span class="bar"\s+style="width:(.*?)"', html_page)
    assert "max(1px, 100.0%)" in widths
    assert html_page.count('<ul class="bars"') == 2
    assert "The slowest 15 of 30." in html_page
    slow = sum(worker["is_slow"] for worker in figures["workers"])
    assert f"of their GPU class: {slow} workers." in html_page
    assert re.search(
        r"<td[^>]*><span>w\d+ <span class=.slow.>slow</span></span></td>", html_page
    )
    assert "<script" not in html_page


async def page_of(storage: Storage) -> str:
    """The page of the campaign `spring`."""
    records = await report_records.read_records(storage, "spring", 24)
    sampled = await page.read_samples(storage, records)
    return page.render(figures_of(records), sampled, NOON)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
async def test_a_sample_shows_its_id_its_prompt_and_its_loras(
    local_storage: LocalStorage, kind
):
    words = "a " + "very " * 60 + "red house"
    parameters = f"{words} <lora:outline-style:0.8>\nNegative prompt: blurry\nSteps: 15"
    image = encode.encode(PIXELS, Output(format=kind), parameters)
    facts = record(
        job="0001", prompt=parameters.partition("\n")[0], index="3", images="4"
    )
    await keep(local_storage, "spring/0001~3.x", image.data, **facts)

    text = html.unescape(await page_of(local_storage))

    address = (local_storage.blobs.folder / "spring" / "0001~3.x").as_uri()
    assert f'<a href="{address}">0001</a>' in text
    assert f"</summary>{words}</details>" in text, "the whole prompt is on the page"
    assert "<li>outline-style 0.8</li>" in text
    assert "blurry" not in text


async def test_what_is_no_image_or_of_another_program_is_listed_as_well(
    local_storage: LocalStorage,
):
    foreign = encode.encode(PIXELS, Output(), "").data
    await keep(
        local_storage, "spring/foreign.png", foreign, prompt="a cat <hypernet:x:1>"
    )
    await keep(local_storage, "spring/broken.png", b"pixels")

    text = await page_of(local_storage)

    assert "<p>a cat &lt;hypernet:x:1&gt;</p>" in text
    assert "not an image" in text
    assert text.count("<figure>") == 2


async def test_a_campaign_of_failures_alone_says_so(
    local_storage: LocalStorage,
):
    error = errors.MissingFileError("there is no LoRA x")
    await add(local_storage, Job(prompt="x", id="a", campaign="spring"), error)

    text = await page_of(local_storage)

    assert "No image of this campaign is stored" in text
    assert "100.00% of the jobs" in text
    assert "images/s" not in text.lower().partition("<main>")[2]
    assert "n/a" not in text


async def test_a_campaign_of_one_image_has_no_plot_over_time(
    local_storage: LocalStorage, stored: Callable[..., AsyncIterator[None]]
):
    await stored("a.png", 1, **record(job="a"))

    text = await page_of(local_storage)

    assert 'class="columns"' not in text
    assert "1 job, " in text


def test_json_is_printed_without_a_page(hostile_storage: str, in_process: Imagefleet):
    result = in_process("report", "spring", "--storage", hostile_storage, "--json")

    assert json.loads(result.stdout)["campaign"] == "spring"
    assert not Path("spring-report.html").exists()


def test_an_empty_campaign_is_a_one_line_error_with_exit_code_2(
    hostile_storage: str, in_process: Imagefleet
):
    result = in_process("report", "sprnig", "--storage", hostile_storage)

    assert result.returncode == 2
    assert result.stderr.startswith(
        "error: campaign 'sprnig' has no records, images or messages in local:"
    )
    assert len(result.stderr.splitlines()) == 1


async def test_a_pack_costs_a_message_and_a_write_however_many_images_it_has(
    storage: Storage,
):
    await store_pack(storage, [member(name) for name in "abcd"])
    await store_alone(storage, member("e"))
    records = await report_records.read_records(storage, "spring", 1)

    figures = report_figures.compute(records, storage.url, prices.BUILT_IN)

    assert figures["images"] == 5
    operations = figures["money"]["storage_operations"]
    assert (operations["queue"], operations["blob_writes"]) == (3 + 3, 2 + 1), (
        "a write, and part of one"
    )
    assert figures["money"]["storage_month_dollars"] > 0
