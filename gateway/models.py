"""The models that requests may name: what workers serve, what the storage holds, and aliases."""

import asyncio
import time
from collections.abc import Mapping

from gateway.clients import Client
from imagefleet import errors
from imagefleet.http.refused import Refused
from imagefleet.job.message import Job
from imagefleet.storage.enqueue import stored_models
from imagefleet.storage.open import Storage

#: Seconds for which the lists are believed: each is a listing, which Azure bills.
_READ_SECONDS = 5.0

#: Models that an error names.
_MOST_NAMED = 20


class UnknownModelError(Refused):
    """A model that no worker can have: a request for it would wait for ever."""

    code = "model_not_found"

    def __init__(self, name: str, known: list[str]) -> None:
        named = ", ".join(known[:_MOST_NAMED]) or "none: leave the model out"
        super().__init__(
            404,
            f"the model {name[:80]!r} does not exist: no worker serves it, and it is not in the"
            f" storage; there are {named}",
        )


class Models:
    """The lists of models, read when a request needs them."""

    def __init__(
        self, storage: Storage, aliases: Mapping[str, str], own: str | None
    ) -> None:
        """*own*: the model of a worker in this process, which may still be loading it."""
        self.served: set[str] = set()
        """Models that a worker has served in the last 5 to 10 minutes."""
        self.stored: set[str] = set()
        self._storage = storage
        self._aliases = aliases
        self._own = {own} if own else set()
        self._read_at = -_READ_SECONDS
        self._reading = asyncio.Lock()

    @property
    def known(self) -> list[str]:
        return sorted(self.served | self.stored | self._own)

    async def refresh(self) -> None:
        """Reads the lists, unless they are new; raises TransientError."""
        async with self._reading:
            if time.monotonic() - self._read_at < _READ_SECONDS:
                return
            self.served = await self._storage.models.served_now()
            self.stored = await stored_models(self._storage.files)
            self._read_at = time.monotonic()

    async def resolve(self, client: Client, job: Job) -> Job:
        """The job with the model that its name stands for; raises UnknownModelError."""
        if job.model is None:
            return job
        aliases = {**self._aliases, **client.models}
        name = aliases.get(job.model, job.model)
        await self.refresh()
        if name not in self.known:
            raise UnknownModelError(job.model, [*sorted(aliases), *self.known])
        return job if name == job.model else job.model_copy(update={"model": name})

    async def are_unserved(self, model: str | None) -> bool:
        """True if no worker has served the model, or None any model, for five minutes."""
        try:
            await self.refresh()
        except errors.FleetError:
            return False  # nobody knows
        return not self.served if model is None else model not in self.served
