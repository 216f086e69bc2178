"""Measures `imagefleet worker --gpus all` against one GPU of the machine, each on a new storage.

    python benchmarks/gpus.py --out /tmp/gpus.json
    python benchmarks/gpus.py --counts 1,2,4 --seconds 40 --out /tmp/gpus.json
    python benchmarks/gpus.py --azurite 0.05 --out /tmp/gpus.json
    python benchmarks/gpus.py --tiny

Each job has another LoRA of rank 32, and goes from the queue to the stored PNG. Every number of
GPUs is a run of its own, which is measured once all of them draw at full speed: start-up and
compilation are left out. The last run then loses a worker to SIGKILL, and every job is counted.
`--tiny` tries everything with processes on the CPU, with meaningless figures. The results are
written after each run; on a machine without kernels in its cache the first run starts slowest.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp
import pynvml

from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from one_machine import far_azurite, figures
from one_machine.workers import SAMPLE_SECONDS, Machine, Sample, running
from worker.gpus import choice
from worker.gpus.choice import Gpu
from worker.settings import MachineSettings

#: The slowest start: a cold cache, and GPUs that wait for the first one's kernels.
START_SECONDS = 400.0

#: A killed worker's jobs are delivered again after it.
LEASE_SECONDS = 30

#: For a killed worker's start with kernels in the cache, and the last jobs.
KILL_SECONDS = 110.0

#: Jobs in the queue for each GPU, leased ones as well: Azurite's answers take longer the more wait.
QUEUED = 400


@dataclass(frozen=True, slots=True)
class Setup:
    """The checkpoint, and the jobs with their LoRAs."""

    model: Path
    lora_directory: Path
    message: Callable[[int], str]


def prepare(folder: Path, model: Path | None, count: int, *, is_tiny: bool) -> Setup:
    """The checkpoint, and as many jobs with a LoRA each."""
    import tiny_model
    from evaluation.bench import engine as bench_engine
    from families import lora_kinds
    from worker.engine import device

    name = "cpu" if is_tiny else "auto"
    if is_tiny:
        model = tiny_model.build_tiny_checkpoint(folder / "tiny")
    setup = bench_engine.prepare(model, folder, name, loras=0)
    directory = setup.workload.lora_directory
    names = lora_kinds.build_linked(
        directory, setup.model, count, device.find_device(name)
    )
    side = 64 if is_tiny else 512
    workload = replace(
        setup.workload, sizes=((side, side),), loras=tuple((name,) for name in names)
    )
    return Setup(setup.model, directory, workload.message)


class Benchmark:
    def __init__(
        self, arguments: argparse.Namespace, gpus: Sequence[Gpu], setup: Setup
    ) -> None:
        self.arguments = arguments
        self.gpus = gpus
        self.setup = setup
        self.runs: dict[int, JSONDict] = {}
        self.found: JSONDict = {}
        self._sent = 0

    async def run(self) -> None:
        for count in self.arguments.counts:
            say(f"{count} of {len(self.gpus)} GPUs")
            async with self._storage() as address:
                await self._run(count, address)

    @contextlib.asynccontextmanager
    async def _storage(self) -> AsyncIterator[str]:
        """The address of an empty one."""
        if self.arguments.azurite is not None:
            async with far_azurite.running(self.arguments.azurite) as address:
                yield address
        else:
            with tempfile.TemporaryDirectory(dir=self.arguments.folder) as folder:
                yield f"local:{folder}"

    async def _run(self, count: int, address: str) -> None:
        arguments, gpus = self.arguments, self.gpus[:count]
        jobs = arguments.jobs * count
        is_all = arguments.gpus == choice.ALL and count == len(self.gpus)
        names = [gpu.name for gpu in gpus]
        flags = (
            "--gpus",
            choice.ALL if is_all else ",".join(names),
            "--model",
            self.setup.model,
            "--lora-directory",
            self.setup.lora_directory,
            "--storage",
            address,
            "--lease-seconds",
            LEASE_SECONDS,
            "--device",
            "cpu" if arguments.tiny else "auto",
            *arguments.flags,
        )
        environment = os.environ | ({"OMP_NUM_THREADS": "1"} if arguments.tiny else {})
        async with (
            open_storage(StorageSettings(storage=address)) as storage,
            aiohttp.ClientSession() as client,
        ):
            await storage.create()
            async with (
                asyncio.TaskGroup() as tasks,
                running(
                    names, [str(each) for each in flags], environment, say
                ) as machine,
            ):
                filling = tasks.create_task(self._fill(storage, jobs, QUEUED * count))
                async with asyncio.timeout(START_SECONDS):
                    await machine.until_warm(client, arguments.warm)
                samples, clocks = await self._samples(machine, client, gpus)
                self.runs[count] = figures.measured(samples, names, clocks)
                self.runs[count]["ready_seconds"] = samples[0].at - machine.began_at
                self._check(samples[-1], names, jobs)
                self.write()
                filling.cancel()
                if count > 1 and count == arguments.counts[-1]:
                    self.found["killed"] = await self._kill(
                        machine, client, storage, self._sent
                    )
                self.found["drain_exit_code"] = await machine.end()
                self.write()

    async def _fill(self, storage: Storage, jobs: int, queued: int) -> None:
        """Sends jobs as they are drawn, so that so many are *queued*."""
        self._sent = 0
        while self._sent < jobs:
            missing = queued - (await storage.queue.depth()).messages
            end = min(jobs, self._sent + max(0, missing))
            await storage.queue.send(map(self.setup.message, range(self._sent, end)))
            self._sent = end
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _samples(
        self, machine: Machine, client: aiohttp.ClientSession, gpus: Sequence[Gpu]
    ) -> tuple[list[Sample], JSONDict]:
        """The samples of the measured time, and each card's mean clock and power."""
        samples = [await machine.sample(client)]
        seen: dict[str, list[tuple[int, float]]] = defaultdict(list)
        while samples[-1].at - samples[0].at < self.arguments.seconds:
            await asyncio.sleep(SAMPLE_SECONDS)
            samples.append(await machine.sample(client))
            for gpu in gpus:
                if gpu.visible and gpu.visible.startswith("GPU-"):
                    seen[gpu.name].append(
                        await asyncio.to_thread(_clock_and_power, gpu.visible)
                    )
        clocks = {
            name: {
                "sm_megahertz": statistics.fmean(each[0] for each in readings),
                "watts": statistics.fmean(each[1] for each in readings),
            }
            for name, readings in seen.items()
        }
        return samples, clocks

    def _check(self, last: Sample, names: Sequence[str], jobs: int) -> None:
        if sum(last.images.values()) >= 0.95 * jobs:
            sys.exit(
                f"the queue ran low: more than --jobs {self.arguments.jobs} per GPU are needed"
            )
        self.found["metrics"] = {
            "addresses": 1,
            "gpus": sorted(last.images),
            "has_each_gpu": sorted(last.images) == sorted(names),
        }

    async def _kill(
        self,
        machine: Machine,
        client: aiohttp.ClientSession,
        storage: Storage,
        jobs: int,
    ) -> JSONDict | None:
        """Kills one worker as it draws; every job that is not taken off must be stored."""
        gpu = machine.gpus[-1]
        if self.arguments.until - time.monotonic() < KILL_SECONDS:
            say("too little time is left to kill a worker: see --limit")
            return None
        before = await machine.sample(client)
        killed = machine.process_ids(gpu)[-1]
        os.kill(killed, signal.SIGKILL)
        killed_at = time.monotonic()
        say(f"killed the worker of GPU {gpu}, process {killed}")
        draws_again = False
        while not draws_again and time.monotonic() - killed_at < KILL_SECONDS / 2:
            await asyncio.sleep(
                SAMPLE_SECONDS
            )  # its successor draws from the same queue
            sample = await machine.sample(client)
            is_new = machine.process_ids(gpu)[-1] != killed
            draws_again = is_new and sample.images.get(gpu, 0) > 0
        drawing_again_seconds = time.monotonic() - killed_at if draws_again else None
        removed = await _take_off(storage)
        while (depth := await storage.queue.depth()).messages:
            if time.monotonic() - killed_at > KILL_SECONDS:
                break
            await asyncio.sleep(SAMPLE_SECONDS)
        stored = {Path(name).stem async for name in storage.blobs.names("default/")}
        expected = {f"{number:06}" for number in range(jobs)} - removed
        return {
            "gpu": gpu,
            "slots_busy_when_killed": before.busy_slots.get(gpu),
            "restarts": len(machine.process_ids(gpu)) - 1,
            "drawing_again_seconds": drawing_again_seconds,
            "jobs": len(expected),
            "jobs_stored": len(expected & stored),
            "jobs_lost": len(expected - stored),
            "jobs_failed": (await storage.poison.depth()).messages,
            "jobs_left_in_queue": depth.messages,
        }

    def write(self) -> None:
        """The results so far: a run may be cut short."""
        counts = list(self.runs)
        self.found |= {
            "images_per_second_by_count": {
                str(count): run["images_per_second"] for count, run in self.runs.items()
            },
            "runs": {str(count): run for count, run in self.runs.items()},
        }
        compared = {
            str(count): figures.compared(self.runs[1], self.runs[count])
            for count in counts
            if count > 1 and 1 in self.runs
        }
        if compared:
            most = compared[str(max(counts))]
            self.found |= {
                "multi_gpu_count": max(counts),
                "multi_gpu_linear_fraction": most["linear_fraction"],
                "compared": compared,
            }
        text = json.dumps(figures.rounded(self.found), indent=2) + "\n"
        if self.arguments.out:
            self.arguments.out.write_text(text)


