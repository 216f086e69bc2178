"""`imagefleet score --sample`: how the scores of drawn images are spread, and what minima cost.

The images are a campaign's stored and dropped ones, chosen by their names: a campaign of some
hundred images, or the first ones of a large one. Scores are those that workers recorded; of stored
images without, as of a campaign that was not judged, the networks in the storage give them here.
"""

import asyncio
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from evaluation.score.figures import Point, plot
from imagefleet.caption import caption_of
from imagefleet.errors import SetupError
from imagefleet.files import picture
from imagefleet.keeping.rule import Keep, Scores
from imagefleet.records import pictures, reader
from imagefleet.records.record import Record, hashed
from imagefleet.storage.open import Storage
from imagefleet.submit import RETRIES
from imagefleet.validation import JSONDict
from worker.files.library import Source
from worker.judges.networks import Drawn, Judges

#: Shares of the drawn images that the table and the picture have a minimum for.
SHARES = (0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.03)


#: Scores of the images of jobs, job by job.
_Jobs = Sequence[Sequence[Scores]]


def _figures(
    jobs: _Jobs, rule: Keep | None, dollars_per_image: float | None
) -> JSONDict:
    """How each score is spread, and what some minima and the *rule* keep and cost."""

    def kept(share: float) -> JSONDict:
        cost = dollars_per_image and 1000 * dollars_per_image / share if share else None
        return {"kept": share, "dollars_per_thousand": cost}

    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for scores in itertools.chain.from_iterable(jobs):
        for name, value in scores.items():
            by_name[name].append(value)
    spreads = []
    for name, values in by_name.items():
        spread = np.array(values)
        minima = np.quantile(spread, [1 - share for share in SHARES], method="higher")
        found: JSONDict = {
            "name": name,
            "images": len(values),
            "least": float(spread.min()),
            "mean": float(spread.mean()),
            "most": float(spread.max()),
        }
        found["minima"] = [
            {"minimum": least, **kept(float((spread >= least).mean()))}
            for least in minima.tolist()
        ]
        spreads.append(found)
    figures: JSONDict = {"dollars_per_image": dollars_per_image, "scores": spreads}
    if rule is not None:  # near-duplicates included
        reasons = [reason for job in jobs for reason in rule.choose(job)]
        figures["rule"] = kept(reasons.count(None) / len(reasons))
        if rule.early:
            figures["wrongly_dropped"] = rule.wrongly_dropped(jobs)
    return figures


def svg(figures: JSONDict) -> str:
    """The share of the images that each minimum keeps, a line for each score."""
    lines = {}
    for spread in figures["scores"]:
        lines[spread["name"]] = [
            Point(
                *(least, share, (least, least), (share, share), ""),
                f"{least:g} keeps {share:.1%}",
            )
            for least, share in (
                (each["minimum"], each["kept"]) for each in spread["minima"]
            )
        ]
    title = f"What minimum scores keep of {figures['campaign']}"
    return plot(lines, title, "minimum", "share kept")


async def take(
    storage: Storage, campaign: str, count: int, rule: Keep | None, cache: Path
) -> JSONDict:
    """Samples about *count* drawn images, whole jobs; raises SetupError if none has a score."""
    records = [record async for record in reader.images(storage, campaign)]
    ended = reader.ended(storage, campaign)
    records += [record async for record in ended if record.outcome == "dropped"]
    by_job: defaultdict[int, list[Record]] = defaultdict(list)
    for record in records:
        by_job[record.job].append(record)
    judges = Judges(Source(storage.files, cache, 2**34), "auto")
    jobs: list[list[Scores]] = []
    for job in sorted(by_job, key=lambda job: hashed(str(job))):
        if sum(map(len, jobs)) >= count:
            break
        dropped = [image.scores for record in by_job[job] for image in record.dropped]
        own = [
            await _scores(storage, each, rule, judges)
            for each in filter(_is_image, by_job[job])
        ]
        jobs.append([*dropped, *filter(None, own)])
    if not any(jobs):
        raise SetupError(
            f"no image of {campaign} has a recorded score: load some jobs with --keep clip=0, say,"
            " or give --keep for scores of the images that are stored"
        )
    figures = _figures(jobs, rule, _dollars_per_image(records))
    return {"campaign": campaign, "images": sum(map(len, jobs)), **figures}


async def _scores(
    storage: Storage, record: Record, rule: Keep | None, judges: Judges
) -> Scores:
    """The recorded scores of an image, or those of now if the rule needs others."""
    if not record.blob or rule is None or record.scores.keys() >= {*rule.scores}:
        return record.scores
    read = await RETRIES.call(partial(pictures.find, storage, [record]))
    if isinstance(read, str):
        return record.scores
    image = await asyncio.to_thread(picture.decode, read.data)
    if image is None:
        return record.scores
    drawn = Drawn(np.asarray(image.convert("RGB")), caption_of(record))
    (own,) = await judges.scores(rule.scores, [drawn])
    finite = {name: score for name, score in own.items() if math.isfinite(score)}
    return {**record.scores, **finite}


def _is_image(record: Record) -> bool:
    """True of an image, also of one that is the end of its job as a near-duplicate."""
    return bool(record.blob or record.phash)


def _dollars_per_image(records: Sequence[Record]) -> float | None:
    """What the GPUs cost from their workers' first pull to their last image, an image drawn."""
    by_worker = defaultdict(list)
    for record in records:
        by_worker[record.worker, record.started_at].append(record)
    dollars = 0.0
    for own in by_worker.values():
        price = own[-1].price_per_hour
        if price is None:
            return None
        ended = [record.at.timestamp() for record in own]
        began = [record.at.timestamp() - (record.seconds or 0) for record in own]
        dollars += (max(ended) - min(began)) / 3600 * price
    drawn = sum(len(record.dropped) + _is_image(record) for record in records)
    return dollars / max(1, drawn)
