"""A node's checks of what it draws: canary images, and its weights.

Community nodes are strangers' computers, whose cards are overclocked, hot and without ECC. A
canary goes the same way as jobs do, up to the pixels that would be encoded, and is compared with
the reference that came with the checkpoint, or without one with this node's own first canary. A
check that fails is repeated at once: a node is given up if it fails twice in a row, or twice within
ten checks. Either way its images since the last good check are recorded as suspect.

NaN and images of one colour are refused before (`worker.engine.decoder`, `worker.stages.encode`).
"""

import asyncio
import random
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from imagefleet import concurrency, errors, likeness
from imagefleet.likeness import Fingerprint
from imagefleet.telemetry import logs
from worker.engine import contract
from worker.gpu_thread import Delivery, EngineThread
from worker.metrics import NodeFault
from worker.node import check
from worker.node import reference as references
from worker.node.reference import CanaryImage, Reference
from worker.node.watchdog import Suspects
from worker.stages import encode

log = logs.EventLog(__name__)

#: Images between two canaries, at random: a node that goes wrong stores 200 images at most, with
#: the 96 that may be in its engine and before its encoders. A canary of 4 steps costs up to 0.42 of
#: an image of 15 (demo checkpoint, compiled, H100): 0.46 % of the work.
LEAST_IMAGES, MOST_IMAGES = 80, 104

#: Seconds between two checks of the weights, each 30 ms for SD1.5 on an H100.
WEIGHTS_SECONDS = 300.0

#: Failed checks that are too many, of so many recent ones; each was repeated, with success.
MOST_FAILED, OF_RECENT = 2, 10

#: The distance below which two images are one: the LoRA, or the seed, had no effect. The same image
#: in another slot is 0.02 away.
_NO_EFFECT_BELOW = 2.0

#: Those drawn among the jobs: each has the LoRA.
_AMONG_JOBS: tuple[CanaryImage, ...] = ("with_lora", "other_seed")

#: Sizes of jobs, besides the checkpoint's own, that canaries are drawn in: a canary of another
#: size than the jobs' would leave the engine's slots idle.
_MOST_SIZES = 8