async def _take_off(storage: Storage) -> set[str]:
    """Removes the jobs that no worker has had; returns their ids."""
    removed: set[str] = set()
    while messages := await storage.queue.receive(32, LEASE_SECONDS):
        again = [
            each for each in messages if each.delivery_count > 1
        ]  # the killed worker's
        for each in messages:
            if each in again:
                await storage.queue.release(each)
            else:
                removed.add(json.loads(each.body)["id"])
                await storage.queue.delete(each)
        if len(again) == len(messages):
            break
    return removed


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _clock_and_power(uuid: str) -> tuple[int, float]:
    """MHz and watts."""
    card = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    clock = pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM)
    return int(clock), pynvml.nvmlDeviceGetPowerUsage(card) / 1000


def _counts(given: str | None, gpus: int) -> list[int]:
    counts = sorted(
        {1, gpus} if given is None else {int(each) for each in given.split(",")}
    )
    if counts[0] < 1 or counts[-1] > gpus:
        sys.exit(f"--counts {given}: this machine has {gpus} of --gpus")
    return counts


def main(given: Sequence[str] | None = None) -> None:
    began_at = time.monotonic()
    parser = argparse.ArgumentParser(
        description="one GPU against several of this machine"
    )
    parser.add_argument(
        "--model", type=Path, help="by default SD1.5 with random weights"
    )
    parser.add_argument("--gpus", default=choice.ALL, help="as the worker's")
    parser.add_argument(
        "--counts", help="numbers of GPUs, such as 1,2,4 [default: 1 and all]"
    )
    parser.add_argument("--seconds", type=float, help="measured, of each run")
    parser.add_argument(
        "--warm", type=float, help="seconds before that, twice at least"
    )
    parser.add_argument("--jobs", type=int, help="at most, for each GPU")
    parser.add_argument(
        "--limit", type=float, default=560.0, help="seconds of everything"
    )
    parser.add_argument(
        "--azurite",
        type=float,
        metavar="SECONDS",
        help="on an Azurite of this machine, whose round trips take so much longer",
    )
    parser.add_argument("--tiny", action="store_true", help="try it on the CPU")
    parser.add_argument("--out", type=Path)
    parser.add_argument("flags", nargs="*", help="more flags of the worker, after --")
    arguments = parser.parse_args(given)
    tiny = arguments.tiny
    arguments.gpus = "0,1" if tiny and arguments.gpus == choice.ALL else arguments.gpus
    arguments.seconds = arguments.seconds or (6.0 if tiny else 60.0)
    arguments.warm = arguments.warm or (2.0 if tiny else 10.0)
    arguments.jobs = arguments.jobs or (500 if tiny else 6000)
    arguments.until = began_at + arguments.limit
    device = "cpu" if tiny else "auto"
    gpus = choice.choose(MachineSettings(model="m", gpus=arguments.gpus, device=device))
    arguments.counts = _counts(arguments.counts, len(gpus))
    with tempfile.TemporaryDirectory(prefix="imagefleet-gpus-") as folder:
        arguments.folder = folder
        # In a process of its own, which leaves the GPU to the workers.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            jobs = arguments.jobs * arguments.counts[-1]
            setup = pool.apply(
                prepare,
                (Path(folder), arguments.model, jobs),
                {"is_tiny": arguments.tiny},
            )
        benchmark = Benchmark(arguments, gpus, setup)
        asyncio.run(benchmark.run())
    benchmark.found["benchmark_seconds"] = time.monotonic() - began_at
    benchmark.write()
    print(json.dumps(figures.rounded(benchmark.found), indent=2))
    if benchmark.found["drain_exit_code"] != 0:
        sys.exit("the workers did not end as they should")


if __name__ == "__main__":
    main()
