"""Money by the panels' own queries and by the report, on a real Prometheus that has a fleet's past.

What a fleet's processes would have exposed is written as blocks of Prometheus' storage.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

import azurite
import polling
from fleet.monitor import prometheus
from fleet.report import figures
from fleet.report import records as report_records
from imagefleet.pricing import prices
from imagefleet.records.record import Record, RecordLog
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.telemetry.metrics import render
from worker.metrics import WorkerMetrics

Tool = Callable[[str], str]  # the fixture of conftest.py

BEGAN = datetime(2026, 11, 1, 12, tzinfo=UTC)
PUSH_SECONDS = 15
FREE = replace(prices.BUILT_IN, storage=prices.FREE_STORAGE)
NOTHING_REPLACED = figures.Replaced()
PAGES = Path(__file__).parents[2] / "dashboards" / "grafana"


@dataclass
class Process:
    """A worker's process from *start* to *end*, in seconds, and what a server knows of it."""

    instance: str
    start: float
    end: float
    images_per_second: float = 1.0
    dollars_per_hour: float = 0.72
    device: str | None = None
    labels: dict[str, str] = field(init=False)
    """Of each metric."""
    counts: dict[str, float] = field(default_factory=dict)
    """Other counters with a label, and their values at its end."""
    start_up_seconds: float = 0
    unpushed_seconds: float = 0
    """Between its last push and its end; one that was killed has pushed no last time."""
    stored_share: float = 1
    """Of what it drew; another one had stored the rest."""

    def __post_init__(self) -> None:
        registry = (metrics := WorkerMetrics("acme/jobs", self.device)).registry
        metrics.set_worker_info(worker=f"{self.instance}-{self.device}", gpu="RTX 3060")
        prometheus_client.Counter(
            "imagefleet_cost_dollars", "...", ["kind"], registry=registry
        ).labels("gpu")
        prometheus_client.Gauge("imagefleet_price_dollars_per_hour", "...", registry=registry)
        self.labels = {}
        for family in text_string_to_metric_families(render(registry).decode()):
            for sample in family.samples:
                labels = {"job": "imagefleet-worker", "instance": self.instance, **sample.labels}
                self.labels[sample.name] = ",".join(f'{name}="{labels[name]}"' for name in labels)

    @property
    def images(self) -> float:
        return self.images_at(self.end - self.start)

    def images_at(self, age: float) -> float:
        """What it counts at that age."""
        drawn = max(0.0, age - self.start_up_seconds) * self.images_per_second
        return drawn * self.stored_share

    @property
    def dollars(self) -> float:
        return (self.end - self.start) * self.dollars_per_hour / 3600

    def samples(self) -> Iterator[tuple[str, float, float]]:
        """Each series, the time and the value of each push; the last is at the process's end."""
        seconds = self.end - self.start - self.unpushed_seconds
        for age in [*range(0, int(seconds), PUSH_SECONDS), seconds]:
            values = {
                "imagefleet_images_total": self.images_at(age),
                "imagefleet_cost_dollars_total": age * self.dollars_per_hour / 3600,
                "imagefleet_price_dollars_per_hour": self.dollars_per_hour,
                "imagefleet_worker_info": 1.0,
            }
            lines = {f"{name}{{{self.labels[name]}}}": value for name, value in values.items()}
            common = self.labels["imagefleet_images_total"]
            for series, total in self.counts.items():
                lines[f"{series[:-1]},{common}}}"] = total * age / seconds
            for line, value in lines.items():
                yield line, BEGAN.timestamp() + self.start + age, value


