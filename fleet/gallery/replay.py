"""Sends a failed job again from the page, if the credentials are an operator's."""

from __future__ import annotations

import asyncio

from fleet.gallery import guard
from imagefleet import aio, errors
from imagefleet.records.record import Record
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.open import LOCAL_SCHEME
from imagefleet.storage.settings import Resource, StorageSettings

#: What a replay does: it takes the job out of one queue and puts it into another.
_NEEDED: dict[Resource, str] = {"queue": "a", "poison": "rup"}


class Replays:
    """Replays failed jobs of one storage, or says why it may not."""

    def __init__(self, fleet: aio.Fleet, settings: StorageSettings, host: str) -> None:
        self._fleet = fleet
        self._settings = settings
        self._host = host
        self._refusal: str | None = None
        self._lock = asyncio.Lock()
        self._checks = asyncio.Lock()

    async def refusal(self) -> str:
        """Why no job can be sent again; empty if one can be."""
        async with self._checks:
            if self._refusal is None:
                self._refusal = await self._find_refusal()
        return self._refusal

    async def _find_refusal(self) -> str:
        if not guard.is_loopback(self._host):
            return f"The gallery listens on {self._host}: anybody there could send jobs again."
        if self._settings.storage.strip().startswith(LOCAL_SCHEME):
            return ""
        from fleet.keys import check  # Azure's libraries are slow to import

        try:
            checked = {each.resource: each for each in await check.check(self._settings)}
        except errors.FleetError as error:
            return error.message
        if all(
            set(letters) <= set(checked[resource].allowed) for resource, letters in _NEEDED.items()
        ):
            return ""
        name = ROLES["operator"].name
        return (
            f"These credentials may only read. Tokens of the role {name} may send jobs again:"
            f" imagefleet keys mint {name}"
        )

    async def replay(self, record: Record) -> None:
        """Puts a failed job back into the queue.

        Raises:
            FleetError: it stays where it is; says why.
        """
        if refusal := await self.refusal():
            raise errors.SetupError(refusal)
        async with self._lock:
            swept = await self._fleet.replay(id=record.id, campaign=record.campaign)
        if swept.refused:
            raise errors.JobError(swept.refused[0].reason)
        if not swept.done:
            raise errors.JobError("It is not in the poison queue any more.")
