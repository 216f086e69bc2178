"""Suspect images: what a node stored between its last good check and the fault that ended it."""

import hashlib
import json
import time
from datetime import datetime, timedelta

from imagefleet import concurrency
from imagefleet.errors import FleetError
from imagefleet.job.names import SUSPECT, worker_file_name
from imagefleet.storage.open import Storage
from imagefleet.telemetry.logs import log
from worker.settings import machine_name
from worker.stages.record import with_proof

#: The clocks of worker and storage differ by less.
_MARGIN = timedelta(seconds=1)


def _shown(at: datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"


async def record(
    storage: Storage,
    worker: str,
    good_at: float,
    reason: str,
    retry_policy: concurrency.RetryPolicy,
) -> None:
    """Records that a worker's images are suspect that were stored since *good_at* (monotonic)."""
    now = storage.blobs.clock.now()
    age = timedelta(seconds=time.monotonic() - good_at)
    since = _shown(now - age - _MARGIN)
    content = {
        "worker": worker,
        "machine": machine_name(),
        "since": since,
        "until": _shown(now + 2 * _MARGIN),
        "reason": reason,
    }
    name = worker_file_name(worker)
    blob = f"{SUSPECT}{name}/{now:%Y%m%dT%H%M%SZ}.json"
    data = json.dumps(content).encode()
    stated = {"worker": name, "sha256": hashlib.sha256(data).hexdigest()}
    metadata = with_proof(storage.prover, blob, stated)
    what = f"the images of {worker} since {since} are suspect"
    try:
        await retry_policy.call(
            lambda: storage.blobs.create(blob, data, "application/json", metadata)
        )
    except FleetError as error:
        log.error(
            f"{what}, and this is not recorded ({error}):"
            f" `imagefleet redo --worker {worker} --since {since}` draws them again",
            action="suspects_not_recorded",
        )
    else:
        log.warning(f"{what}: {blob}", action="suspects_recorded", blob=blob)
