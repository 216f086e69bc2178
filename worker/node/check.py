"""Before the first job: whether this node can do the work at all.

The disk is looked at everywhere and told; the GPU is asked, an image drawn and a blob sent only
where a limit says so: on SaladCloud, or by a setting. What is measured counts against a node when
it is missed three times, since a node that is given up is kept from the group for 48 hours.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from imagefleet import errors
from imagefleet.storage import protocol
from worker.engine import contract
from worker.node.limits import NodeLimits, standard_images
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

#: Measurements below the limit before a node counts as broken.
TRIES = 3

#: Between two uploads: a neighbour's download may be over by then.
UPLOAD_PAUSE_SECONDS = 5.0

#: For the connection, which is none of the line's speed.
UPLOAD_SLACK_SECONDS = 1.0

#: Enough to see a line's speed, and sent as images are: several at once, none over 1 MiB.
UPLOAD_BYTES = 4_000_000
UPLOAD_BLOBS = 4

#: No campaign's folder: names of campaigns do not begin with a hyphen. What a token without the
#: right to delete leaves there is a rule of the storage's life cycle to remove.
UPLOAD_FOLDER = "-node-checks"

#: What is drawn; an image's cost hangs on its steps and its size alone.
_STEPS = 15
_PROMPT = "photo of a house by a lake, volumetric light"


@dataclass(slots=True)
class Findings:
    """What was measured; None: it was not."""

    free_disk_bytes: int | None = None
    free_gpu_bytes: int | None = None
    images_per_second: float | None = None
    upload_bits_per_second: float | None = None


class NodeCheck(Collector):
    """The start-up check of one node, and what it found, for the metrics."""

    def __init__(
        self,
        blobs: protocol.BlobStore,
        settings: WorkerSettings,
        limits: NodeLimits,
    ) -> None:
        self.findings = Findings()
        self.passed: bool | None = None
        self._blobs = blobs
        self._settings = settings
        self._limits = limits
        self._began_at = time.monotonic()
        self._seconds = 0.0

    def load(self, load: Callable[[], contract.Engine]) -> contract.Engine:
        """Loads the engine between the checks that need it; on the engine's own thread.

        Raises:
            NodeError: a check failed.
        """
        self._look_at_disk()
        self._look_at_gpu()
        engine = load()
        if self._limits.images_per_second:
            self._draw(engine)
        return engine

    async def upload(self) -> None:
        """Sends a blob to the store, and removes it where the credentials allow that.

        Raises:
            NodeError: it took too long, three times; TransientError, SetupError: the store or the
            credentials are at fault, as on any other node.
        """
        least = self._limits.upload_bits_per_second
        if not least:
            return
        speed = 0.0
        for left in reversed(range(TRIES)):
            speed = await self._send(8 * UPLOAD_BYTES / least)
            self.findings.upload_bits_per_second = speed
            if speed >= least:
                return
            if left:
                await asyncio.sleep(random.uniform(0.5, 1.5) * UPLOAD_PAUSE_SECONDS)  # noqa: S311
        raise errors.NodeError(
            f"the upload to the store has {speed / 1e6:.2f} megabits a second, less than"
            f" {least / 1e6:g} (--min-upload-megabits)"
        )

    @contextlib.asynccontextmanager
    async def within_its_time(self) -> AsyncIterator[None]:
        """The whole start-up happens inside; in the end one line tells what was found.

        Raises:
            NodeError: a check failed, or all of it took too long.
        """
        limit_seconds = self._limits.start_up_seconds
        limit = asyncio.timeout(limit_seconds or None)
        try:
            async with limit:
                yield
        except errors.NodeError as error:
            self._end(error)
            raise
        except TimeoutError:
            if not limit.expired():
                raise
            failure = errors.NodeError(
                f"this node is not ready after {limit_seconds:g} s (--start-up-seconds)"
            )
            self._end(failure)
            raise failure from None
        self._end(None)

    def _end(self, failure: errors.NodeError | None) -> None:
        self.passed = failure is None
        self._seconds = time.monotonic() - self._began_at
        log.log(
            logging.INFO if self.passed else logging.ERROR,
            "the node's check %s after %.1f s",
            "passed" if self.passed else f"failed: {failure}",
            self._seconds,
            extra={
                "action": "node_check",
                "passed": self.passed,
                "seconds": round(self._seconds, 3),
                **asdict(self.findings),
                "limits": asdict(self._limits),
            },
        )

    def collect(self) -> Iterator[Metric]:
        if self.passed is None:
            return
        found = self.findings
        speed = found.upload_bits_per_second
        for name, what, value in (
            ("passed", "Whether this node passed its check at the start.", float(self.passed)),
            ("seconds", "How long the start took, loading and compiling included.", self._seconds),
            ("free_disk_bytes", "Free on the disk of the LoRA cache.", found.free_disk_bytes),
            ("free_gpu_bytes", "Free before the model was loaded.", found.free_gpu_bytes),
            ("images_per_second", "Of 512x512 and 15 steps.", found.images_per_second),
            ("upload_bytes_per_second", "To the store.", None if speed is None else speed / 8),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"imagefleet_node_check_{name}", what, value=value)

    def _look_at_disk(self) -> None:
        folder = self._settings.lora_cache.expanduser()
        free = self.findings.free_disk_bytes = shutil.disk_usage(_existing(folder)).free
        if free < self._limits.free_disk_bytes:
            raise errors.NodeError(
                f"the disk of {folder} has {free / 2**20:,.0f} MiB free; a worker needs"
                f" {self._limits.free_disk_bytes / 2**20:,.0f}"
            )

    def _look_at_gpu(self) -> None:
        least, device = self._limits.free_gpu_bytes, self._settings.device
        # Where no GPU is rented, `auto` may mean the CPU, and a wrong number is the operator's.
        if device == "cpu" or not least:
            return
        from worker.engine import device as cuda_check  # torch takes seconds to load

        free = self.findings.free_gpu_bytes = cuda_check.free_gpu_bytes(device)
        if free < least:
            raise errors.NodeError(
                f"the GPU has {free / 2**20:,.0f} MiB free; a worker needs {least / 2**20:,.0f}"
            )

    def _draw(self, engine: contract.Engine) -> None:
        """Fills the engine with images until one fill is fast enough.

        The first is not counted against the node: it also chooses kernels.
        """
        least = self._limits.images_per_second
        speed = 0.0
        for _ in range(1 + TRIES):
            speed = self.findings.images_per_second = _images_per_second(engine)
            if speed >= least:
                return
        raise errors.NodeError(
            f"the GPU makes {speed:.3g} images/s, less than {least:.3g} (--min-images-per-second)"
        )

    async def _send(self, longest_seconds: float) -> float:
        """Bits a second; what takes longer than allowed is given up, and counts as that long."""
        names = [f"{UPLOAD_FOLDER}/{uuid.uuid4().hex}" for _ in range(UPLOAD_BLOBS)]
        data = os.urandom(UPLOAD_BYTES // UPLOAD_BLOBS)  # nothing on the way makes it smaller
        began_at = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_seconds + UPLOAD_SLACK_SECONDS):
                sending = [
                    self._blobs.create(name, data, "application/octet-stream", {}) for name in names
                ]
                await asyncio.gather(*sending)
        seconds = time.monotonic() - began_at
        await self._remove(names)
        return 8 * UPLOAD_BYTES / seconds

    async def _remove(self, names: list[str]) -> None:
        try:
            for name in names:
                if not await self._blobs.delete(name):
                    return
        except errors.FleetError as error:
            log.info(
                "blobs of the check stay in %s: %s",
                UPLOAD_FOLDER,
                error,
                extra={"action": "check_blobs_stay"},
            )


def plain_request(engine: contract.Engine, seed: int) -> contract.ImageRequest:
    """An image that every sound node draws: of the checkpoint's own size, without a LoRA."""
    width, height = engine.default_size
    return contract.ImageRequest(
        prompt=_PROMPT,
        negative_prompt="",
        loras=(),
        sampler="euler_ancestral",
        steps=_STEPS,
        cfg_scale=7,
        seed=seed,
        width=width,
        height=height,
    )


def _images_per_second(engine: contract.Engine) -> float:
    """The speed of one fill of the engine; an image that fails counts as none."""
    requests = [plain_request(engine, seed) for seed in range(engine.capacity)]
    began_at = time.monotonic()
    for ticket, request in enumerate(requests):
        engine.admit(ticket, engine.prepare(request))
    drawn = 0
    while engine.busy:
        for finished in engine.tick():
            drawn += not isinstance(finished.outcome, errors.FleetError)
    seconds = time.monotonic() - began_at
    # A smaller image is not worth less: what it costs beside its pixels weighs more.
    worth = max(1.0, standard_images(_STEPS, *engine.default_size))
    return drawn * worth / max(seconds, 1e-9)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there and may be looked at."""
    while not os.access(folder, os.F_OK):
        folder = folder.absolute().parent
    return folder
