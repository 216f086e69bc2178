"""`imagefleet serve` as a process: with its own worker, and in a storm of clients and kills."""

import asyncio
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import webuiapi

from imagefleet.files import picture
from imagefleet.records import reader
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from polling import until

pytestmark = pytest.mark.slow

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]

#: A worker whose engine is loaded at once and makes 20 images/s.
WORKER = """
from benchmarks.stand_in import StandInEngine
from fleet import main
from worker import process

process._Worker._load_engine = lambda *_: StandInEngine(capacity=4, tick_seconds=0.2)
process.load.import_libraries = lambda: None
main.main()
"""

CLIENTS = 50
REQUESTS = 1_000
KILLS = 40


@pytest.fixture
def ports() -> list[int]:
    """Two that are free."""
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        return [server.getsockname()[1] for server in (one, other)]


@pytest.fixture
def port(ports: list[int]) -> int:
    return ports[0]


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts Python with arguments, for the storage of the test; kills it in the end."""
    started: list[subprocess.Popen[bytes]] = []
    variables = {
        **os.environ,
        "IMAGEFLEET_STORAGE": f"local:{tmp_path / 'data'}",
        "IMAGEFLEET_CACHE": str(tmp_path / "cache"),
        "IMAGEFLEET_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
    }

    def run(*arguments: str | Path) -> subprocess.Popen[bytes]:
        log = (tmp_path / f"{len(started)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=variables,
                stdout=log,
                stderr=log,
                cwd=tmp_path,
            )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


async def is_live(port: int) -> bool:
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/live") as response,
        ):
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def test_one_command_draws_through_a1111s_api_and_ends_with_its_worker(
    start: Callable[..., subprocess.Popen[bytes]], port: int, tmp_path
):
    model = ROOT / "demo_model"
    serve = start("-m", "fleet.entry", "serve", "--port", str(port), "--model", model)
    await until(lambda: is_live(port))
    api = await asyncio.to_thread(webuiapi.WebUIApi, port=port)

    found = await asyncio.to_thread(
        api.txt2img, prompt="a red house", steps=4, width=128, height=128
    )
    serve.send_signal(signal.SIGTERM)

    assert found.image.size == (128, 128)
    assert await asyncio.to_thread(serve.wait) == 0
    assert b"SIGTERM: finishing what has begun" in (tmp_path / "0.log").read_bytes()


async def test_a_storm_of_clients_and_kills_loses_and_doubles_nothing(
    start: Callable[..., subprocess.Popen[bytes]], ports: list[int], tmp_path
):
    def gateway(port: int) -> subprocess.Popen[bytes]:
        flags = ("--port", str(port), "--wait-seconds", "200")
        return start("-m", "fleet.entry", "serve", *flags)

    def worker(_: int) -> subprocess.Popen[bytes]:
        flags = ("--model", ROOT / "demo_model", "--lease-seconds", "10", "--port", "0")
        return start("-c", WORKER, "worker", *flags)

    # The gateways make the queue, without which workers end.
    gateways = {port: gateway(port) for port in ports}
    for port in ports:
        await until(lambda port=port: is_live(port))
    workers = {number: worker(number) for number in range(2)}
    answers: Counter[str] = Counter()
    numbers = iter(range(REQUESTS))

    async def client(session: aiohttp.ClientSession) -> None:
        """Draws one picture after the other, each at any gateway until it has come."""
        for number in numbers:
            for turn in itertools.count(number):
                status = await ask(session, ports[turn % len(ports)], number)
                answers[status] += 1
                if status == "200":
                    break

    async def kill() -> None:
        """Kills workers and gateways by turns; each comes back."""
        for count in range(KILLS):
            at = (count + 1) * REQUESTS // (KILLS + 2)
            await until(lambda at=at: answers["200"] >= at)
            processes, again = ((workers, worker), (gateways, gateway))[count % 2]
            name = list(processes)[count // 2 % 2]
            processes[name].kill()
            processes[name].wait()
            processes[name] = again(name)

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    # Only the gateway says when it has been too long.
    timeout = aiohttp.ClientTimeout(None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await asyncio.gather(kill(), *(client(session) for _ in range(CLIENTS)))

    log.warning(f"answers: {answers}")
    assert answers["200"] == REQUESTS
    async with open_storage(
        StorageSettings(storage=f"local:{tmp_path / 'data'}")
    ) as storage:
        await until(storage.queue.depth, lambda depth: depth.messages == 0)
        counts = await reader.counts(storage, "gateway")
        names = [name async for name in storage.blobs.names("gateway/")]
        drawn = Counter([await prompt_of(storage, name) for name in names])
    assert counts.pending == 0
    assert drawn == Counter(f"picture {number}" for number in range(REQUESTS))


async def ask(session: aiohttp.ClientSession, port: int, number: int) -> str:
    """Asks for a picture with a key of its own; the answer's status, once the gateway lives."""
    body = {"prompt": f"picture {number}", "seed": number, "width": 64, "height": 64}
    url = f"http://127.0.0.1:{port}/sdapi/v1/txt2img"
    headers = {"Idempotency-Key": f"picture {number}"}
    try:
        async with session.post(url, json=body, headers=headers) as response:
            found = await response.json()
    except aiohttp.ClientError:
        await until(lambda: is_live(port))
        return "cut off"
    if response.status == 200:
        assert_is_own(found, number)
    else:
        assert found["detail"]
    return str(response.status)


def assert_is_own(found: Any, number: int) -> None:
    (text,) = json.loads(found["info"])["infotexts"]
    assert text.startswith(f"picture {number}\n")
    assert f"Seed: {number}," in text


async def prompt_of(storage: Storage, name: str) -> str:
    data = await storage.blobs.read(name)
    with picture.opened(data or b"") as image:
        return picture.parameters(image, 1_000).partition("\n")[0]
