"""What a fleet would gain if workers preferred jobs whose LoRA they hold.

A queue gives no choice but which messages of a receive are kept; the others are put back, an
operation each, and count as delivered once more. So no job starves: one that was put back so often
is taken by whoever has it next. Models need no such rule: each has queues of its own.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from imagefleet.storage.protocol import MAX_RECEIVE
from worker.settings import WorkerSettings

#: Of SD1.5's LoRAs: rank 32, as most are, and rank 128.
LORA_MEGABYTES = (38, 144)

#: SaladCloud's median node downloads at 659 Mbit/s.
MEGABYTES_PER_SECOND = 659 / 8

#: Images/s of an RTX 4090 here, and the share left when each job has another LoRA (measured on an
#: H200); with the same one in all slots it is merged once, and costs nothing.
IMAGES_PER_SECOND = 3.8
MIXED_SHARE = 0.9775
SLOTS = 16

#: Put back so many times, a job is taken by whoever has it next.
MOST_PUT_BACK = 4

WORKERS = 8
JOBS = 40_000
TAKEN = 16


@dataclass(slots=True)
class _Job:
    lora: int
    put_back: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one rule, by so many LoRAs."""

    jobs: str
    rule: str
    images_per_second: float
    """Of one worker."""
    changes_per_image: float
    """LoRAs read from the storage."""
    operations_per_image: float
    """On the queue."""
    most_put_back: int


def compare(seed: int, jobs: int = JOBS) -> list[Outcome]:
    """Both rules, for a few LoRAs, hundreds, and thousands; popular ones are asked for more."""
    return [
        simulate(loras, megabytes, prefers_held=prefers_held, seed=seed, jobs=jobs)
        for megabytes in LORA_MEGABYTES
        for loras in (20, 200, 2_000)
        for prefers_held in (False, True)
    ]


def simulate(
    loras: int, megabytes: int, *, prefers_held: bool, seed: int, jobs: int = JOBS
) -> Outcome:
    held = WorkerSettings.model_fields["cache_megabytes"].default // megabytes
    dice = random.Random(seed)
    popularity = list(accumulate(1 / rank for rank in range(1, loras + 1)))
    waiting = deque(
        _Job(each) for each in dice.choices(range(loras), cum_weights=popularity, k=jobs)
    )
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(WORKERS)]
    operations = misses = drawn = most = mixed = counted = 0
    warm = jobs // 2  # caches are empty at first
    while len(waiting) >= MAX_RECEIVE:
        cache = caches[dice.randrange(WORKERS)]
        received = [waiting.popleft() for _ in range(MAX_RECEIVE if prefers_held else TAKEN)]
        kept = _kept(received, cache) if prefers_held else received
        ids = {id(job) for job in kept}
        back = [job for job in received if id(job) not in ids]
        for job in back:
            job.put_back += 1
            most = max(most, job.put_back)
        waiting.extendleft(reversed(back))
        drawn += len(kept)
        is_counted = drawn > warm
        counted += len(kept) * is_counted
        operations += (1 + len(back) + len(kept)) * is_counted
        mixed += len(kept) * is_counted * (len({job.lora for job in kept}) > 1)
        for job in kept:
            misses += (job.lora not in cache) * is_counted
            cache[job.lora] = None
            cache.move_to_end(job.lora)
            if len(cache) > held:
                cache.popitem(last=False)
    share = mixed / counted
    engine = IMAGES_PER_SECOND * (1 - share * (1 - MIXED_SHARE))
    # Downloads run beside the engine: only a line that is too slow for them makes it wait.
    line = counted * MEGABYTES_PER_SECOND / (misses * megabytes) if misses else float("inf")
    rule = "prefers what it holds" if prefers_held else "takes what comes"
    return Outcome(
        f"{loras:,} LoRAs of {megabytes} MB",
        rule,
        min(engine, line),
        misses / counted,
        operations / counted,
        most,
    )


def _kept(received: Sequence[_Job], cache: OrderedDict[int, None]) -> list[_Job]:
    """Those that must not wait any longer, then those whose LoRA is held, then the oldest."""
    ranked = sorted(received, key=lambda job: (job.put_back < MOST_PUT_BACK, job.lora not in cache))
    return ranked[:TAKEN]
