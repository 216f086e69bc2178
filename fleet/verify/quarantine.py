"""The quarantine list: nodes that lease no more jobs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime

from imagefleet import errors
from imagefleet.storage.protocol import BlobStore
from worker.node.quarantine import BLOB, Node, read

#: The name of a worker by default: the UUID that SaladCloud gives its machine, and its process.
_SALAD_WORKER = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-\d+")
_TRIES = 5


def node_of(worker: str) -> str:
    """The machine of a worker on SaladCloud, whose name changes with each process; else itself."""
    found = _SALAD_WORKER.fullmatch(worker)
    return found[1] if found else worker


async def add(files: BlobStore, workers: Iterable[str], reason: str) -> list[str]:
    """Adds nodes, and returns the new ones; raises TransientError if others keep changing it."""
    wanted = list(dict.fromkeys(map(node_of, workers)))
    for _ in range(_TRIES):
        found, version = await read(files)
        known = {node.name for node in found.nodes}
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        new = [Node(name=each, reason=reason, at=now) for each in wanted if each not in known]
        if not new:
            return []
        changed = found.model_copy(update={"nodes": [*found.nodes, *new]})
        data = changed.model_dump_json(indent=2).encode()
        if await files.replace(BLOB, data, "application/json", version):
            return [node.name for node in new]
    raise errors.TransientError(f"{BLOB} is being changed by others: run the command again")
