"""`imagefleet score --sample`: how the scores of drawn images are spread, and what minima cost.

The images are a campaign's stored and dropped ones, chosen by their names: a campaign of some
hundred images, or the first ones of a large one. Scores are those that workers recorded; of stored
images without, as of a campaign that was not judged, the networks in the storage give them here.
"""

import asyncio
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np

from evaluation.score.figures import Point, plot
from imagefleet import sweep
from imagefleet.errors import SetupError
from imagefleet.files import picture
from imagefleet.keeping.rule import Keep
from imagefleet.records import pictures, reader
from imagefleet.records.catalog import Damaged
from imagefleet.records.record import Record, hashed
from imagefleet.storage.open import Storage
from imagefleet.submit import RETRIES
from imagefleet.validation import JSONDict
from worker.files.library import Source
from worker.judges.networks import Drawn, Judges

#: Shares of the drawn images that the table has a minimum for.
SHARES = (0.9, 0.75, 0.5, 0.25, 0.1, 0.05)

#: Images that are scored at once.
_BATCH = 32


@dataclass(frozen=True, slots=True)
class Minimum:
    """What a minimum of one score keeps of the sample, and what a kept image costs to draw."""

    minimum: float
    #: Share of the drawn images.
    kept: float
    #: Dollars of the GPU's for a thousand kept images; None: no price is known.
    dollars_per_thousand: float | None


@dataclass(frozen=True, slots=True)
class Spread:
    """One score of the sample."""

    name: str
    images: int
    least: float
    mean: float
    most: float
    minima: Sequence[Minimum]


@dataclass(slots=True)
class Sample:
    """The scores of so many images of a campaign, and what drawing one has cost."""

    campaign: str
    scores: list[Mapping[str, float]] = field(default_factory=list)
    #: Scores of the images of each job that is in the sample as a whole.
    jobs: list[list[Mapping[str, float]]] = field(default_factory=list)
    dollars_per_image: float | None = None

    def spreads(self) -> list[Spread]:
        names = dict.fromkeys(name for scores in self.scores for name in scores)
        return [self._spread(name) for name in names]

    def _spread(self, name: str) -> Spread:
        values = np.array([each[name] for each in self.scores if name in each])
        minima = []
        for share in SHARES:
            least = float(np.quantile(values, 1 - share, method="higher"))
            kept = float((values >= least).mean())
            minima.append(Minimum(least, kept, self.cost(kept)))
        ends = float(values.min()), float(values.mean()), float(values.max())
        return Spread(name, len(values), *ends, minima)

    def cost(self, kept: float) -> float | None:
        """Dollars for a thousand kept images, of which a share is *kept*."""
        if self.dollars_per_image is None or not kept:
            return None
        return 1000 * self.dollars_per_image / kept

    def kept(self, rule: Keep) -> float:
        """Share of the images that a rule keeps, near-duplicates included."""
        reasons = [reason for job in self.jobs for reason in rule.choose(job)]
        return reasons.count(None) / len(reasons) if reasons else 0.0

    def svg(self) -> str:
        """The share of the images that each minimum keeps, a line for each score."""
        lines = {}
        for spread in self.spreads():
            values = sorted(
                each[spread.name] for each in self.scores if spread.name in each
            )
            steps = sorted({*np.linspace(0, len(values) - 1, 41).astype(int)})
            lines[spread.name] = [
                Point(
                    values[at],
                    share := 1 - at / len(values),
                    (values[at], values[at]),
                    (share, share),
                    "",
                    f"{values[at]:g} keeps {share:.1%}",
                )
                for at in steps
            ]
        title = f"What minimum scores keep of {self.campaign}"
        return plot(lines, title, "minimum", "share kept")

    def figures(self, rule: Keep | None) -> JSONDict:
        found: JSONDict = {
            "campaign": self.campaign,
            "images": len(self.scores),
            "dollars_per_image": self.dollars_per_image,
            "scores": [asdict(spread) for spread in self.spreads()],
        }
        if rule is not None:
            kept = self.kept(rule)
            found["rule"] = {"kept": kept, "dollars_per_thousand": self.cost(kept)}
        return found


