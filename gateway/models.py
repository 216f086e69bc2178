"""The models that requests may name: what workers serve, what the storage holds, and aliases."""

from collections.abc import Mapping

from gateway.clients import Client
from imagefleet.http.refused import Refused
from imagefleet.job.message import Job
from imagefleet.storage.enqueue import KnownModels
from imagefleet.storage.held_files import HeldFiles
from imagefleet.storage.open import Storage

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


class Models(KnownModels):
    """The lists of models, read when a request needs them, and their other names."""

    def __init__(
        self, storage: Storage, aliases: Mapping[str, str], own: str | None
    ) -> None:
        """*own*: the model of a worker in this process, which may still be loading it."""
        super().__init__(storage, own)
        self.held = HeldFiles(storage)
        self._aliases = aliases

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
