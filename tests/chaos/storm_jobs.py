"""The jobs of a storm: single images, some of several, some bad, and a campaign to be cancelled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from storm_worker import BAD_STEPS

#: One job in so many is bad: it fails for good, however often it is replayed.
BAD_EVERY = 50

#: One in so many of the others has several images, which kills and stops interrupt.
SEVERAL_EVERY = 8
IMAGES = 6

#: A campaign of one job in so many, besides the others; it is cancelled while it is drawn.
STOPPED = "stopped"
STOPPED_EVERY = 10


def all_jobs(count: int) -> Iterator[dict[str, object]]:
    for number in range(count):
        bad = number % BAD_EVERY == BAD_EVERY - 1
        steps = {"steps": BAD_STEPS} if bad else {}
        several = {"n_iter": IMAGES} if not bad and number % SEVERAL_EVERY == 0 else {}
        yield {"id": f"j{number}", "prompt": "a house", "seed": number, **steps, **several}


def stopped_jobs(count: int) -> Iterator[dict[str, object]]:
    for number in range(0, count, STOPPED_EVERY):
        several = {"n_iter": IMAGES} if number % (2 * STOPPED_EVERY) == 0 else {}
        job = {"id": f"j{number}", "prompt": "a house", "seed": number}
        yield {**job, "campaign": STOPPED, **several}


def images_of(job: Mapping[str, object]) -> set[str]:
    """The names of a job's images."""
    if "n_iter" not in job:
        return {f"default/{job['id']}.png"}
    return {f"default/{job['id']}-{index}.png" for index in range(IMAGES)}


def seed_of(image: str) -> int:
    """The seed of an image by its name: each of a job adds one."""
    number, _, index = image.partition("/j")[2].removesuffix(".png").partition("-")
    return int(number) + int(index or 0)