@dataclass(frozen=True)
class Past:
    """A server with the past of a fleet."""

    url: str

    async def panel(self, title: str, at: float, seconds: float = 0) -> float:
        """What the panel shows *at* that second for a time range of *seconds*."""
        (value,) = (await self.by_campaign(title, at, seconds)).values()
        return value

    async def by_campaign(self, title: str, at: float, seconds: float) -> dict[str, float]:
        query = panels()[title].replace("$fleet", ".*").replace("$__range", f"{seconds:.0f}s")
        async with prometheus.connected(self.url) as server:
            found = await server.at(query, BEGAN + timedelta(seconds=at))
        return {each.labels.get("campaign", ""): each.last for each in found}

    async def report(
        self, end: float, replaced: figures.Replaced = NOTHING_REPLACED
    ) -> dict[str, Any]:
        last = BEGAN + timedelta(seconds=end)
        async with prometheus.connected(self.url) as server:
            read = await figures.read_metrics(server, BEGAN, last, replaced)
        return dict(read)


@pytest.fixture
async def past(tool: Tool, tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Past]]]:
    """Starts a server with what these processes pushed."""
    async with contextlib.AsyncExitStack() as servers:

        async def start(*processes: Process) -> Past:
            return await servers.enter_async_context(running(tool, tmp_path, processes))

        yield start


