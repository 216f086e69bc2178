"""Suspect images: what a node stored between its last good check and the fault that ended it."""

import hashlib
import json
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta

from imagefleet import concurrency, errors
from imagefleet.job.names import SUSPECT, worker_file_name
from imagefleet.storage.open import Storage
from imagefleet.telemetry import logs
from worker.metrics import WorkerMetrics
from worker.settings import machine_name

log = logs.EventLog(__name__)

#: The most images of a worker: the fastest GPU's of some hours between two checks of its weights.
MAX_IMAGES = 50_000


@dataclass(slots=True)
class Suspects:
    """Names of stored images since the last good check, by when they were generated."""

    worker: str
    storage: Storage
    metrics: WorkerMetrics
    retry_policy: concurrency.RetryPolicy
    good_at: float = field(default_factory=time.monotonic)
    """Start of the last check that passed (monotonic seconds); before the first, of the worker."""
    images: deque[tuple[str, float]] = field(init=False)
    """Names of the images that are about to be stored, as whether one was is not always known
    later, and when they were generated."""

    def __post_init__(self) -> None:
        # A dict of as many is copied as a whole now and then, which leaves megabytes of holes.
        self.images = deque(maxlen=MAX_IMAGES)

    def not_stored(self, name: str) -> None:
        """Another worker's image has the name."""
        for back, (stored, _) in enumerate(reversed(self.images), 1):
            if stored == name:
                del self.images[-back]
                break

    def good(self, began_at: float) -> None:
        """A check that began then (monotonic seconds) has passed: forgets older images."""
        self.good_at = began_at
        newer = [image for image in self.images if image[1] >= began_at]
        self.images = deque(newer, MAX_IMAGES)

    async def record(self, reason: str) -> None:
        """Stores a record of what was generated since the last good check, if anything."""
        names = sorted({name for name, at in self.images if at >= self.good_at})
        if not names:
            return
        self.metrics.suspect_images.inc(len(names))
        blobs, prover = self.storage.blobs, self.storage.prover
        now = blobs.clock.now()
        good_at = now - timedelta(seconds=time.monotonic() - self.good_at)
        since = f"{good_at:%Y-%m-%dT%H:%M:%SZ}"
        content = {
            "worker": self.worker,
            "machine": machine_name(),
            "since": since,
            "until": f"{now:%Y-%m-%dT%H:%M:%SZ}",
            "reason": reason,
            "images": names,
        }
        blob = f"{SUSPECT}{worker_file_name(self.worker)}/{now:%Y%m%dT%H%M%SZ}.json"
        data = json.dumps(content).encode()
        metadata = {
            "worker": worker_file_name(self.worker),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        if prover is not None:
            metadata = prover.proven(blob, metadata)
        what = f"{len(names)} images since {since} are suspect"
        try:
            await self.retry_policy.call(
                lambda: blobs.create(blob, data, "application/json", metadata)
            )
        except errors.FleetError as error:
            log.error(  # noqa: TRY400 - it says it all
                f"{what}, and their record is not stored ({error}):"
                f" `imagefleet redo --worker {self.worker} --since {since}` draws them"
                " again",
                action="suspects_not_recorded",
                images=names[:1000],
            )
            return
        log.warning(f"{what}: {blob}", action="suspects_recorded", blob=blob)
