"""Measures a node while it works, window by window.

Only what lasts for three windows in a row counts, and only what is the node's own fault: its speed,
over the time that the GPU draws or waits for slow uploads. Images that fail are counted in a row
(and a plain one as well: `NodeChecks`). A GPU call that never ends is for `EngineThread.watch`.

A node that lost its platform, but not its network, works on unseen (SaladCloud starts another one
in its place): leases and blobs that are written once make that harmless.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NoReturn

from imagefleet.errors import FleetError, NodeError, TransientError
from imagefleet.job.passes.fields import Pass
from imagefleet.pricing import families, prices
from imagefleet.telemetry.logs import log
from worker.gpu_thread import EngineThread
from worker.metrics import WorkerMetrics
from worker.settings import WorkerSettings

#: A card's speed here as a share of its record in `pricing/gpus.toml`, which had the best software
#: and host. Means over SaladCloud's nodes were 0.53 of it (RTX 4090), 0.62 (3060 Ti), 0.74
#: (3080) and 0.87 (3070): 15 steps at batch 4 in SaladTechnologies/sd1.5-performance.
SHARE_OF_RECORD = 0.5

#: The share of the expected speed below which a node is broken: SaladCloud's own advice.
BROKEN_SHARE = 0.25

#: The expected speed of a class without a record: a quarter of the slowest one's is very little.
_SLOWEST = min(prices.ASSUMED_IMAGES_PER_SECOND.values())

#: SaladCloud allowed 300 s in its largest test; a slow disk and compiling take longer.
START_UP_SECONDS = 1200.0

#: SD1.5 in float16 with room for a small batch; a desktop may hold some of a 6 GB card.
FREE_GPU_BYTES = 3 * 2**30

#: Returns what is wrong with the node after an alarm; None: nothing, the jobs are at fault.
Diagnose = Callable[[str], Awaitable[str | None]]

#: Seconds of a measurement, as in SaladCloud's own samples.
WINDOW_SECONDS = 300.0

#: Failed windows in a row before the node is given up: a game that its owner starts, a hot hour or
#: a large download may pass.
FAILED_WINDOWS = 3

#: The share of a window that the GPU must have worked before its speed means anything.
LEAST_BUSY_SHARE = 0.2

#: Failed images in a row that raise an alarm: more than one broken job has, fewer than a slow card
#: generates in a minute.
FAILURES_IN_A_ROW = 10


@dataclass(frozen=True)
class NodeLimits:
    """0: not checked; images are of 512x512 and 15 steps."""

    images_per_second: float = 0.0
    start_up_seconds: float = 0.0
    free_gpu_bytes: int = 0


#: The limits of a machine that is not rented by the hour.
NO_LIMITS = NodeLimits()


def limits_of(settings: WorkerSettings, gpu: str, *, on_salad: bool) -> NodeLimits:
    """The settings' limits; without them the defaults on SaladCloud, and none elsewhere."""
    limits = NO_LIMITS
    if on_salad:
        limits = NodeLimits(broken_below(gpu), START_UP_SECONDS, FREE_GPU_BYTES)
    if settings.min_images_per_second is not None:
        limits = replace(limits, images_per_second=settings.min_images_per_second)
    if settings.start_up_seconds is not None:
        limits = replace(limits, start_up_seconds=settings.start_up_seconds)
    return limits


def broken_below(gpu: str) -> float:
    """Images/s below which a card of this class is broken; 0 for anything but an RTX card."""
    if not gpu.startswith("RTX "):
        return 0.0
    record = prices.ASSUMED_IMAGES_PER_SECOND.get(gpu, _SLOWEST)
    return BROKEN_SHARE * SHARE_OF_RECORD * record


@dataclass
class _Window:
    """Counts since *began_at* (monotonic seconds), and the engine's clock at that time."""

    began_at: float
    busy_seconds: float
    blocked_seconds: float
    enlarged_images: int = 0  # only by networks, whose speed the jobs do not tell
    passes: Counter[tuple[str, Pass]] = field(default_factory=Counter)  # by family
    storage_faults: int = 0


