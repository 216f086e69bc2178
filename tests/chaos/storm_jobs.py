"""The jobs of a storm: single images, some of several, some bad, and a campaign to be cancelled.

Or jobs of three stages, of which the second and the third are for one of two models each.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, cast

from imagefleet.job.message import Job, read_job
from storm_worker import BAD_STEPS

StormJob = dict[str, object]


class Drawing(NamedTuple):
    """An image as a stage of a job draws it."""

    stage: Job
    index: int


#: One job in so many is bad: it fails for good, however often it is replayed.
BAD_EVERY = 50

#: One in so many of the others has several images, which kills and stops interrupt.
SEVERAL_EVERY = 8
IMAGES = 6

#: A campaign of one job in so many, besides the others; it is cancelled while it is drawn.
STOPPED = "stopped"
STOPPED_EVERY = 10


def all_jobs(count: int) -> Iterator[StormJob]:
    for number in range(count):
        bad = number % BAD_EVERY == BAD_EVERY - 1
        steps = {"steps": BAD_STEPS} if bad else {}
        several = {"n_iter": IMAGES} if not bad and number % SEVERAL_EVERY == 0 else {}
        yield {
            "id": f"j{number}",
            "prompt": "a house",
            "seed": number,
            **steps,
            **several,
        }


def stopped_jobs(count: int) -> Iterator[StormJob]:
    for number in range(0, count, STOPPED_EVERY):
        several = {"n_iter": IMAGES} if number % (2 * STOPPED_EVERY) == 0 else {}
        job = {"id": f"j{number}", "prompt": "a house", "seed": number}
        yield {**job, "campaign": STOPPED, **several}


#: The models of a storm's workers; the first stage of a job is for any of them.
MODELS = ("stand-in", "second")

#: By which the seed of a stage differs from that of the one before.
STAGE_SEEDS = 1_000_000


def chains(count: int, campaign: str | None = None) -> Iterator[StormJob]:
    """Jobs of three stages; a bad one fails in its second."""
    step = 1 if campaign is None else STOPPED_EVERY
    for number in range(0, count, step):
        bad = campaign is None and number % BAD_EVERY == BAD_EVERY - 1
        then = [
            {
                "model": MODELS[(number + stage) % 2],
                "seed": number + stage * STAGE_SEEDS,
            }
            for stage in (1, 2)
        ]
        if bad:
            then[0]["steps"] = BAD_STEPS
        job = {"id": f"j{number}", "prompt": "a house", "seed": number, "then": then}
        yield job if campaign is None else {**job, "campaign": campaign}


def is_bad(job: Mapping[str, object]) -> bool:
    return "steps" in job or BAD_STEPS in (each.get("steps") for each in _then(job))


def _then(job: Mapping[str, object]) -> list[dict[str, object]]:
    return cast("list[dict[str, object]]", job.get("then", []))


def images_of(job: Mapping[str, object]) -> set[str]:
    """The names of a job's images; of a bad one, those before its bad stage."""
    if then := _then(job):
        good = 1 if is_bad(job) else 1 + len(then)
        later = {f"default/{job['id']}~s{stage}.png" for stage in range(2, good + 1)}
        return {f"default/{job['id']}.png"} | later
    if is_bad(job):
        return set()
    count = IMAGES if "n_iter" in job else 1
    return {
        f"default/{job['id']}{f'~{index}' if index else ''}.png"
        for index in range(count)
    }


def drawings(jobs: Iterable[StormJob]) -> dict[str, dict[str, Drawing]]:
    """What may be stored by each name, by the digests of the stages."""
    found = defaultdict[str, dict[str, Drawing]](dict)
    for job in jobs:
        for stage in read_job(json.dumps(job), "none").stages_left():
            for index in range(stage.images):
                found[stage.blob_name(index)][stage.stage_digest] = Drawing(
                    stage, index
                )
    return found
