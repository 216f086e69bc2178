"""The images stored since a node was last found good: suspect, should it turn out to be broken."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from imagefleet import errors, retry
from imagefleet.job.message import ASIDE, SUSPECT
from imagefleet.storage import protocol
from worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)

#: The most images of a worker: the fastest GPU's of some hours between two checks of its weights.
MAX_IMAGES = 50_000

Check = Literal["images", "weights"]


@dataclass(slots=True)
class Suspects:
    """Names of stored images, by when they were generated."""

    worker: str
    blobs: protocol.BlobStore
    metrics: WorkerMetrics
    retry_policy: retry.RetryPolicy
    began_at: float = field(default_factory=time.monotonic)
    # A dict of as many is copied as a whole now and then, which leaves megabytes of holes.
    _stored: deque[tuple[str, float]] = field(
        default_factory=lambda: deque(maxlen=MAX_IMAGES), init=False
    )
    _good_at: dict[Check, float] = field(default_factory=dict, init=False)

    def storing(self, name: str, generated_at: float) -> None:
        """An image is about to be stored: whether it was is not always known later."""
        if name.startswith(ASIDE):
            return  # no job's image
        self._stored.append((name, generated_at))

    def not_stored(self, name: str) -> None:
        """Another worker's image has the name."""
        for back, (stored, _) in enumerate(reversed(self._stored), 1):
            if stored == name:
                del self._stored[-back]
                break

    def good(self, check: Check, began_at: float) -> None:
        """A check that began then (monotonic seconds) has passed; drops what no check needs."""
        self._good_at[check] = began_at
        oldest = min(self.since("images"), self.since("weights"))
        kept = [entry for entry in self._stored if entry[1] >= oldest]
        self._stored.clear()
        self._stored.extend(kept)

    def since(self, check: Check) -> float:
        """The time at which the last good check of a kind began (monotonic seconds)."""
        return self._good_at.get(check, self.began_at)

    async def record(self, since: float, reason: str) -> None:
        """Stores a record of what was generated *since* then (monotonic seconds), if anything."""
        names = sorted({name for name, at in self._stored if at >= since})
        if not names:
            return
        self.metrics.suspect_images.inc(len(names))
        now = datetime.now(UTC)
        content = {
            "worker": self.worker,
            "machine": machine(),
            "since": _text(datetime.fromtimestamp(now.timestamp() - time.monotonic() + since, UTC)),
            "until": _text(now),
            "reason": reason,
            "images": names,
        }
        blob = f"{SUSPECT}{file_name(self.worker)}/{now:%Y%m%dT%H%M%SZ}.json"
        data = json.dumps(content).encode()
        try:
            await self.retry_policy.call(
                lambda: self.blobs.create(blob, data, "application/json", {})
            )
        except errors.FleetError as error:
            log.error(  # noqa: TRY400 - its message says it all
                "%d images since %s are suspect, and their record could not be stored (%s):"
                " `imagefleet redo --worker %s --since %s` draws them again",
                len(names),
                content["since"],
                error,
                self.worker,
                content["since"],
                extra={"action": "suspects_not_recorded", "images": names[:1000]},
            )
            return
        log.warning(
            "%d images since %s are suspect: %s",
            len(names),
            content["since"],
            blob,
            extra={"action": "suspects_recorded", "blob": blob},
        )


def machine() -> str:
    """The machine's id on SaladCloud, else its host name."""
    return os.environ.get("SALAD_MACHINE_ID") or socket.gethostname()


def _text(time_: datetime) -> str:
    return time_.strftime("%Y-%m-%dT%H:%M:%SZ")


def file_name(worker: str) -> str:
    """A worker's name as a part of a blob's."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", worker).lstrip(".") or "_"
