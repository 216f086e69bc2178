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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from evaluation.score.figures import Point, plot
from imagefleet import sweep
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


@dataclass(slots=True)
class Sample:
    """The scores of so many images of a campaign, and what drawing one has cost."""

    campaign: str
    #: Dollars of the GPU's; None: no price is known.
    dollars_per_image: float | None
    #: Scores of the images of each job that is in the sample, as a whole.
    jobs: list[list[Scores]] = field(default_factory=list)

    def _kept(self, share: float) -> JSONDict:
        """A share of the drawn images, and the dollars for a thousand of these."""
        dollars = self.dollars_per_image
        cost = None if dollars is None or not share else 1000 * dollars / share
        return {"kept": share, "dollars_per_thousand": cost}

    def figures(self, rule: Keep | None) -> JSONDict:
        """How each score is spread, and what some minima and the *rule* keep and cost."""
        found: JSONDict = {
            "campaign": self.campaign,
            "images": sum(map(len, self.jobs)),
            "dollars_per_image": self.dollars_per_image,
            "scores": [],
        }
        by_name: defaultdict[str, list[float]] = defaultdict(list)
        for scores in itertools.chain.from_iterable(self.jobs):
            for name, value in scores.items():
                by_name[name].append(value)
        for name, values in by_name.items():
            spread = np.array(values)
            minima = np.quantile(
                spread, [1 - share for share in SHARES], method="higher"
            )
            ends = {"least": spread.min(), "mean": spread.mean(), "most": spread.max()}
            found["scores"].append(
                {
                    "name": name,
                    "images": len(values),
                    **{end: float(value) for end, value in ends.items()},
                    "minima": [
                        {
                            "minimum": least,
                            **self._kept(float((spread >= least).mean())),
                        }
                        for least in minima.tolist()
                    ],
                }
            )
        if rule is not None:  # near-duplicates included
            reasons = [reason for job in self.jobs for reason in rule.choose(job)]
            found["rule"] = self._kept(reasons.count(None) / len(reasons))
        return found


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
) -> Sample:
    """Samples about *count* drawn images, whole jobs; raises SetupError if none has a score."""
    records = [record async for record in reader.images(storage, campaign)]
    ended = reader.ended(storage, campaign)
    records += [record async for record in ended if record.outcome == "dropped"]
    by_job: defaultdict[int, list[Record]] = defaultdict(list)
    for record in records:
        by_job[record.job].append(record)
    sample = Sample(campaign, _dollars_per_image(records))
    judges = Judges(Source(storage.files, cache, 2**34), "auto")
    left = count
    for job in sorted(by_job, key=lambda job: hashed(str(job))):
        if left <= 0:
            break
        scores: list[Scores] = []
        for record in by_job[job]:
            scores += [image.scores for image in record.dropped]
            if own := await _scores(storage, record, rule, judges):
                scores.append(own)
        sample.jobs.append(scores)
        left -= sum(map(_drawn, by_job[job]))
    if not any(sample.jobs):
        raise SetupError(
            f"no image of {campaign} has a recorded score: load some jobs with --keep clip=0, say,"
            " or give --keep for scores of the images that are stored"
        )
    return sample


async def _scores(
    storage: Storage, record: Record, rule: Keep | None, judges: Judges
) -> Scores:
    """The recorded scores of a stored image, or those of now if the rule needs others."""
    if not record.blob or rule is None or record.scores.keys() >= {*rule.scores}:
        return record.scores if record.blob else {}
    read = await RETRIES.call(partial(pictures.find, storage, [record]))
    if isinstance(read, str):
        return record.scores
    image = await asyncio.to_thread(picture.decode, read.data)
    if image is None:
        return record.scores
    drawn = Drawn(np.asarray(image.convert("RGB")), sweep.caption_of(record))
    (own,) = await judges.scores(rule.scores, [drawn])
    finite = {name: score for name, score in own.items() if math.isfinite(score)}
    return {**record.scores, **finite}


def _drawn(record: Record) -> int:
    return len(record.dropped) + (record.blob is not None)


def _dollars_per_image(records: Sequence[Record]) -> float | None:
    """What the GPUs cost from their workers' first pull to their last image, an image drawn."""
    by_worker: defaultdict[object, list[Record]] = defaultdict(list)
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
    return dollars / max(1, sum(map(_drawn, records)))
