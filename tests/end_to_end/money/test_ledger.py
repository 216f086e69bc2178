"""The ledger of money of a real fleet: `report`, `status`, a panel and the processes' own counters.

Real workers push, are killed and restarted; jobs go one by one or in bundles, fail and are
replayed, wait and are cancelled, or come through the gateway; a worker's images are redone. What
the processes counted is noted on its way to the server.
"""

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

import azurite
import forks
import polling
from cli import console
from fleet.monitor import prometheus
from imagefleet.records import reader
from imagefleet.storage.open import Storage
from imagefleet.validation import JSONDict
from storages import local_only

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "dashboards" / "grafana" / "cost.json"

#: Jobs that are drawn, some at once; that fail when they are, until they are replayed; and that are
#: cancelled.
DRAWN = 20
BROKEN = 6
CANCELLED = 8

#: Jobs of a message of those that are drawn, in every second load.
BUNDLED = 3

#: Requests to the gateway, at the same time; and captions of a sweep of two values.
REQUESTS = 12
CAPTIONS = 6

#: Images of the worker of which a rate is asked.
RATED = 3

#: Images that a killed worker has stored since its last push, at most.
UNPUSHED = 8

IMAGES = "imagefleet_images_total"
READY = "imagefleet_start_up_seconds"
OF_CAMPAIGN = "imagefleet_campaign_images_total"

#: Pushes several times a second, so that a killed worker has pushed nearly all that it counted.
OFTEN = "from imagefleet.telemetry import push; push.PUSH_SECONDS = 1.0"
#: Draws nothing for a broken prompt, as long as the file *marker* is there.
BREAKS = """
    from pathlib import Path
    from benchmarks.stand_in import draw_noise
    def draw(request):
        if str(request.prompt) == "broken" and Path("{marker}").exists():
            raise errors.JobError
        return draw_noise(request)
    return StandInEngine(capacity=4, tick_seconds=0.5, draw=draw)
"""

Run = Callable[..., Awaitable[Any]]
Start = Callable[..., Awaitable[asyncio.subprocess.Process]]
StandInWorker = Callable[..., list[Any]]  # the fixture of conftest.py

pytestmark = [
    pytest.mark.slow,
    local_only,
]


class Noting:
    """Passes pushes on to a server, and keeps the last value of each series."""

    def __init__(self, push_url: str) -> None:
        self.url = ""
        self._push_url = push_url
        self._last: dict[tuple[str, ...], tuple[str, dict[str, str], float]] = {}

    def total(self, metric: str, **labels: str) -> float:
        """The sum over all processes, or over those with the labels."""
        found = (each for each in self._last.values() if each[0] == metric)
        return sum(value for _, own, value in found if labels.items() <= own.items())

    def drawing(self, device: str) -> int:
        """How many processes of a GPU have drawn images."""
        found = [
            own for name, own, value in self._last.values() if name == IMAGES and value
        ]
        return len({own["process"] for own in found if own["device"] == device})

    def of(self, worker: str, metric: str) -> float:
        """The same of a worker's process."""
        infos = [
            own
            for name, own, _ in self._last.values()
            if name == "imagefleet_worker_info"
        ]
        of = [own["instance"] for own in infos if own["worker"] == worker]
        return sum(self.total(metric, instance=each) for each in of)

    async def take(self, request: web.Request) -> web.Response:
        text = await request.text()
        extra = [
            each.partition("=")[::2] for each in request.query.getall("extra_label")
        ]
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {**sample.labels, **dict(extra)}
                series = (sample.name, *map("=".join, sorted(labels.items())))
                self._last[series] = sample.name, labels, sample.value
        url = f"{self._push_url}?{request.query_string}"
        async with (
            aiohttp.ClientSession() as client,
            client.post(url, data=text) as answer,
        ):
            return web.Response(status=answer.status)


