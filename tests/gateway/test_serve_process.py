"""`imagefleet serve` as a process: with its own worker, and in a storm of clients and kills."""

import asyncio
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
from evaluation.stand_in import StandInEngine
from fleet import main
from worker import process

process._Worker._load_engine = lambda *_: StandInEngine(capacity=4, tick_seconds=0.2)
process.load.import_libraries = lambda: None
main.main()
"""

CLIENTS, REQUESTS = 25, 300


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found: int = server.getsockname()[1]
        return found


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
    start: Callable[..., subprocess.Popen[bytes]], port: int, tmp_path
):
    def gateway() -> subprocess.Popen[bytes]:
        flags = ("--port", str(port), "--wait-seconds", "200")
        return start("-m", "fleet.entry", "serve", *flags)

    def worker() -> subprocess.Popen[bytes]:
        flags = ("--model", ROOT / "demo_model", "--lease-seconds", "10", "--port", "0")
        return start("-c", WORKER, "worker", *flags)

    serving = gateway()
    await until(lambda: is_live(port))
    workers = [
        worker(),
        worker(),
    ]  # the gateway has made the queue, without which they end
    answers: Counter[str] = Counter()
    answered: set[str] = set()
    numbers = iter(range(REQUESTS))

    async def client(session: aiohttp.ClientSession) -> None:
        """Draws one picture after the other; each has to be its own, or a clear error."""
        for number in numbers:
            body = {
                "prompt": f"picture {number}",
                "seed": number,
                "width": 64,
                "height": 64,
            }
            try:
                async with session.post("/sdapi/v1/txt2img", json=body) as response:
                    found = await response.json()
            except aiohttp.ClientError:
                answers["cut off"] += 1
                await until(lambda: is_live(port))
                continue
            if response.status == 200:
                assert_is_own(found, number)
                answered.add(f"picture {number}")
            elif response.status == 202:  # a machine that stood, or was busy
                log.warning(f"late, {answers}: {await state(tmp_path)}")
                await until(
                    lambda at=response.headers["Location"]: is_drawn(session, at)
                )
                answered.add(f"picture {number}")
            else:
                assert found["detail"]
            answers[str(response.status)] += 1

    async def kill() -> None:
        """Kills a worker, the other one, and the gateway; each comes back."""
        for at, process in zip((50, 100, 150), (*workers, serving), strict=True):
            await until(lambda at=at: answers.total() >= at)
            process.kill()
            process.wait()
            (gateway if process is serving else worker)()

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    # Only the gateway says when it has been too long.
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}",
        connector=connector,
        timeout=aiohttp.ClientTimeout(None),
    ) as session:
        await asyncio.gather(kill(), *(client(session) for _ in range(CLIENTS)))

    assert answers.total() == REQUESTS
    assert answers["200"] >= REQUESTS - 2 * CLIENTS
    async with open_storage(
        StorageSettings(storage=f"local:{tmp_path / 'data'}")
    ) as storage:
        await until(storage.queue.depth, lambda depth: depth.messages == 0)
        counts = await reader.counts(storage, "gateway")
        names = [name async for name in storage.blobs.names("gateway/")]
        drawn = Counter([await prompt_of(storage, name) for name in names])
    assert counts.pending == 0
    assert drawn.keys() >= answered
    assert set(drawn.values()) == {1}
    assert len(drawn) <= answers["200"] + answers["202"] + answers["cut off"]


def assert_is_own(found: Any, number: int) -> None:
    (text,) = json.loads(found["info"])["infotexts"]
    assert text.startswith(f"picture {number}\n")
    assert f"Seed: {number}," in text


async def is_drawn(session: aiohttp.ClientSession, address: str) -> bool:
    try:
        async with session.get(address) as response:
            return bool((await response.json())["status"] == "completed")
    except aiohttp.ClientError:
        return False


async def state(tmp_path: Path) -> str:
    """Where what nobody was answered may be: the queue, the records, or a process."""
    async with open_storage(
        StorageSettings(storage=f"local:{tmp_path / 'data'}")
    ) as storage:
        found = await storage.queue.depth(), await reader.counts(storage, "gateway")
    return "\n".join(map(str, (*found, *await asyncio.to_thread(log_ends, tmp_path))))


def log_ends(folder: Path) -> list[str]:
    return [log.read_text()[-500:] for log in sorted(folder.glob("*.log"))]


async def prompt_of(storage: Storage, name: str) -> str:
    data = await storage.blobs.read(name)
    with picture.opened(data or b"") as image:
        return picture.parameters(image, 1_000).partition("\n")[0]