@contextlib.asynccontextmanager
async def running(tool: Tool, folder: Path, processes: Sequence[Process]) -> AsyncIterator[Past]:
    samples = sorted(
        (at, series, value) for each in processes for series, at, value in each.samples()
    )
    text = "".join(f"{series} {value} {at}\n" for at, series, value in samples)
    (folder / "past.txt").write_text(text + "# EOF\n")
    (folder / "empty.yaml").write_text("")
    make = ["tsdb", "create-blocks-from", "openmetrics", folder / "past.txt", folder / "data"]
    await asyncio.to_thread(
        subprocess.run, [tool("promtool"), *make], check=True, capture_output=True, timeout=60
    )
    (port,) = azurite.free_ports(1)
    flags = [
        f"--config.file={folder / 'empty.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--storage.tsdb.retention.time=100y",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    process = await asyncio.create_subprocess_exec(tool("prometheus"), *flags)
    url = f"http://127.0.0.1:{port}"
    try:
        await polling.until(lambda: is_ready(url), bool)
        yield Past(url)
    finally:
        process.kill()
        await process.wait()


async def is_ready(url: str) -> bool:
    try:
        async with aiohttp.ClientSession(url) as client, client.get("/-/ready") as answer:
            return answer.ok
    except aiohttp.ClientConnectionError:
        return False


def panels() -> dict[str, str]:
    """The first query of each panel by its title."""
    return {
        panel["title"]: panel["targets"][0]["expr"]
        for path in PAGES.glob("*.json")
        for panel in json.loads(path.read_text())["panels"]
        if panel.get("targets")
    }


WASTE = ("start_up", "failed", "duplicate", "second_drawing", "down")
ALL_IN = "Images per dollar in the time range, all in"
DOLLARS = "Dollars in the time range"


@pytest.mark.parametrize("device", ["0", None], ids=["pushed with --gpus", "scraped"])
async def test_what_a_process_counted_before_it_crashed_and_began_anew_at_its_address_was_paid(
    past: Callable[..., Awaitable[Past]], device: str | None
) -> None:
    crashed = Process("a", 0, 103, images_per_second=0.6, device=device)
    anew = Process("a", 110, 215, images_per_second=0.5, device=device)
    other = Process("b", 0, 215, images_per_second=0.25, dollars_per_hour=0.36)
    images = sum(each.images for each in (crashed, anew, other))
    dollars = sum(each.dollars for each in (crashed, anew, other))
    fleet = await past(crashed, anew, other)

    report = await fleet.report(215)
    shown = await fleet.panel(DOLLARS, 220, 300)
    assert shown == pytest.approx(dollars, rel=1e-6)
    assert await fleet.panel(ALL_IN, 220, 300) == pytest.approx(images / dollars, rel=1e-6)
    assert report["images"] == pytest.approx(images, rel=1e-6)
    assert report["dollars"] == {"gpu": pytest.approx(dollars, rel=1e-6)}
    assert report["images_per_dollar"] == pytest.approx(images / dollars, rel=1e-6)


async def test_a_counter_that_begins_anew_within_its_series_adds_up_as_well(
    past: Callable[..., Awaitable[Past]],
) -> None:
    crashed, anew = Process("a", 0, 1800), Process("a", 1815, 3600, images_per_second=2)
    anew.labels = crashed.labels

    report = await (await past(crashed, anew)).report(3600)

    assert report["images"] == pytest.approx(crashed.images + anew.images, rel=0.01)
    assert report["dollars"]["gpu"] == pytest.approx(crashed.dollars + anew.dollars, rel=0.01)


async def test_dollars_per_hour_count_a_killed_worker_for_two_pushes_and_its_successor_at_once(
    past: Callable[..., Awaitable[Past]],
) -> None:
    killed, other = Process("a", 0, 120), Process("b", 0, 400, dollars_per_hour=0.36)
    successor = Process("c", 125, 400)
    fleet = await past(killed, other, successor)

    for second in (30, 59, 119, 161, 174, 300, 399):
        assert await fleet.panel("$/h now", second) == pytest.approx(0.72 + 0.36), second


async def test_what_the_metrics_say_was_paid_is_split_without_a_rest(
    past: Callable[..., Awaitable[Past]],
) -> None:
    worker = Process("a", 0, 3600, dollars_per_hour=10)
    worker.counts = {
        **dict.fromkeys(
            [f'imagefleet_wasted_dollars_total{{reason="{each}"}}' for each in WASTE], 0.5
        ),
        'imagefleet_wasted_dollars_total{reason="idle"}': 2.0,
        'imagefleet_gpu_idle_seconds_total{reason="queue_empty"}': 30.0,
        'imagefleet_gpu_idle_seconds_total{reason="starved"}': 10.0,
        'imagefleet_cost_dollars_total{kind="storage"}': 0.25,
    }
    fleet = await past(worker)

    split = (await fleet.report(3600, figures.Replaced(36, 1.5)))["split"]

    assert split == pytest.approx(
        {
            "images": 10 - 2 - 5 * 0.5 - 1.5,
            "images_replaced": 1.5,
            "images_doubled": 0.5,
            "failed_jobs": 0.5,
            "start_up": 0.5,
            "second_drawing": 0.5,
            "down": 0.5,
            "idle_queue_empty": 1.5,
            "idle_starved": 0.5,
            "storage_operations": 0.25,
        }
    )
    assert sum(split.values()) == pytest.approx(10.25)
    assert sum(
        (await fleet.report(3600, figures.Replaced(36, 99.0)))["split"].values()
    ) == pytest.approx(10.25)


async def test_a_campaign_has_its_images_and_its_part_of_what_their_workers_cost(
    past: Callable[..., Awaitable[Past]],
) -> None:
    cheap, dear = Process("a", 0, 1000, device="0"), Process("b", 0, 1000, dollars_per_hour=3.6)
    anew = Process("a", 1010, 2000, device="0")
    for process, spring in ((cheap, 1.0), (dear, 0.25), (anew, 0.5)):
        series = "imagefleet_campaign_images_total"
        process.counts = {
            f'{series}{{campaign="spring"}}': spring * process.images,
            f'{series}{{campaign="autumn"}}': (1 - spring) * process.images,
        }
    fleet = await past(cheap, dear, anew)

    images = await fleet.by_campaign("Images by campaign in the time range", 2060, 2120)
    dollars = await fleet.by_campaign("Dollars by campaign in the time range", 2060, 2120)

    assert images == pytest.approx({"spring": 1000 + 250 + 495, "autumn": 750 + 495})
    assert dollars == pytest.approx({"spring": 0.2 + 0.25 + 0.099, "autumn": 0.75 + 0.099})


#: Of how many drawings each is one that another worker has stored, too.
DOUBLED = 40


def a_fleet(chance: random.Random) -> list[Process]:
    """Workers at unlike prices that start again at their address, or as others, some killed."""
    processes: list[Process] = []
    for number in range(chance.randint(2, 4)):
        at, device = chance.uniform(0, 600), chance.choice(["0", None])
        name, speed = f"m{number}", chance.uniform(0.05, 0.2)
        price = chance.choice([0.05, 0.18, 0.36, 1.2])
        for run in range(chance.randint(1, 3)):
            end = at + chance.uniform(3_000, 6_000)
            is_at_its_address = chance.random() < 0.6
            address = name if is_at_its_address else f"{name}-{run}"
            process = Process(address, at, end, speed, price, device)
            process.start_up_seconds = chance.uniform(20, 90)
            process.unpushed_seconds = chance.choice([0, chance.uniform(0, 15)])
            processes.append(process)
            at = end + chance.uniform(5, 400)
    return processes


async def write_records(
    storage: Storage, processes: Sequence[Process], bad: Process
) -> Counter[str]:
    """The processes' images, of which the bad one's last are replaced; how many there are of each.

    No image is drawn in the place of a replaced one: it would be one more.
    """
    found, of_first = Counter[str](), 0
    for number, process in enumerate(processes):
        log = RecordLog(storage.blobs, process.instance)
        records = []
        seconds = process.end - process.start - process.start_up_seconds
        drawn = int(seconds * process.images_per_second)
        others = range(5, of_first, DOUBLED)
        process.stored_share = 1 - len([place for place in others if place < drawn]) / drawn
        for place in range(drawn):
            at = process.end - (drawn - 1 - place) / process.images_per_second
            is_doubled = place in others
            found["doubled" if is_doubled else "stored"] += 1
            of = f"0-{place}" if is_doubled else f"{number}-{place}"
            record = Record(
                outcome="completed",
                id=of,
                campaign="spring",
                blob=f"spring/{of}.png",
                at=BEGAN + timedelta(seconds=at),
                worker=f"{process.instance}-{process.device}",
                started_at=BEGAN + timedelta(seconds=process.start),
                start_up_seconds=process.start_up_seconds,
                price_per_hour=process.dollars_per_hour,
                seconds=1 / process.images_per_second,
            )
            if is_doubled:
                await log.add([record], again=True)
            else:
                records.append(record)
        await log.add(records)
        of_first = of_first or drawn
        if process is bad:
            replaced = records[-len(records) // 20 :]
            found["replaced"] = len(replaced)
            update = {"outcome": "replaced", "source": "journal"}
            notes = [each.model_copy(update=update) for each in replaced]
            await RecordLog(storage.files, "redo").add(notes)
    return found


@pytest.mark.parametrize("seed", range(6))
async def test_panels_report_records_and_raw_counters_agree_on_every_fleet(
    past: Callable[..., Awaitable[Past]], tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    processes = a_fleet(chance)
    bad = chance.choice(processes[1:] or processes)
    end = max(each.end for each in processes)
    async with open_storage(StorageSettings(storage=f"local:{tmp_path / 'storage'}")) as storage:
        await storage.create()
        counted = await write_records(storage, processes, bad)
        records = await report_records.read_records(storage, "spring", samples=0)
    dollars = sum(each.dollars for each in processes)
    kept = counted["stored"] - counted["replaced"]
    server = await past(*processes)

    by_records = figures.compute(records, "local", FREE, "recorded")
    metrics = await server.report(end, figures.Replaced.of(by_records))
    shown = await server.panel(DOLLARS, end + 60, end + 120)
    per_dollar = await server.panel(ALL_IN, end + 60, end + 120)

    about = partial(pytest.approx, rel=0.01)
    assert shown == about(dollars)
    assert per_dollar == about(counted["stored"] / dollars)
    assert by_records["images"] == kept
    assert by_records["money"]["dollars"] == about(dollars)
    assert by_records["money"]["images_per_dollar"] == about(kept / dollars)
    assert sum(each["replaced"] for each in by_records["workers"]) == counted["replaced"]
    assert sum(each["doubled"] for each in by_records["workers"]) == counted["doubled"]
    assert metrics["images"] == about(kept)
    assert metrics["images_per_dollar"] == about(kept / dollars)
    for split, whole in (
        (by_records["money"]["split"], by_records["money"]["dollars"]),
        (metrics["split"], sum(metrics["dollars"].values())),
    ):
        assert sum(split.values()) == pytest.approx(whole, rel=1e-6)
        assert split["images_replaced"] > 0