@pytest.fixture
async def noting(victoria_metrics) -> AsyncIterator[Noting]:
    receiver = Noting(victoria_metrics.push_url)
    app = web.Application(client_max_size=2**24)
    app.router.add_post("/push", receiver.take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/push"
    yield receiver
    await runner.cleanup()


@pytest.fixture
def run(environment: dict[str, str], stand_in_forks: forks.Forks, tmp_path) -> Run:
    """Runs a command to its end; returns its JSON."""

    async def run_command(*arguments: str) -> Any:
        done = await asyncio.to_thread(
            stand_in_forks.run, *arguments, cwd=tmp_path, variables=environment
        )
        assert done.returncode == 0, (arguments, done.stderr)
        return json.loads(done.stdout) if "--json" in arguments else None

    return run_command


@pytest.fixture
async def start(
    noting: Noting,
    stand_in_worker: StandInWorker,
    environment: dict[str, str],
    tmp_path,
) -> AsyncIterator[Start]:
    """Starts a worker that pushes, with a stand-in engine or, named "demo", with the real one."""
    processes = []

    async def start_worker(
        name: str, price: str, *more: str
    ) -> asyncio.subprocess.Process:
        flags = ["--push-url", noting.url, "--lease-seconds", "2", "--slots", "4"]
        flags += ["--device", "cpu", "--name", name, "--price-per-hour", price, *more]
        loading = BREAKS.format(marker=tmp_path / "broken")
        command = stand_in_worker(*flags, loading=loading, changes=OFTEN)
        if name == "demo":
            command[2] = f"{OFTEN}; from fleet import main; main.main()"
        variables = {**environment, "IMAGEFLEET_LOG_FORMAT": "json"}
        with (tmp_path / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command, env=variables, stderr=log
            )
        processes.append(process)
        return process

    yield start_worker
    for process in processes:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture
async def ask(
    environment: dict[str, str], tmp_path
) -> AsyncIterator[Callable[[int], Awaitable[int]]]:
    """Sends one request to a gateway's process, and returns the answer's number of images."""
    (port,) = azurite.free_ports(1)
    command = (sys.executable, "-m", "fleet.entry", "serve", "--port", str(port))
    url = f"http://127.0.0.1:{port}/sdapi/v1/txt2img"
    with (tmp_path / "gateway.log").open("wb") as log:
        gateway = await asyncio.create_subprocess_exec(
            *command, env=environment, stderr=log, cwd=ROOT
        )

    async def is_live() -> bool:
        try:
            async with (
                aiohttp.ClientSession() as client,
                client.get(f"http://127.0.0.1:{port}/live") as answer,
            ):
                return answer.ok
        except aiohttp.ClientConnectionError:
            return False

    async def send(seed: int) -> int:
        payload = {"prompt": "a door", "steps": 4, "width": 64, "height": 64}
        async with (
            aiohttp.ClientSession() as client,
            client.post(url, json={**payload, "seed": seed}) as answer,
        ):
            return len((await answer.json())["images"])

    await polling.until(is_live)
    yield send
    gateway.terminate()
    assert await gateway.wait() == console.EXIT_DONE


def process_of(log: Path, gpu: str) -> int:
    """The first worker of a GPU, by its parent's log."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    started = [
        each
        for each in lines
        if each["action"] == "worker_started" and each["gpu"] == gpu
    ]
    return int(started[0]["process_id"])


async def counted(storage: Storage, campaign: str = "spring", **wanted: int) -> None:
    """Waits until the campaign has these numbers."""
    await polling.until(
        lambda: reader.counts(storage, campaign),
        lambda found: all(
            getattr(found, name) == value for name, value in wanted.items()
        ),
    )


@pytest.fixture
async def redone(
    storage: Storage,
    noting: Noting,
    start: Start,
    run: Run,
    ask: Callable[[int], Awaitable[int]],
    tmp_path,
) -> JSONDict:
    """What `redo` says at the end of a fleet that has drawn the *sent* jobs."""
    sent = 0

    async def load(
        name: str, campaign: str, count: int, prompt: str, bundle: int = 1
    ) -> None:
        nonlocal sent
        sent += count if campaign == "spring" else 0
        job = {"campaign": campaign, "prompt": prompt, "steps": 4}
        job |= {"width": 64, "height": 64}
        lines = (
            json.dumps({**job, "id": f"{name}{number}"}) + "\n"
            for number in range(count)
        )
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        await run("load", f"{name}.jsonl", "--bundle", str(bundle))

    async def load_until(has_drawn: Callable[[], float]) -> None:
        """Sends jobs until that worker has got some of them."""

        async def is_over() -> bool:
            return bool(has_drawn()) or not (await storage.queue.depth()).messages

        for bundle in itertools.cycle((BUNDLED, 1)):
            if has_drawn():
                break
            await load(f"drawn{sent}-", "spring", DRAWN, "a house", bundle)
            await polling.until(is_over)

    (marker := tmp_path / "broken").touch()
    await load("cancelled", "autumn", CANCELLED, "a cat")
    await run("cancel", "autumn", "--yes")
    (tmp_path / "captions.txt").write_text("a boat\n" * CAPTIONS)
    fields = ("cfg_scale=5,7", "steps=4", "width=64", "height=64")
    of_sweep = [f"--set={each}" for each in fields]
    await run("sweep", "captions.txt", "--campaign", "summer", *of_sweep)
    await load("broken", "spring", BROKEN, "broken")
    await load("first", "spring", DRAWN, "a house")
    pair = await start("pair", "1.2", "--gpus", "0,1")
    answers = [asyncio.create_task(ask(seed)) for seed in range(REQUESTS)]
    await load_until(lambda: noting.drawing(device="1"))
    assert await asyncio.gather(*answers) == [1] * REQUESTS
    os.kill(process_of(tmp_path / "pair.log", "1"), signal.SIGKILL)
    # Dollars of a process that draws nothing are no campaign's.
    await load_until(lambda: noting.drawing(device="1") > 1)
    alone = await start("alone", "0.36")
    await polling.until(lambda: noting.of("alone", READY))
    await load_until(lambda: noting.of("alone", IMAGES))
    alone.kill()
    demo = await start("demo", "3.6")
    await polling.until(lambda: noting.of("demo", READY))
    await load_until(lambda: noting.of("demo", IMAGES) > RATED)
    await counted(storage, completed=sent - BROKEN, failed=BROKEN)
    await counted(storage, "summer", completed=2 * CAPTIONS)
    marker.unlink()
    await run("replay", "spring", "--yes")
    await counted(storage, completed=sent, failed=0)
    found = await run("redo", "--worker", "alone", "--yes", "--json")
    await counted(storage, completed=sent, images=sent)
    for process in (pair, demo):
        process.terminate()
    codes = [await process.wait() for process in (pair, demo, alone)]
    assert codes == [console.EXIT_DONE, console.EXIT_DONE, -signal.SIGKILL]
    return {**found, "sent": sent}


async def test_what_a_fleet_paid_is_what_its_processes_counted_row_by_row(
    victoria_metrics, noting: Noting, redone: JSONDict, run: Run
):
    await victoria_metrics.arrived()

    report = await run("report", "spring", "--json")
    others = [await run("report", each, "--json") for each in ("gateway", "summer")]
    status = await run("status", "--json", "--prometheus", victoria_metrics.url)
    panels = json.loads(PAGE.read_text())["panels"]
    title = "Images per dollar in the time range, all in"
    (query,) = [each["targets"][0]["expr"] for each in panels if each["title"] == title]
    begin = datetime.now(UTC) - timedelta(hours=1)
    of_now = {
        "$fleet": ".*",
        "$__range": "1h",
        "${__from:date:seconds}": f"{begin.timestamp():.0f}",
    }
    for name, value in of_now.items():
        query = query.replace(name, value)
    async with prometheus.connected(victoria_metrics.url) as server:
        (panel,) = await server.at(query, datetime.now(UTC))

    dollars = noting.total("imagefleet_cost_dollars_total")
    drawn = noting.total(IMAGES)
    exactly = partial(pytest.approx, rel=1e-3)
    assert redone["replaced"] > 0
    # Of two processes that were killed, what was stored since the last push is in no counter.
    every = redone["sent"] + redone["replaced"] + REQUESTS + 2 * CAPTIONS
    assert every - 2 * UNPUSHED <= drawn <= every
    assert panel.last == exactly(drawn / dollars)
    assert (report["images"], report["failed"]) == (redone["sent"], 0)
    assert report["images_replaced"] == redone["replaced"]
    assert [each["images"] for each in others] == [REQUESTS, 2 * CAPTIONS]
    assert [each["failed"] for each in others] == [0, 0]
    money = [each["money"] for each in (report, *others)]
    for each in money:
        assert sum(each["split"].values()) == exactly(each["dollars"])
    assert 0 < sum(each["dollars"] for each in money) <= dollars * 1.001
    counted = noting.total(OF_CAMPAIGN, campaign="gateway")
    assert REQUESTS - UNPUSHED <= counted <= REQUESTS
    rows = {each["campaign"]: each for each in status["campaigns"]}
    assert rows["autumn"]["cancelled"] == CANCELLED
    assert rows["gateway"]["completed"] == REQUESTS
    assert rows["summer"]["completed"] == rows["summer"]["sent"] == 2 * CAPTIONS
    for row in rows.values():
        ends = ("completed", "failed", "cancelled", "discarded", "pending")
        assert sum(row[name] for name in ends) == row["sent"]
    (demo,) = [each for each in report["workers"] if each["name"].startswith("demo")]
    assert demo["gpu_dollars"] == pytest.approx(await planned(run, demo), rel=0.01)


async def planned(run: Run, worker: JSONDict) -> float:
    """The dollars of a worker's drawings by a plan that is told its start-up and its speed."""
    drawn = worker["images"] + worker["replaced"] + worker["doubled"]
    flags = {
        "--jobs": drawn,
        "--gpu": "mine",
        "--price-per-hour": worker["dollars_per_hour"],
        "--start-up-seconds": worker["start_up_seconds"],
        "--images-per-second": worker["images_per_second"],
    }
    given = [f"{name}={value}" for name, value in flags.items()]
    return float((await run("plan", *given, "--json"))["gpu_dollars"])
