"""While a node works: whether it still does what it can, window by window.

One slow image, one bad minute or a storage that is down says nothing of a node. Only what lasts
for three windows in a row counts, and only what is the node's own: images that take too long on
the GPU, images that the GPU spoils (a plain one among them: `worker.node_proof`), and an upload so
slow that the GPU waits for it. Storage that answers with errors is everybody's trouble, and a GPU
call that never ends is `GpuLane.watch`'s.

A node that lost its platform, not its network, works on unseen (SaladCloud starts another in its
place): leases and blobs that are written once make that harmless, so nothing here looks for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from imagefleet import errors
from worker.gpu_thread import EngineThread
from worker.metrics import WorkerMetrics
from worker.node.limits import NodeLimits

log = logging.getLogger(__name__)

#: SaladCloud's own samples look at five minutes.
WINDOW_SECONDS = 300.0

#: Windows in a row that have to fail before the node is given up: a game that its owner starts, a
#: hot summer's hour or a large download may pass.
FAILED_WINDOWS = 3

#: The share of a window that the GPU must have worked before its speed says anything.
LEAST_BUSY_SHARE = 0.2

#: Spoilt images that say something of a node, if they are also half of all.
LEAST_SPOILT = 4
SPOILT_SHARE = 0.5

#: The share of a window that the GPU waited for the way out before the upload counts as too slow.
BLOCKED_SHARE = 0.5


@dataclass(slots=True)
class _Window:
    """What happened since *began_at* (monotonic seconds), and the lane's clock at that time."""

    began_at: float
    busy_seconds: float
    blocked_seconds: float
    images: float = 0.0  # of 512x512 and 15 steps
    drawn: int = 0
    failed_image: int = 0
    last_failed_image: str = ""  # words alone: an error may hold the GPU's memory
    uploaded_bytes: int = 0
    uploading_seconds: float = 0.0
    storage_faults: int = 0


@dataclass(slots=True)
class _Uploads:
    in_flight: int = 0
    since: float = field(default_factory=time.monotonic)


class NodeWatchdog:
    """Counts what one node does, and says after each window what that means."""

    def __init__(
        self, engine_thread: EngineThread, limits: NodeLimits, metrics: WorkerMetrics
    ) -> None:
        self.failed_in_a_row = 0
        self._engine_thread = engine_thread
        self._limits = limits
        self._windows = metrics.node_windows
        self._uploads = _Uploads()
        self._window = self._new_window()

    @property
    def is_on(self) -> bool:
        """Whether there is anything to hold the node to."""
        return bool(self._limits.images_per_second or self._limits.upload_bits_per_second)

    def drawn(self, standard_images: float) -> None:
        """The GPU is through with an image, worth so many of 512x512 and 15 steps."""
        self._window.drawn += 1
        self._window.images += standard_images

    def failed_image(self, error: errors.FleetError) -> None:
        """What the engine made of an image is none, and its job may have no part in that."""
        self._window.failed_image += 1
        self._window.last_failed_image = str(error)

    @contextlib.contextmanager
    def uploading(self, size_bytes: int) -> Iterator[None]:
        """One upload; where several overlap, their time counts once."""
        self._count_uploading()
        self._uploads.in_flight += 1
        try:
            yield
            self._window.uploaded_bytes += size_bytes
        except Exception:
            self._window.storage_faults += 1
            raise
        finally:
            self._count_uploading()
            self._uploads.in_flight -= 1

    async def broken(self, verdict: Callable[[str], Awaitable[str | None]]) -> str:
        """Returns, with the reason, when so many windows in a row have failed.

        *verdict* tells whether the node is at fault where images are spoilt; None: it is not.
        """
        self._window = self._new_window()
        while True:
            await asyncio.sleep(WINDOW_SECONDS)
            for alarm in self._spoils(self._window):
                if await verdict(alarm) is None:
                    self._window.failed_image = 0
            reason = self._close_window()
            if reason is not None and self.failed_in_a_row >= FAILED_WINDOWS:
                self.failed_in_a_row = 0
                return reason

    def _close_window(self) -> str | None:
        """What was wrong in the window that ends now; None: nothing, or there is no telling."""
        self._count_uploading()
        window, self._window = self._window, self._new_window()
        seconds = self._window.began_at - window.began_at
        busy_seconds = self._window.busy_seconds - window.busy_seconds
        blocked_seconds = self._window.blocked_seconds - window.blocked_seconds
        wrong = [
            *self._too_slow(window, busy_seconds, seconds),
            *self._spoils(window),
            *self._uploads_too_slowly(window, blocked_seconds, seconds),
        ]
        if not wrong and busy_seconds < LEAST_BUSY_SHARE * seconds:
            # An idle node has shown nothing, and takes nothing back.
            self._windows.labels("unknown").inc()
            return None
        self._windows.labels("failed" if wrong else "passed").inc()
        if not wrong:
            self.failed_in_a_row = 0
            return None
        self.failed_in_a_row += 1
        reason = "; ".join(wrong)
        log.warning(
            "this node works badly, %d times in a row of %d: %s",
            self.failed_in_a_row,
            FAILED_WINDOWS,
            reason,
            extra={"action": "node_window_failed", "failed_in_a_row": self.failed_in_a_row},
        )
        return reason

    def _too_slow(self, window: _Window, busy_seconds: float, seconds: float) -> Iterator[str]:
        least = self._limits.images_per_second
        if least and busy_seconds >= LEAST_BUSY_SHARE * seconds:
            speed = window.images / busy_seconds
            if speed < least:
                yield f"the GPU makes {speed:.3g} images/s, less than {least:.3g}"

    def _spoils(self, window: _Window) -> Iterator[str]:
        if (
            window.failed_image >= LEAST_SPOILT
            and window.failed_image >= SPOILT_SHARE * window.drawn
        ):
            yield (
                f"the GPU spoilt {window.failed_image} of {window.drawn} images, the last with:"
                f" {window.last_failed_image}"
            )

    def _uploads_too_slowly(
        self, window: _Window, blocked_seconds: float, seconds: float
    ) -> Iterator[str]:
        least = self._limits.upload_bits_per_second
        if (
            least
            and blocked_seconds >= BLOCKED_SHARE * seconds
            and window.uploading_seconds
            and not window.storage_faults
        ):
            speed = 8 * window.uploaded_bytes / window.uploading_seconds
            if speed < least:
                yield (
                    f"the upload to the store has {speed / 1e6:.2f} megabits a second, less than"
                    f" {least / 1e6:g}, and the GPU waits for it"
                )

    def _count_uploading(self) -> None:
        now = time.monotonic()
        if self._uploads.in_flight:
            self._window.uploading_seconds += now - self._uploads.since
        self._uploads.since = now

    def _new_window(self) -> _Window:
        clock = self._engine_thread.clock
        return _Window(
            time.monotonic(), clock.busy_seconds, clock.idle_seconds.get("backpressure", 0.0)
        )