class DrainsError(Exception):
    """The worker drains, and draws no canaries any more."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: NodeFault
    message: str


@dataclass(eq=False)
class NodeSelfCheck:
    """Checks one engine; without `contract.SelfCheck`, as for a stand-in, nothing."""

    engine: contract.Engine
    engine_thread: EngineThread
    tickets: Iterator[int]
    """Those of canaries belong to no job."""
    suspects: Suspects
    fault: Fault | None = None

    def __post_init__(self) -> None:
        self.trusted = asyncio.Event()
        """Whether images are trusted: not between a failed check and its repetition."""
        self.trusted.set()
        self._tolerances: dict[tuple[int, int], float] = {}
        self._expected: dict[tuple[tuple[int, int], CanaryImage], Fingerprint] = {}
        """By size: the reference's, or the first of this node's own."""
        self._lora: Path | None = None
        self._job_size: tuple[int, int] | None = None
        self._images_left = 0
        self._due = asyncio.Event()
        self._recent: deque[bool] = deque(maxlen=OF_RECENT)
        self._one_at_a_time = asyncio.Lock()

    @property
    def is_possible(self) -> bool:
        return self.engine.self_check is not None

    async def start_up(self, reference: Reference | None) -> None:
        """Checks the weights, and what a seed and a LoRA change; raises NodeError."""
        self_check = self.engine.self_check
        if self_check is None:
            return
        try:
            folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="imagefleet-")
        except OSError as error:
            raise errors.NodeError(
                f"no temporary file can be written here: {error}"
            ) from error
        lora = self._lora = Path(folder, "canary.safetensors")
        await self.engine_thread.call(lambda: self_check.write_lora(lora))
        why = (
            "there are none"
            if reference is None
            else reference.why_unusable(self.engine)
        )
        if why is not None:
            text = f"no reference images ({why}): `imagefleet files make canary` makes them"
            log.warning(text, action="reference_missing")
            reference = None
        if reference is not None:
            self._tolerances[reference.size] = reference.tolerance
            for kind, image in reference.fingerprints.items():
                self._expected[reference.size, kind] = image
        self._begin_anew()
        await self._check_or_give_up(references.CANARY_IMAGES)

    async def watch_images(self) -> NoReturn:
        """Side task: draws canaries at random times; raises NodeError."""
        while True:
            await self._due.wait()
            self._begin_anew()
            kind = random.choice(_AMONG_JOBS)  # noqa: S311 - no secret
            await self._check_or_give_up((kind,))

    async def watch_weights(self) -> NoReturn:
        """Side task: compares the weights on the device with the file's; raises NodeError."""
        while True:
            await asyncio.sleep(concurrency.jitter(WEIGHTS_SECONDS))
            async with self._one_at_a_time:
                # Read a second time: the sum itself may have been computed wrongly.
                if await self._weights_fault() and (
                    fault := await self._weights_fault()
                ):
                    raise self._give_up(fault)

    async def diagnose(self, alarm: str) -> str | None:
        """What is wrong with this node; None if its jobs are at fault, or the worker drains.

        A LoRA that gives NaN, or a size too large for a GPU class's memory, fails every image of a
        campaign on any node, and each node that is given up for it is kept from the group for 48
        hours. So before failed images count against a node, a plain image is drawn.
        """
        try:
            async with self._one_at_a_time:
                await self._draw([check.plain_request(self.engine, seed=0)])
        except DrainsError:
            return None
        except errors.FleetError as error:
            reason = f"{alarm}; and a plain image failed as well: {error}"
            self._give_up(Fault("failed_images", reason))
            return reason
        text = f"{alarm}; but a plain image succeeded: the jobs are at fault, not this node"
        log.warning(text, action="node_proved")
        if self.is_possible:
            await self._check_or_give_up(references.CANARY_IMAGES)
        return None

    def generated(self, size: tuple[int, int]) -> None:
        """A job's image is finished."""
        self._job_size = size
        self._images_left -= 1
        if self._images_left <= 0:
            self._due.set()

    def quarantined(self, reason: str) -> None:
        self._give_up(Fault("quarantined", reason))

    def close(self) -> None:
        if self._lora is not None:
            shutil.rmtree(self._lora.parent, ignore_errors=True)

    def _begin_anew(self) -> None:
        self._images_left = random.randint(LEAST_IMAGES, MOST_IMAGES)  # noqa: S311 - no secret
        self._due.clear()

    async def _check_or_give_up(self, kinds: tuple[CanaryImage, ...]) -> bool:
        """Draws the *kinds*, once more if they are wrong; returns whether the first were right.

        What was stored before a check that failed once only is suspect all the same. Raises
        NodeError if the node is broken.
        """
        async with self._one_at_a_time:
            since = self.suspects.since("images")
            try:
                fault = await self._find_fault(kinds, with_weights=len(kinds) > 1)
            except DrainsError:
                return True
            self._recent.append(fault is None)
            if fault is None:
                return True
            self.trusted.clear()
            self.engine_thread.hold_jobs(hold=True)
            log.warning(
                f"{fault.message}: checking this node again", action="canary_failed"
            )
            try:
                again = await self._find_fault(kinds, with_weights=True)
            except DrainsError:
                again = fault
            if again is not None:
                raise self._give_up(again)
            if self._recent.count(False) >= MOST_FAILED:
                message = f"{fault.message}, the second time within {OF_RECENT} checks"
                raise self._give_up(Fault(fault.kind, message))
            self.engine_thread.hold_jobs(hold=False)
            self.trusted.set()
            await self.suspects.record(since, fault.message)
            return False

    def _give_up(self, fault: Fault) -> errors.NodeError:
        self.fault = fault
        self.suspects.metrics.node_faults.labels(fault.kind).inc()
        return errors.NodeError(f"this node draws wrong images: {fault.message}")

    async def _find_fault(
        self, kinds: tuple[CanaryImage, ...], *, with_weights: bool
    ) -> Fault | None:
        fault = await self._weights_fault() if with_weights else None
        if fault is None:
            began_at = time.monotonic()
            try:
                message = await self._image_fault(kinds)
            except errors.FleetError as error:
                message = f"a canary failed: {error}"
            if message is None:
                self.suspects.good("images", began_at)
            else:
                fault = Fault("wrong_images", message)
        self.suspects.metrics.canaries.labels("failed" if fault else "passed").inc()
        return fault

    async def _weights_fault(self) -> Fault | None:
        if (self_check := self.engine.self_check) is None:
            return None
        began_at = time.monotonic()
        message = await self.engine_thread.call(self_check.find_fault)
        if message is None:
            self.suspects.good("weights", began_at)
            return None
        return Fault("weights", message)

    async def _image_fault(self, kinds: tuple[CanaryImage, ...]) -> str | None:
        """What is wrong with canaries drawn now; raises as `_draw`."""
        own, jobs = self.engine.default_size, self._size_of_jobs()
        sizes = [jobs]
        if jobs != own and any((jobs, kind) not in self._expected for kind in kinds):
            sizes = [
                own,
                jobs,
            ]  # the first of its size is worth something on a good node only
        for size in sizes:
            requests = [
                references.request(
                    each, size, self._lora, is_unguided=self.engine.is_unguided
                )
                for each in kinds
            ]
            drawn = await self._draw(requests)
            found = dict(zip(kinds, map(likeness.fingerprint, drawn), strict=True))
            if message := self._alike(found) or self._differs(found, size):
                return message
        return None

    async def _draw(
        self, requests: Sequence[contract.ImageRequest]
    ) -> list[contract.Pixels]:
        """The images; raises FleetError if one failed, DrainsError if the worker drains."""
        drawn = []
        for delivery in await asyncio.gather(*map(self._deliver, requests)):
            outcome = delivery.finished.outcome
            if isinstance(outcome, errors.FleetError):
                raise outcome
            encode.refuse_one_colour(outcome)
            drawn.append(outcome)
        return drawn

    async def _deliver(self, request: contract.ImageRequest) -> Delivery:
        prepared = await asyncio.to_thread(self.engine.prepare, request)
        delivery = await self.engine_thread.draw(next(self.tickets), prepared)
        if delivery is None:
            raise DrainsError
        return delivery

    def _size_of_jobs(self) -> tuple[int, int]:
        """The last job's, so that a canary shares its batch; before, the checkpoint's own."""
        size = self._job_size or self.engine.default_size
        sizes = {each for each, _ in self._expected}
        return (
            size
            if size in sizes or len(sizes) < _MOST_SIZES
            else self.engine.default_size
        )

    def _differs(
        self, found: dict[CanaryImage, Fingerprint], size: tuple[int, int]
    ) -> str | None:
        """Compares images with the expected ones; without one, the first of a kind becomes it."""
        most = self._tolerances.get(size, likeness.SAME_BELOW)
        for kind, image in found.items():
            distance = likeness.distance(image, self._expected.get((size, kind), image))
            if distance >= most:
                return f"a canary ({kind}) is {distance:.1f} from its reference, {most:g} at most"
        for kind, image in found.items():
            self._expected.setdefault((size, kind), image)
        return None

    def _alike(self, found: dict[CanaryImage, Fingerprint]) -> str | None:
        plain = found.get("with_lora")
        others = {
            "the seed": found.get("other_seed"),
            "the LoRA": found.get("without_lora"),
        }
        for what, other in others.items():
            if plain is None or other is None:
                continue
            if likeness.distance(plain, other) < _NO_EFFECT_BELOW:
                return f"{what} has no effect on a canary"
        return None
