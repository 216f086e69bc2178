"""The runs of `imagefleet bench scaling`: real workers on one campaign, and their images/s."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from evaluation.bench import workers
from fleet import console
from imagefleet import concurrency, errors
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from worker.gpus.choice import Gpu

CAMPAIGN = "scaling"

#: Between two readings of the workers' metrics.
SAMPLE_SECONDS = 0.25

#: The slowest start: a cold cache, and GPUs that wait for the first one's kernels.
START_SECONDS = 600.0

#: Of the seconds before: as much as it is still warming up, which a round of all slots is not.
FASTER = 1.25

#: The queue never holds fewer jobs for each worker, so that none waits for work.
JOBS_PER_WORKER = 256

HOW = (
    "Images/s are the slope of the workers' own counts of stored images, read every"
    f" {SAMPLE_SECONDS:g} s. Measuring begins once every worker draws, none compiles, and all"
    " together draw no faster than before: start-up and warm-up are left out. Perfect linear is the"
    " images/s of one worker times the workers."
)


@dataclass(frozen=True, slots=True)
class Row:
    """One run. *linear_fraction* is the share of perfect linear."""

    workers: int
    images_per_second: float
    perfect_linear: float
    linear_fraction: float
    by_worker: Sequence[float]
    seconds: float
    images: int
    ready_seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """What is drawn, with which model, and for how long."""

    model: Path
    fields: Mapping[str, Any]
    """Of each job, beside its prompt and its seed."""
    seconds: float
    warm_seconds: float
    flags: Sequence[str]
    environment: Mapping[str, str]
    words: str
    negative_prompt: str

    def message(self, number: int) -> str:
        return json.dumps(
            {
                "id": f"{number:07}",
                "campaign": CAMPAIGN,
                "prompt": f"{number} {self.words}",
                "negative_prompt": self.negative_prompt,
                "seed": number,
                **self.fields,
            }
        )


async def measure(
    work: Work, gpus: Sequence[Gpu], counts: Sequence[int], folder: Path
) -> list[Row]:
    """The runs, all on one campaign of one storage."""
    rows: list[Row] = []
    address = f"local:{folder / 'storage'}"
    numbers = iter(range(10**9))
    async with (
        open_storage(StorageSettings(storage=address)) as storage,
        aiohttp.ClientSession() as client,
    ):
        await storage.create()
        for count in counts:
            with console.stderr.status(
                f"{console.counted(count, 'worker')}: starting"
            ) as status:
                names = [gpu.name for gpu in gpus[:count]]
                flags = ["--storage", address, "--model", str(work.model), *work.flags]
                flags += ["--gpus", ",".join(names)]
                filling = _keep_filled(storage, work, numbers, count)
                async with (
                    concurrency.beside(filling),
                    workers.running(
                        names, flags, work.environment, lambda _: None
                    ) as machine,
                ):
                    samples = await _samples(machine, client, work, status.update)
                    rows.append(_row(names, samples, machine.began_at, rows))
                    await machine.end()
            row = rows[-1]
            console.print_note(
                f"{console.counted(count, 'worker')}: {row.images_per_second:.2f} images/s,"
                f" {console.percent(row.linear_fraction)} of linear"
            )
    return rows


async def _keep_filled(
    storage: Storage, work: Work, numbers: Iterator[int], count: int
) -> None:
    """Side task: no worker waits for jobs."""
    least = JOBS_PER_WORKER * count
    while True:
        depth = await storage.queue.depth()
        if (missing := 2 * least - depth.messages) >= least:
            await storage.queue.send(
                [work.message(next(numbers)) for _ in range(missing)]
            )
        await asyncio.sleep(SAMPLE_SECONDS)


async def _samples(
    machine: workers.Machine,
    client: aiohttp.ClientSession,
    work: Work,
    show: Callable[[str], object],
) -> list[workers.Sample]:
    """The samples of the measured time."""
    count = console.counted(len(machine.gpus), "worker")
    try:
        async with asyncio.timeout(START_SECONDS):
            await until_warm(
                machine, client, work.warm_seconds, lambda: show(f"{count}: warming")
            )
    except TimeoutError:
        raise errors.NodeError(
            f"not all of {count} draw at full speed within {START_SECONDS:g} seconds"
        ) from None
    samples = [await machine.sample(client, workers.Sample)]
    while (done := samples[-1].at - samples[0].at) < work.seconds:
        show(f"{count}: measured {done:.0f} of {work.seconds:g} s")
        await asyncio.sleep(SAMPLE_SECONDS)
        samples.append(await machine.sample(client, workers.Sample))
    return samples


async def until_warm(
    machine: workers.Machine,
    client: aiohttp.ClientSession,
    warm_seconds: float,
    show: Callable[[], object] = lambda: None,
) -> None:
    """Until all workers draw, none compiles, and they draw no faster than they did before."""
    while True:
        sample = await machine.sample(client, workers.Sample)
        images = sample.images
        draws = images.keys() == set(machine.gpus) and min(images.values()) > 0
        if draws and not sample.compiling:
            break
        await asyncio.sleep(SAMPLE_SECONDS)
    show()
    before, rate, was = sum(images.values()), 0.0, 0.0
    while rate == 0 or rate > FASTER * was:
        await asyncio.sleep(warm_seconds)
        now = sum((await machine.sample(client, workers.Sample)).images.values())
        before, was, rate = now, rate, (now - before) / warm_seconds


def _row(
    names: Sequence[str],
    samples: Sequence[workers.Sample],
    began_at: float,
    rows: Sequence[Row],
) -> Row:
    """*rows* are those so far, of one worker first."""
    first, last = samples[0], samples[-1]
    by_worker = [workers.rate(samples, name) for name in names]
    total = sum(by_worker)
    linear = len(names) * rows[0].images_per_second if rows else total
    return Row(
        workers=len(names),
        images_per_second=total,
        perfect_linear=linear,
        linear_fraction=total / linear,
        by_worker=by_worker,
        seconds=last.at - first.at,
        images=sum(last.images.values()) - sum(first.images.values()),
        ready_seconds=first.at - began_at,
    )
