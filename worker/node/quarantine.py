"""The list of nodes that may lease no more, to which `imagefleet verify --quarantine` adds."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from pydantic import BaseModel, Field

from imagefleet import concurrency, validation
from imagefleet.errors import FleetError, NodeError, SetupError
from imagefleet.storage.proofs import machine_of
from imagefleet.storage.protocol import BlobPart, BlobStore
from imagefleet.telemetry import logs
from imagefleet.telemetry.logs import log

BLOB = "quarantine.json"

#: The largest list: some ten thousand nodes.
MAX_BYTES = 4_000_000

#: Seconds between two readings of the list.
PERIOD_SECONDS = 300.0


class Node(BaseModel, extra="allow", frozen=True):
    """A node by its worker's name or its machine's id."""

    name: str = Field(max_length=1000)
    reason: str = ""
    at: str = ""


class Listing(BaseModel, extra="allow", frozen=True):
    nodes: list[Node]


async def read(files: BlobStore) -> Listing:
    """The list, empty if there is none; raises SetupError if it is none."""
    return _parse(files, await files.read_part(BLOB, 0, MAX_BYTES))


def _parse(files: BlobStore, part: BlobPart | None) -> Listing:
    if part is None:
        return Listing(nodes=[])
    before = f"correct or delete {BLOB} in {files.name}, which is not a list of nodes: "
    with validation.as_error(SetupError, before):
        return Listing.model_validate_json(part.data)


async def add(files: BlobStore, workers: Iterable[str], reason: str) -> list[str]:
    """Adds nodes, and returns the new ones; raises TransientError if others keep changing it.

    A worker's name on SaladCloud changes with each process: there its machine is added.
    """
    wanted = list(dict.fromkeys(machine_of(worker) or worker for worker in workers))
    new: list[Node] = []

    def with_new(part: BlobPart | None) -> bytes | None:
        found = _parse(files, part)
        known = {node.name for node in found.nodes}
        now = f"{files.clock.now():%Y-%m-%dT%H:%M:%SZ}"
        new[:] = [
            Node(name=each, reason=reason, at=now)
            for each in wanted
            if each not in known
        ]
        changed = found.model_copy(update={"nodes": [*found.nodes, *new]})
        return changed.model_dump_json(indent=2).encode() if new else None

    await files.edit(BLOB, with_new, MAX_BYTES)
    return [node.name for node in new]


@dataclass(eq=False)
class Quarantine:
    """Looks one node up, by the names of its worker and of its machine."""

    _files: BlobStore
    _names: frozenset[str]
    _warning: logs.Occasion = field(default_factory=logs.Occasion)

    async def reason(self) -> str | None:
        """The reason this node is quarantined; None if it is not, or if the list cannot be read."""
        try:
            found = await read(self._files)
        except FleetError as error:
            if self._warning.is_due():
                log.warning(
                    f"{BLOB} in the container {self._files.name!r} cannot be read: {error}",
                    action="quarantine_unread",
                )
            return None
        for node in found.nodes:
            if node.name in self._names:
                why = f": {node.reason[:200]}" if node.reason else ""
                return f"{node.name} is in {BLOB}{why}"
        return None

    async def watch(self, listed: Callable[[str], None]) -> NoReturn:
        """Side task: once this node is listed, calls *listed* and raises NodeError."""
        while True:
            await asyncio.sleep(concurrency.jitter(PERIOD_SECONDS))
            if reason := await self.reason():
                listed(reason)
                raise NodeError(f"this node is quarantined: {reason}")