class NodeWatchdog:
    def __init__(
        self, engine_thread: EngineThread, limits: NodeLimits, metrics: WorkerMetrics
    ) -> None:
        self.failed_in_a_row = 0
        self._engine_thread = engine_thread
        self._limits = limits
        self._windows = metrics.node_windows
        self._faults = metrics.node_faults
        #: Images that failed on the GPU since one succeeded.
        self.images_failed_in_a_row = 0
        self._alarms: asyncio.Queue[str] = asyncio.Queue()
        self._window = self._new_window()

    def image_generated(self, family: str, passes: Iterable[Pass]) -> None:
        """The GPU finished an image, failed or not."""
        is_drawn = False
        for each in passes:
            is_drawn = is_drawn or each.is_drawn
            self._window.passes[family, each] += 1
        self._window.enlarged_images += not is_drawn

    def image_failed(self, error: FleetError) -> None:
        """An image failed on the GPU; a JobError is its job's fault and does not count."""
        if not isinstance(error, TransientError):
            return
        self.images_failed_in_a_row += 1
        # Once: what fails while the alarm is diagnosed is part of it.
        if self.images_failed_in_a_row == FAILURES_IN_A_ROW:
            self._alarms.put_nowait(
                f"the engine failed {FAILURES_IN_A_ROW} images in a row, the last with: {error}"
            )

    def upload_failed(self) -> None:
        """The storage did not take an image: waiting for it is not the node's fault."""
        self._window.storage_faults += 1

    async def watch_failures(self, diagnose: Diagnose) -> NoReturn:
        """Side task: raises NodeError once an alarm turns out to be the node's fault."""
        while True:
            reason = await diagnose(await self._alarms.get())
            if reason is not None:
                raise NodeError(reason)
            self.images_failed_in_a_row = 0

    async def watch_speed(self) -> NoReturn:
        """Side task: raises NodeError after so many failed windows in a row."""
        self._window = self._new_window()
        while True:
            await asyncio.sleep(WINDOW_SECONDS)
            reason = self._close_window()
            if reason is not None and self.failed_in_a_row >= FAILED_WINDOWS:
                raise NodeError(reason)

    def _close_window(self) -> str | None:
        """Judges the window that ends now; None: nothing is wrong, or too little was measured."""
        window = self._window
        self._window = self._new_window()
        drawing_seconds = self._window.busy_seconds - window.busy_seconds
        uploading_seconds = self._window.blocked_seconds - window.blocked_seconds
        if window.storage_faults:
            uploading_seconds = 0.0
        seconds = drawing_seconds + uploading_seconds
        # A node that is idle or only enlarges shows nothing, and does not reset the count.
        least_seconds = LEAST_BUSY_SHARE * (self._window.began_at - window.began_at)
        if seconds <= least_seconds or window.enlarged_images:
            self._windows.labels("unknown").inc()
            return None
        tflop = sum(
            count * families.find(family).passes_tflop([job_pass])
            for (family, job_pass), count in window.passes.items()
        )
        # In images of 512x512 and 15 steps.
        speed = tflop / families.SD1.image_tflop() / seconds
        least = self._limits.images_per_second
        if speed >= least:
            self._windows.labels("passed").inc()
            self.failed_in_a_row = 0
            return None
        self._windows.labels("failed").inc()
        self._faults.labels("speed").inc()
        self.failed_in_a_row += 1
        reason = (
            f"the node makes {speed:.3g} images/s, less than {least:.3g}: its GPU drew for"
            f" {drawing_seconds:.0f} s and waited for uploads for {uploading_seconds:.0f} s"
        )
        count = f"{self.failed_in_a_row} windows in a row, of {FAILED_WINDOWS}"
        log.warning(f"this node failed {count}: {reason}", action="node_window_failed")
        return reason

    def _new_window(self) -> _Window:
        clock = self._engine_thread.clock
        return _Window(
            time.monotonic(),
            clock.busy_seconds,
            clock.idle_seconds.get("backpressure", 0.0),
        )
