"""The load generator against Azurite, beside a bare HTTP client and the SDK in the same run.

Azurite runs on this machine, in memory. The bare client is aiohttp with requests that were signed
beforehand: what any Python program can reach at most. All send the same jobs, in turns, so that
what else the machine does meets them all.

    python benchmarks/sending/rates.py [--jobs 4000] [--rounds 5] [--processes 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
from azure.storage.queue.aio import QueueClient
from rich.console import Console
from rich.table import Table

from imagefleet.storage.azure.account import read_address
from imagefleet.storage.azure.storage import API_VERSION, AzureStorage
from imagefleet.storage.open import open_storage
from loadgen.load import Load
from loadgen.processes import Refusals
from loadgen.settings import LoadSettings
from loadgen.template_source import TemplateSource

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "chaos"))
import azurite  # type: ignore[import-not-found]

#: The SDK's client is alone without retries here: a busy machine is to fail no turn.
TIMEOUT_SECONDS = 300.0

#: Requests in flight, of each client.
AT_ONCE = 128

TEMPLATE = """
prompt: "photo of a {noun} {place}, digital art, highly detailed, soft light, 35mm film"
negative_prompt: blurry, lowres, watermark, text, logo, jpeg artifacts
lists:
  noun: [lighthouse, teapot, red fox, umbrella, violin, bridge]
  place: [in a forest, on a beach, in a magic garden, under a starry sky]
job: {campaign: spring, steps: 20, cfg_scale: 7.5, sampler_name: Euler a, metadata: {sku: "{noun}"}}
"""


class Turn(NamedTuple):
    """One client's turn."""

    per_second: float
    cpu_seconds: float
    """Of one send, children included."""


def cpu_seconds() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


async def timed(send: Callable[[str], Awaitable[object]], bodies: list[str]) -> Turn:
    """*send* for each body, some at the same time."""
    left = iter(bodies)

    async def work() -> None:
        for body in left:
            await send(body)

    began_at, cpu = time.monotonic(), cpu_seconds()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    seconds = time.monotonic() - began_at
    return Turn(len(bodies) / seconds, (cpu_seconds() - cpu) / len(bodies))


class Clients:
    """The clients, and the jobs that they send."""

    def __init__(self, address: str, folder: Path, jobs: int, processes: int) -> None:
        self.settings = LoadSettings(storage=address, verify_share=0)
        self.folder = folder
        self.jobs = jobs
        self.processes = processes
        self.bodies = list(self.source().bodies(0))

    def source(self) -> TemplateSource:
        path = self.folder / "template.yaml"
        path.write_text(TEMPLATE)
        return TemplateSource(path, count=self.jobs)

    def storage(self) -> AzureStorage:
        return AzureStorage(self.settings, Refusals().policy, read_timeout_seconds=TIMEOUT_SECONDS)

    async def bare(self) -> Turn:
        """aiohttp, with headers of the SDK's signature and bodies made before the clock starts."""
        async with self.storage() as storage:
            sender = storage.queues["normal"].main.first._sender  # noqa: SLF001
            prepared: Iterator[tuple[bytes, dict[str, str]]] = iter(
                [
                    (data, dict((await sender.signed(len(data))).headers))
                    for data in map(sender.xml, self.bodies)
                ]
            )
            url = (await sender.signed(0)).url
        connector = aiohttp.TCPConnector(limit=AT_ONCE)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def send(_: str) -> None:
                data, headers = next(prepared)
                async with session.post(url, data=data, headers=headers) as response:
                    assert response.status == 201
                    await response.read()

            return await timed(send, self.bodies)

    async def sdk(self) -> Turn:
        """The SDK's `send_message`, over a session as ours: what a load did before."""
        async with self.storage() as storage:
            client: QueueClient = read_address(self.settings.storage).queue_client(
                self.settings.queue,
                None,
                transport=storage._transport,  # noqa: SLF001
                api_version=API_VERSION,
                retry_total=0,
            )
            return await timed(lambda body: client.send_message(body, time_to_live=-1), self.bodies)

    async def queue(self) -> Turn:
        """The queue of imagefleet alone: messages that are there already."""
        async with self.storage() as storage:
            queue = storage.queues["normal"]
            return await timed(lambda body: queue.send([body]), self.bodies)

    async def load(self, processes: int) -> Turn:
        """All that `imagefleet load` does: it makes the jobs, and writes its checkpoint.

        From the first batch that is stored, so that the start of processes does not count.
        """
        settings = self.settings.model_copy(update={"processes": processes})
        stored: list[tuple[float, int]] = []
        cpu = cpu_seconds()
        async with open_storage(settings, Refusals().policy) as storage:
            load = Load(storage, self.source(), settings, self.folder / "checkpoint", restart=True)
            summary = await load.run(lambda jobs: stored.append((time.monotonic(), jobs)))
        assert summary.sent == self.jobs
        (began_at, first), (ended_at, last) = stored[0], stored[-1]
        return Turn((last - first) / (ended_at - began_at), (cpu_seconds() - cpu) / self.jobs)


async def measure(clients: Clients, rounds: int) -> dict[str, list[Turn]]:
    async with open_storage(clients.settings) as storage:
        await storage.create()
        turns: dict[str, Callable[[], Awaitable[Turn]]] = {
            "bare aiohttp, signed before": clients.bare,
            "the SDK's send_message": clients.sdk,
            "imagefleet's queue": clients.queue,
            "imagefleet load": lambda: clients.load(1),
            f"imagefleet load, {clients.processes} processes": lambda: clients.load(
                clients.processes
            ),
        }
        found: dict[str, list[Turn]] = {name: [] for name in turns}
        for number in range(rounds + 1):  # the first warms up
            for name, turn in turns.items():
                result = await turn()
                print(f"{name}: {result.per_second:,.0f} jobs/s", file=sys.stderr)
                if number:
                    found[name].append(result)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=4_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    with azurite.running() as address, tempfile.TemporaryDirectory() as folder:
        clients = Clients(address, Path(folder), arguments.jobs, arguments.processes)
        found = asyncio.run(measure(clients, arguments.rounds))
    table = Table("client", "jobs/s", "of the bare client", "CPU a send, µs")
    bare, *_ = found.values()
    result: dict[str, dict[str, float]] = {}
    for name, turns in found.items():
        # Of each round by itself: what else runs on the machine changes from round to round.
        share = statistics.median(
            turn.per_second / other.per_second for turn, other in zip(turns, bare, strict=True)
        )
        per_second = statistics.median(turn.per_second for turn in turns)
        cpu = statistics.median(turn.cpu_seconds for turn in turns)
        table.add_row(name, f"{per_second:,.0f}", f"{share:.0%}", f"{cpu * 1e6:,.0f}")
        result[name] = {
            "jobs_per_second": round(per_second, 1),
            "of_bare": round(share, 3),
            "cpu_microseconds": round(cpu * 1e6, 1),
        }
    Console().print(table)
    print(json.dumps({"jobs": arguments.jobs, "rounds": arguments.rounds, "clients": result}))


if __name__ == "__main__":
    main()
