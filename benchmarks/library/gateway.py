"""Measures the cost of `imagefleet serve`: images/s, storage requests, and time of a picture.

    python benchmarks/library/gateway.py --out benchmarks/results/library.json
    python benchmarks/library/gateway.py --storage azurite --rate 5 --out /tmp/azurite.json

One worker with a stand-in engine of some images/s draws what comes straight to the queue, and by
turns what clients ask the gateway for, each one picture after the other. Then nothing draws: the
operations of a gateway's storage while 10 clients wait, and while 1,000 do. Last, one picture of
the demo's checkpoint from a gateway with its own worker, and by turns from `imagefleet.Engine`.
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])

import aiohttp

import imagefleet
from benchmarks.stand_in import StandInEngine
from evaluation.bench import machine
from gateway import server
from gateway.settings import GatewaySettings
from imagefleet import aio, concurrency
from imagefleet.files import demo
from imagefleet.storage.open import open_storage
from library import turns
from rows.groups import Figures, add_figures
from worker.engine import device
from worker.settings import WorkerSettings

SLOTS = 4

#: Of the stand-in's noise, whose PNG is as long as that of a picture of 512x512 pixels.
SIDE = 256

FEW, MANY = 10, 1_000


@contextlib.contextmanager
def storage_of(choice: str) -> Iterator[str]:
    """The address of the storage: a new folder, an Azurite of its own, or *choice*."""
    if choice == "azurite":
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "chaos"))
        import azurite

        with azurite.running() as connection:
            yield connection
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield choice or f"local:{folder}"


@contextlib.asynccontextmanager
async def serving(storage: str, *flags: str) -> AsyncIterator[aiohttp.ClientSession]:
    """`imagefleet serve` in a process of its own; a client's session with it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "fleet.entry",
        "serve",
        "--port",
        str(port),
        *flags,
        env={**os.environ, "IMAGEFLEET_STORAGE": storage},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with session_of(port) as session:
            while process.returncode is None:
                with contextlib.suppress(aiohttp.ClientError):
                    await session.get("/live")
                    break
                await asyncio.sleep(0.1)
            yield session
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def session_of(port: int) -> aiohttp.ClientSession:
    terms = {
        "connector": aiohttp.TCPConnector(limit=0),
        "timeout": aiohttp.ClientTimeout(600),
    }
    return aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", raise_for_status=True, **terms
    )


async def ask(session: aiohttp.ClientSession, **fields: Any) -> None:
    body = {"prompt": "a red house", **fields}
    async with session.post("/sdapi/v1/txt2img", json=body) as answer:
        await answer.read()


async def rates(arguments: argparse.Namespace, storage: str) -> Figures:
    """Images/s through the gateway over those of the bare queue."""
    settings = WorkerSettings(storage=storage, model=Path("stand-in"), trusted_key=None)
    load = functools.partial(
        StandInEngine,
        capacity=SLOTS,
        tick_seconds=SLOTS / arguments.rate,
        size=(SIDE, SIDE),
    )
    numbers, images, clients = itertools.count(), arguments.images, arguments.clients
    async with turns.working(settings, load) as worker, serving(storage) as session:

        async def client(left: Iterator[int]) -> None:
            for number in left:
                await ask(session, seed=number)

        def bare() -> Any:
            bodies = [
                json.dumps(
                    {"prompt": "a red house", "seed": number, "id": f"{number:06}"}
                )
                for number in itertools.islice(numbers, images)
            ]
            return worker.rate(images, worker.storage.queue.send(bodies))

        def served() -> Any:
            left = itertools.islice(numbers, images)
            return worker.rate(
                images, asyncio.gather(*(client(left) for _ in range(clients)))
            )

        found = await turns.compare(served, bare, arguments.pairs)
    return {
        "gateway_over_queue": turns.ratio(found),
        "gateway_and_queue_images_per_second": found,
        "clients": clients,
    }


async def requests(arguments: argparse.Namespace, storage: str) -> Figures:
    """The storage's operations a minute while few clients wait, and while many do."""
    settings = GatewaySettings(storage=storage, port=0)
    minutes: dict[int, float] = {}
    async with (
        aio.Fleet(open_storage(settings)) as fleet,
        server.serving(fleet, settings) as (gateway, port),
        concurrency.beside(gateway.desk.run()),
        session_of(port) as session,
    ):
        await fleet.storage.create()
        waiting = list[asyncio.Task[None]]()
        for count in (FEW, MANY):
            while len(waiting) < count:
                waiting.append(asyncio.create_task(ask(session)))
            while sum(bool(each.id) for each in gateway.desk.tickets) < count:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.1)
            before, began_at = billed(fleet.storage.operations), time.monotonic()
            await asyncio.sleep(arguments.seconds)
            passed = time.monotonic() - began_at
            minutes[count] = 60 * (billed(fleet.storage.operations) - before) / passed
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return {
        "storage_requests_1000_over_10": minutes[MANY] / minutes[FEW],
        "storage_requests_a_minute": minutes,
    }


def billed(operations: Any) -> int:
    return int(operations.queue + operations.blob_reads + operations.blob_writes)


async def added(arguments: argparse.Namespace, storage: str) -> Figures:
    """Seconds that the gateway and its worker add to one picture."""
    differences = []
    async with (
        imagefleet.AsyncEngine(demo.TRAINED) as engine,
        serving(storage, "--model", str(demo.TRAINED)) as session,
    ):

        async def directly(**fields: Any) -> None:
            async for drawn in engine.draw(
                [imagefleet.Job(prompt="a red house", **fields)]
            ):
                if drawn.error is not None:
                    raise drawn.error

        served = functools.partial(ask, session)
        for pair in range(arguments.pictures + 1):
            took = {}
            for way in (directly, served) if pair % 2 else (served, directly):
                began_at = time.monotonic()
                await way(seed=pair, steps=4, width=128, height=128)
                took[way] = 1e3 * (time.monotonic() - began_at)
            differences.append(took[served] - took[directly])
    quartiles = statistics.quantiles(differences[1:], n=4)  # the first one loads
    return {
        "added_milliseconds": quartiles[1],
        "added_milliseconds_quartiles": quartiles,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--storage", default="", help="azurite, or an address; a new folder if none"
    )
    parser.add_argument("--rate", type=float, default=20, help="images/s of the engine")
    parser.add_argument(
        "--pairs", type=int, default=5, help="turns of the queue and the gateway"
    )
    parser.add_argument("--images", type=int, default=300, help="of each turn")
    parser.add_argument(
        "--clients", type=int, default=50, help="at once, in these turns"
    )
    parser.add_argument(
        "--seconds", type=float, default=30, help="for which clients wait"
    )
    parser.add_argument(
        "--pictures", type=int, default=200, help="whose time is measured"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    figures: Figures = {}
    for measure in (rates, requests, added):
        with storage_of(arguments.storage) as storage:
            figures |= asyncio.run(measure(arguments, storage))
    figures["gateway_measured"] = {
        "command": "python benchmarks/library/gateway.py",
        "storage": arguments.storage.partition(":")[0] or "local",
        "rate": arguments.rate,
        "hardware": machine.hardware(device.find_device("auto")),
        "versions": machine.versions(),
    }
    add_figures(arguments.out, figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
