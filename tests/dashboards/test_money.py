"""Money by the panels' own queries and by the records, on a real Prometheus with a fleet's past.

What a fleet's processes would have exposed is written as blocks of Prometheus' storage.
"""

import asyncio
import contextlib
import json
import random
import subprocess
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import azurite
import past_fleet
import polling
from fleet.campaigns.table import Campaigns
from fleet.monitor import prometheus, rates
from fleet.plan import estimate, work
from fleet.report import figures
from fleet.report import records as report_records
from imagefleet.pricing import families, prices
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from past_fleet import BEGAN, PUSH_SECONDS, Process

Tool = Callable[[str], str]  # the fixture of conftest.py

FIGURES = rates._FIGURES.items()
FREE = replace(prices.BUILT_IN, storage=prices.FREE_STORAGE)
PAGES = Path(__file__).parents[2] / "dashboards" / "grafana"


@dataclass(frozen=True)
class Past:
    """A server with the past of a fleet."""

    url: str

    async def panel(self, title: str, at: float, seconds: float = 0) -> float:
        """What the panel shows *at* that second for a time range of *seconds*."""
        (value,) = (await self.by_campaign(title, at, seconds)).values()
        return value

    async def status(self, at: float) -> dict[str, float]:
        """The figures of `imagefleet status` at that second."""
        moment = BEGAN + timedelta(seconds=at)
        async with prometheus.connected(self.url) as server:
            asked = {name: await server.at(query, moment) for name, query in FIGURES}
        return {name: found[0].last for name, found in asked.items() if found}

    async def by_campaign(
        self, title: str, at: float, seconds: float, number: int = 0
    ) -> dict[str, float]:
        """What a query of the panel finds, the first if no *number* is given."""
        query = panels()[title][number].replace("$fleet", ".*")
        query = query.replace("$__range", f"{seconds:.0f}s")
        begin = BEGAN.timestamp() + at - seconds
        query = query.replace("${__from:date:seconds}", f"{begin:.0f}")
        async with prometheus.connected(self.url) as server:
            found = await server.at(query, BEGAN + timedelta(seconds=at))
        return {each.labels.get("campaign", ""): each.last for each in found}


@pytest.fixture
async def past(tool: Tool, tmp_path) -> AsyncIterator[Callable[..., Awaitable[Past]]]:
    """Starts a server with what these processes pushed."""
    async with contextlib.AsyncExitStack() as servers:

        async def start(*processes: Process) -> Past:
            return await servers.enter_async_context(running(tool, tmp_path, processes))

        yield start