async def take(
    storage: Storage, campaign: str, count: int, rule: Keep | None, cache: Path
) -> Sample:
    """Samples about *count* drawn images, whole jobs; raises SetupError if none has a score."""
    records = await _records(storage, campaign)
    sample = Sample(campaign, dollars_per_image=_dollars_per_image(records))
    by_job: dict[int, list[Record]] = {}
    for record in records:
        by_job.setdefault(record.job, []).append(record)
    chosen: list[list[Record]] = []
    images = 0
    for key in heapq.nsmallest(count, by_job, key=lambda key: hashed(str(key))):
        if images >= count:
            break
        chosen.append(by_job[key])
        images += sum(map(_drawn, by_job[key]))
    if rule is not None:
        judges = Judges(Source(storage.files, cache, 2**34), "auto")
        unknown = [
            record
            for job in chosen
            for record in job
            if record.blob and not record.scores.keys() >= {*rule.scores}
        ]
        known = await _scored(storage, unknown, rule, judges)
        chosen = [[known.get(record.blob, record) for record in job] for job in chosen]
    for job in chosen:
        scores = [each for record in job for each in _scores(record)]
        sample.jobs.append(scores)
        sample.scores += scores
    if not sample.scores:
        raise SetupError(
            f"no image of {campaign} has a recorded score: load some jobs with --keep clip=0, say,"
            " or give --keep for scores of the images that are stored"
        )
    return sample


async def _records(storage: Storage, campaign: str) -> list[Record]:
    found = [record async for record in reader.images(storage, campaign, Damaged())]
    ended = reader.ended(storage, campaign)
    return found + [each async for each in ended if each.outcome == "dropped"]


def _scores(record: Record) -> Iterator[Mapping[str, float]]:
    """Scores of the image of a record, and of the job's images that it says were dropped."""
    if record.blob and record.scores:
        yield record.scores
    for image in record.dropped:
        yield image.scores


def _drawn(record: Record) -> int:
    return len(record.dropped) + (record.blob is not None)


async def _scored(
    storage: Storage, records: Sequence[Record], rule: Keep, judges: Judges
) -> dict[str | None, Record]:
    """The records of stored images with scores, by the images' names."""
    found: dict[str | None, Record] = {}
    for first in range(0, len(records), _BATCH):
        drawn: list[Drawn] = []
        of_drawn: list[Record] = []
        for record in records[first : first + _BATCH]:
            read = await RETRIES.call(partial(pictures.find, storage, [record]))
            if isinstance(read, str):
                continue
            image = await asyncio.to_thread(picture.decode, read.data)
            if image is not None:
                pixels = np.asarray(image.convert("RGB"))
                drawn.append(Drawn(pixels, sweep.caption_of(record)))
                of_drawn.append(record)
        scores = await judges.scores(rule.scores, drawn) if drawn else []
        for record, known in zip(of_drawn, scores, strict=True):
            finite = {name: each for name, each in known.items() if math.isfinite(each)}
            whole = {**record.scores, **finite}
            found[record.blob] = record.model_copy(update={"scores": whole})
    return found


def _dollars_per_image(records: Sequence[Record]) -> float | None:
    """What the GPUs cost from their workers' first pull to their last image, an image drawn."""
    spans: dict[tuple[str, datetime | None], list[float]] = {}
    prices: dict[tuple[str, datetime | None], float | None] = {}
    for record in records:
        worker = record.worker, record.started_at
        at = record.at.timestamp()
        spans.setdefault(worker, []).extend((at - (record.seconds or 0), at))
        prices[worker] = record.price_per_hour
    dollars = 0.0
    for worker, times in spans.items():
        price = prices[worker]
        if price is None:
            return None
        dollars += (max(times) - min(times)) / 3600 * price
    drawn = sum(map(_drawn, records))
    return dollars / drawn if drawn else None
