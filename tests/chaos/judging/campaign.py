"""Judged jobs for tests of kills: eight images each, of contrasts that their seeds decide."""

import os
import signal
import sys
from typing import Any

import numpy as np

from benchmarks.stand_in import StandInEngine
from bundled import run_wrapped
from imagefleet.job.message import Job
from imagefleet.records import reader
from imagefleet.storage.open import Storage
from worker.engine import contract

IMAGES = 8

#: Patterns that images have: those of one are near-duplicates.
_PATTERNS = 20

#: A worker's calls to the storage, at one of which it is killed.
_CALLS = {
    "queue": ("receive", "renew", "release", "delete"),
    "blobs": ("create", "append"),
}


def jobs_of(campaign: str, count: int, keep: str) -> list[str]:
    fields = {"prompt": "a house", "campaign": campaign, "keep": keep}
    return [
        Job.model_validate(
            {
                **fields,
                "id": f"j{number}",
                "seed": number * IMAGES,
                "batch_size": IMAGES,
            }
        ).to_message()
        for number in range(count)
    ]


def draw(request: contract.ImageRequest) -> contract.Pixels:
    chance = np.random.default_rng(request.seed)
    return picture(int(chance.integers(_PATTERNS)), int(chance.integers(20, 120)))


def picture(pattern: int, contrast: int) -> contract.Pixels:
    """Blots [32, 32, 3]: those of one pattern differ in contrast alone."""
    waves = np.random.default_rng(pattern).normal(size=(8, 8))
    places = np.cos(np.pi * np.outer(np.arange(8), 2 * np.arange(32) + 1) / 64)
    blots = places.T @ waves @ places
    luma = 128 + contrast * blots / np.abs(blots).max()
    return np.stack([luma.astype(np.uint8)] * 3, axis=2)


Kept = dict[tuple[str, int | None], dict[str, float]]


async def kept(storage: Storage, campaign: str) -> Kept:
    """The scores of each image that counts, by its name and its seed."""
    found: Kept = {}
    async for record in reader.images(storage, campaign):
        place = str(record.blob).partition("/")[2], record.seed
        assert place not in found
        found[place] = record.scores
    return found


async def dropped(storage: Storage, campaign: str) -> set[str]:
    return {each.id async for each in reader.ended(storage, campaign)}


def worker() -> None:
    """A worker that kills itself (SIGKILL) at its call number ARGUMENT to the storage, if any."""
    left = int(sys.argv[1])

    def counted(call: Any) -> Any:
        async def call_or_die(*given: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return await call(*given, **named)

        return call_or_die

    run_wrapped(lambda: StandInEngine(draw=draw, capacity=IMAGES), _CALLS, counted)
