"""The judge stage: scores generated images in batches, and stores what their job's rule keeps.

A job's images wait here until all of them are drawn: what is kept follows from all their scores
(`imagefleet.keeping.rule`). Until then none is stored: a worker that dies leaves nothing, and the
next one comes to the same choice. What an earlier delivery has stored stays the job's choice.

An image's estimate comes before the image itself. If it drops the image, the engine draws that no
further; if this comes too late, nobody looks at what is drawn.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from imagefleet.caption import caption_of
from imagefleet.errors import TransientError
from imagefleet.keeping.rule import EARLY, Keep
from imagefleet.records.record import DroppedImage
from worker.engine.contract import Pixels
from worker.gpu_thread import EngineThread
from worker.jobs.in_flight import Generated, InFlightImage, InFlightJob
from worker.judges.networks import Drawn, Judges
from worker.judges.pixels import perceptual_hash
from worker.node.watchdog import NodeWatchdog
from worker.settle import Settler
from worker.stages.encode import EncodeStage, refuse_one_colour

#: Images in one call of a network.
BATCH = 32

#: The longest time that an image waits for others to be judged with it.
GATHER_SECONDS = 1.0

#: An image or, if the last is true, its estimate.
_Shown = tuple[InFlightImage, Pixels, bool]

_Scored = dict[str, float] | Exception


@dataclass(eq=False)
class JudgeStage:
    """Scores images, and feeds the encode stage with those that are kept."""

    settler: Settler
    watchdog: NodeWatchdog
    engine_thread: EngineThread
    judges: Judges
    encode: EncodeStage

    def __post_init__(self) -> None:
        self.queue: asyncio.Queue[_Shown] = asyncio.Queue(BATCH)
        self.judges.on_engine = self.engine_thread.call
        self.settler.on_judged = self._choose

    async def run(self) -> NoReturn:
        while True:
            batch = [await self.queue.get()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATHER_SECONDS):
                    # Each call of a network holds up the engine's next tick. But what an estimate
                    # drops is drawn on until then, so none waits for others.
                    while len(batch) < BATCH and (
                        not self.queue.empty()
                        or (
                            self.engine_thread.in_engine
                            and not any(is_estimate for *_, is_estimate in batch)
                        )
                    ):
                        batch.append(await self.queue.get())
            batch.sort(key=_order)
            for (_, names), group in itertools.groupby(batch, key=_order):
                await self._judge(names, [*group])

    async def _judge(self, names: Sequence[str], group: Sequence[_Shown]) -> None:
        found: Sequence[_Scored]
        try:
            shown = await asyncio.to_thread(
                lambda: [_shown(image, pixels) for image, pixels, _ in group]
            )
            found = await self.judges.scores(names, shown)
        except Exception as error:  # noqa: BLE001 - raised by `_hold`, for its job
            found = [error] * len(group)
        for (image, pixels, is_estimate), scores in zip(group, found, strict=True):
            if not image.is_dropped:
                note = self._look_at if is_estimate else self._hold
                work = partial(note, image, pixels, scores)
                counted = None if is_estimate else image  # which still is at the engine
                await self.settler.attempt(image.owner, work, counted)

    async def _look_at(
        self, image: InFlightImage, estimate: Pixels, scores: _Scored
    ) -> None:
        """Drops an image whose estimate is below a minimum; raises the error of its scores."""
        if isinstance(scores, Exception):
            raise scores
        early = {
            f"{EARLY}{name}": score
            for name, score in scores.items()
            if math.isfinite(score)
        }
        image.facts["scores"] = early
        # As many as an earlier delivery has kept are needed, whatever their scores here.
        if image.owner.again or _rule(image).may_keep([early]):
            return
        image.is_dropped = True
        if image.request and image.request.stop:
            image.request.stop.set()
        image.owner.judged.append((image, estimate))
        await self.settler.less_to_store(image.owner, 1)

    async def _hold(
        self, image: InFlightImage, pixels: Pixels, scores: _Scored
    ) -> None:
        """Keeps an image until its job's others are judged; raises the error of its scores."""
        try:
            refuse_one_colour(pixels)
        except TransientError as error:
            if not image.owner.failures:
                self.watchdog.image_failed(error)
            raise
        if isinstance(scores, Exception):
            raise scores
        if not all(map(math.isfinite, scores.values())):
            raise TransientError(f"a score is not finite: {scores}")
        self.watchdog.images_failed_in_a_row = 0
        image.facts.setdefault("scores", {}).update(scores)
        image.owner.judged.append((image, pixels))
        await self.settler.less_to_store(image.owner, 1)

    async def _choose(self, entry: InFlightJob) -> None:
        """Stores what is kept of a job whose images are judged; drops a job that keeps none."""
        judged = sorted(entry.judged, key=lambda each: each[0].index)
        image, _ = judged[0]
        if len(judged) < image.job.images_to_draw:  # the worker drains
            await self.settler.hand_back(entry)
            return
        entry.judged = []
        rule = _rule(image)
        scores = [each.facts["scores"] for each, _ in judged]
        # Those whose facts nobody may read do not tell how many their delivery has kept.
        before = [record.images for record in entry.again if record.sha256]
        kept: list[Generated] = []
        dropped: list[DroppedImage] = []
        for at, reason in enumerate(rule.choose(scores, *before[:1])):
            if reason is None:
                kept.append(judged[at])
            else:
                dropped.append(DroppedImage(at, reason, scores[at]))
                self.settler.cost.lost("dropped")
                self.settler.metrics.dropped_images.inc()
        if kept:
            await self._store(entry, kept, tuple(dropped))
            return
        best = min(dropped, key=lambda each: rule.rank(each.scores))
        await self.settler.dropped(
            entry, scores=best.scores, reason=best.reason, dropped=dropped
        )

    async def _store(
        self,
        entry: InFlightJob,
        kept: Sequence[Generated],
        dropped: tuple[DroppedImage, ...],
    ) -> None:
        entry.kept = len(kept)
        missing = {*range(entry.kept)} - entry.stored
        entry.again = [
            each if each.index else each.model_copy(update={"dropped": dropped})
            for each in entry.again
        ]
        entry.has_ended = False
        entry.images_to_store = len(missing)
        entry.is_first_awaited = entry.kept > 1 and 0 in missing
        for place, (image, pixels) in enumerate(kept):
            if place not in missing:
                self.settler.cost.lost("duplicate")
                continue
            image.index = place
            if not place:
                image.facts["dropped"] = dropped
            if _rule(image).distinct is not None:
                shown = _shown(image, pixels).pixels
                image.facts["phash"] = await asyncio.to_thread(perceptual_hash, shown)
            await self.encode.queue.put((image, pixels))
        if not missing:
            await self.settler.images_ended(entry)


def _rule(image: InFlightImage) -> Keep:
    if image.job.keep is None:
        raise ValueError("the job is not judged")
    return image.job.keep


def _order(shown: _Shown) -> tuple[bool, list[str]]:
    """Estimates first, as each has to be known before its image, and then by the scores' names."""
    image, _, is_estimate = shown
    rule = _rule(image)
    if is_estimate:
        return False, [name.removeprefix(EARLY) for name in rule.early]
    return True, rule.scores


def _shown(image: InFlightImage, pixels: Pixels) -> Drawn:
    """The picture as it would be stored, and the words that it is to show."""
    overlay = image.owner.overlay
    if overlay is not None:
        pixels = overlay.put_over(pixels)
    return Drawn(pixels, caption_of(image.job))