@contextlib.asynccontextmanager
async def running(
    tool: Tool, folder: Path, processes: Sequence[Process]
) -> AsyncIterator[Past]:
    samples = sorted(
        (at, series, value)
        for each in processes
        for series, at, value in each.samples()
    )
    text = "".join(f"{series} {value} {at}\n" for at, series, value in samples)
    (folder / "past.txt").write_text(text + "# EOF\n")
    (folder / "empty.yaml").write_text("")
    make = [
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        folder / "past.txt",
        folder / "data",
    ]
    await asyncio.to_thread(
        subprocess.run,
        [tool("promtool"), *make],
        check=True,
        capture_output=True,
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
        async with (
            aiohttp.ClientSession(url) as client,
            client.get("/-/ready") as answer,
        ):
            return answer.ok
    except aiohttp.ClientConnectionError:
        return False


def panels() -> dict[str, list[str]]:
    """The queries of each panel by its title."""
    return {
        panel["title"]: [target["expr"] for target in panel["targets"]]
        for path in PAGES.glob("*.json")
        for panel in json.loads(path.read_text())["panels"]
        if panel.get("targets")
    }


ALL_IN = "Images per dollar in the time range, all in"
DOLLARS = "Dollars in the time range"


@pytest.mark.parametrize("device", ["0", None], ids=["pushed with --gpus", "scraped"])
async def test_what_a_process_counted_before_it_crashed_and_began_anew_at_its_address_was_paid(
    past: Callable[..., Awaitable[Past]], device: str | None
):
    crashed = Process("a", 0, 103, images_per_second=0.6, device=device)
    anew = Process("a", 110, 215, images_per_second=0.5, device=device)
    other = Process("b", 0, 215, images_per_second=0.25, dollars_per_hour=0.36)
    images = sum(each.images for each in (crashed, anew, other))
    dollars = sum(each.dollars for each in (crashed, anew, other))
    fleet = await past(crashed, anew, other)

    shown = await fleet.panel(DOLLARS, 220, 300)
    assert shown == pytest.approx(dollars, rel=1e-6)
    assert await fleet.panel(ALL_IN, 220, 300) == pytest.approx(
        images / dollars, rel=1e-6
    )


async def test_a_counter_that_begins_anew_within_its_series_adds_up_as_well(
    past: Callable[..., Awaitable[Past]],
):
    crashed = Process("a", 0, 1800)
    anew = Process("a", 1815, 3600, images_per_second=2)
    anew.labels = crashed.labels

    fleet = await past(crashed, anew)

    images = crashed.images + anew.images
    dollars = crashed.dollars + anew.dollars
    assert await fleet.panel(DOLLARS, 3660, 3720) == pytest.approx(dollars, rel=0.01)
    per_dollar = await fleet.panel(ALL_IN, 3660, 3720)
    assert per_dollar == pytest.approx(images / dollars, rel=0.01)


@pytest.mark.parametrize("minutes", [0, 1, 6, 20, 59])
@pytest.mark.parametrize("heard_again", [10, 600])
async def test_a_silence_at_the_start_of_a_time_range_adds_nothing_to_it(
    past: Callable[..., Awaitable[Past]], minutes: float, heard_again: float
):
    """An agent that was restarted: a worker's whole life is not gained in one hour of it."""
    hour = 3600.0
    began = 12 * 3600.0
    heard_again = min(heard_again, 3600 - minutes * 60)
    silence = (began - minutes * 60, began + heard_again)
    process = Process("a", 0, 14 * hour, images_per_second=0.2, dollars_per_hour=0.36)
    process.silences = [silence]
    new = Process("b", began + 300, 14 * hour, images_per_second=0.2)
    fleet = await past(process, new)

    gained = 0.36 + 55 / 60 * 0.72
    images = 0.2 * (3600 + 3300)
    shown = await fleet.panel(DOLLARS, began + hour, hour)
    assert shown == pytest.approx(gained, rel=0.005)
    per_dollar = await fleet.panel(ALL_IN, began + hour, hour)
    assert per_dollar == pytest.approx(images / gained, rel=0.005)


@pytest.mark.parametrize("heard_for", [20, 45, 130, 600])
async def test_status_counts_nothing_of_a_silence_as_gained_since(
    past: Callable[..., Awaitable[Past]], heard_for: float
):
    began = 12 * 3600.0
    silence = 360.0
    process = Process(
        "a", 0, began + 3600, images_per_second=0.2, dollars_per_hour=0.36
    )
    process.silences = [(began - silence, began)]
    fleet = await past(process)

    figures = await fleet.status(began + heard_for)
    whole = figures["images_per_dollar_gpu_only"]
    assert figures["dollars_per_hour"] <= 0.36 * 1.01
    assert figures["images_per_second"] <= 0.2 * 1.01
    assert whole == pytest.approx(0.2 * 3600 / 0.36, rel=0.01)
    if heard_for > 120:
        assert figures["dollars_per_hour"] == pytest.approx(0.36, rel=0.01)


async def test_after_a_silence_of_hours_a_time_range_has_what_was_heard_in_it(
    past: Callable[..., Awaitable[Past]],
):
    process = Process("a", 0, 14 * 3600, dollars_per_hour=0.36)
    process.silences = [(9 * 3600, 12.25 * 3600)]
    fleet = await past(process)
    assert await fleet.panel(DOLLARS, 13 * 3600, 3600) == pytest.approx(0.27, rel=0.01)


async def test_dollars_per_hour_count_a_killed_worker_for_two_pushes_and_its_successor_at_once(
    past: Callable[..., Awaitable[Past]],
):
    killed = Process("a", 0, 120)
    other = Process("b", 0, 400, dollars_per_hour=0.36)
    fleet = await past(killed, other, Process("c", 125, 400))

    for second in (30, 59, 119, 161, 174, 300, 399):
        assert await fleet.panel("$/h now", second) == pytest.approx(0.72 + 0.36), (
            second
        )


async def test_a_campaign_has_its_images_and_its_part_of_what_their_workers_cost(
    past: Callable[..., Awaitable[Past]],
):
    cheap = Process("a", 0, 1000, device="0")
    dear = Process("b", 0, 1000, dollars_per_hour=3.6)
    anew = Process("a", 1010, 2000, device="0")
    for process, spring in ((cheap, 1.0), (dear, 0.25), (anew, 0.5)):
        series = "imagefleet_campaign_images_total"
        process.counts = {
            f'{series}{{campaign="spring"}}': spring * process.images,
            f'{series}{{campaign="autumn"}}': (1 - spring) * process.images,
        }
    cold = Process("c", 0, 500, images_per_second=0)
    fleet = await past(cheap, dear, anew, cold)

    images = await fleet.by_campaign("Images by campaign in the time range", 2060, 2120)
    title = "Dollars by campaign in the time range"
    dollars = await fleet.by_campaign(title, 2060, 2120)

    assert images == pytest.approx({"spring": 1000 + 250 + 495, "autumn": 750 + 495})
    assert dollars == pytest.approx(
        {"spring": 0.2 + 0.25 + 0.099, "autumn": 0.75 + 0.099}
    )
    assert await fleet.by_campaign(title, 2060, 2120, 1) == pytest.approx(
        {"": cold.dollars}
    )
    spent = await fleet.panel(DOLLARS, 2060, 2120)
    assert sum(dollars.values()) + cold.dollars == pytest.approx(spent)


# Between them: begun anew at the same address and at others, pushed and scraped, killed and not,
# silent and heard, of three campaigns in turn.
@pytest.mark.parametrize("seed", [1, 2, 4, 7])
async def test_panels_records_and_raw_counters_agree_on_every_fleet(
    past: Callable[..., Awaitable[Past]], tmp_path, seed: int
):
    chance = random.Random(seed)
    processes = past_fleet.a_fleet(chance)
    bad = chance.choice(processes[1:] or processes)
    end = max(each.end for each in processes)
    async with open_storage(
        StorageSettings(storage=f"local:{tmp_path / 'storage'}")
    ) as storage:
        await storage.create()
        counted = await past_fleet.write_records(storage, processes, bad, chance)
        reports = []
        status = Campaigns(storage)
        for campaign in past_fleet.CAMPAIGNS:
            found = await report_records.read_records(storage, campaign, samples=0)
            reports.append(figures.compute(found, "local", FREE))
        await status.refresh()
    dollars = sum(each.dollars for each in processes)
    kept = counted["stored"] - counted["replaced"]
    server = await past(*processes)

    shown = await server.panel(DOLLARS, end + 60, end + 120)
    per_dollar = await server.panel(ALL_IN, end + 60, end + 120)
    title = "Dollars by campaign in the time range"
    by_campaign = await server.by_campaign(title, end + 60, end + 120)

    about = partial(pytest.approx, rel=0.01)
    assert shown == about(dollars)
    assert per_dollar == about(counted["stored"] / dollars)
    assert by_campaign.keys() == set(past_fleet.CAMPAIGNS)
    assert sum(by_campaign.values()) == about(dollars)
    money = [each["money"] for each in reports]
    assert sum(each["dollars"] for each in money) == about(dollars)
    assert total(reports, "images") == kept
    assert total(reports, "damaged") == 0
    assert total(reports, "failed") == counted["failed"] - counted["replayed"]
    assert total(reports, "cancelled") == counted["cancelled"]
    rows = status.records()
    for name in ("images", "failed", "cancelled"):
        assert total(rows, name) == total(reports, name)
    assert total(rows, "unknown") == status.unfit_records == 0
    for row in rows:
        ended = sum(row[each] for each in ("completed", "failed", "cancelled"))
        assert row["sent"] == ended + row["pending"]
    workers = [worker for each in reports for worker in each["workers"]]
    assert total(workers, "replaced") == counted["replaced"]
    assert total(workers, "doubled") == counted["doubled"]
    for each in money:
        split = sum(each["split"].values())
        assert split == pytest.approx(each["dollars"], rel=0.001)
    assert sum(each["split"]["images_replaced"] for each in money) > 0
    start_up = sum(
        each.start_up_seconds * each.dollars_per_hour / 3600 for each in processes
    )
    assert sum(each["split"]["start_up"] for each in money) == about(start_up)
    plans = [plan_of(each) for each in processes]
    assert sum(each.gpu_dollars for each in plans) == about(dollars)
    assert sum(each.start_up_dollars for each in plans) == about(start_up)
    await in_parts_of_its_time(server, processes, chance)


def plan_of(process: Process) -> estimate.BatchPlan:
    """The plan of what a process drew, as if it had been known before."""
    facts = (
        process.images_per_second,
        process.dollars_per_hour,
        process.start_up_seconds,
    )
    inputs = (estimate.Input(each, "given", "") for each in facts)
    seconds = process.end - process.start - process.start_up_seconds
    drawn = int(seconds * process.images_per_second)
    works = [work.ModelJobs(None, families.SD1, drawn, drawn, tflop=drawn)]
    return estimate.make_plan(works, [estimate.Part("a card", 1, *inputs)], FREE)


def total(rows: Iterable[Mapping[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows)


async def in_parts_of_its_time(
    server: Past, processes: Sequence[Process], chance: random.Random
) -> None:
    """Any time range has what was spent in it, though pushes are lost at its start and in it."""
    end = max(each.end for each in processes)
    silences = [each for process in processes for each in process.silences]
    starts = [chance.uniform(600, end - 3000) for _ in range(2)]
    starts += [chance.uniform(*silence) for silence in silences]
    # Of a process that was killed, and of each since its last push.
    unheard = sum(each.dollars_per_hour for each in processes) * PUSH_SECONDS / 3600
    for start in starts:
        stop = start + 5000
        while around := [
            each for each in silences if each[0] - 60 < stop < each[1] + 60
        ]:
            stop = max(each[1] for each in around) + 60  # it is heard of again
        spent = sum(each.dollars_in(start, stop) for each in processes)
        shown = await server.panel(DOLLARS, stop, stop - start)
        assert shown == pytest.approx(spent, rel=0.01, abs=unheard), (start, stop)
