"""Sends jobs to the queues of their models; refuses those whose model no worker can have."""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

from imagefleet import validation
from imagefleet.errors import FleetError, JobError, SetupError
from imagefleet.files.kinds import MODEL
from imagefleet.storage.bundle import jobs_of
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobStore
from imagefleet.storage.routing.models import model_of, models_of
from imagefleet.storage.settings import Priority

#: The folder of models in the container of files.
MODELS = f"{MODEL.folder}/"


#: Seconds for which the lists of models are believed: each is a listing, which Azure bills.
_READ_SECONDS = 5.0


class JobSender:
    """Sends to the queues of one priority."""

    def __init__(
        self,
        storage: Storage,
        priority: Priority = "normal",
        *,
        elsewhere: Collection[str] = (),
    ) -> None:
        """*elsewhere*: models, or their files, that workers have besides the storage's."""
        self._storage = storage
        self._priority = priority
        self._known = {MODEL.stem(PurePosixPath(name).name) for name in elsewhere}
        #: Jobs that were sent, by the name of their queue.
        self.sent_to: Counter[str] = Counter()

    async def send(self, bodies: Iterable[str]) -> None:
        """Adds each to the queue of its job's model; none if one is too large, or `check` fails."""
        messages = list(bodies)
        await self.check(model for body in messages for model in models_of(body))
        await self._storage.models.make_for_chains(messages)
        await self._storage.models.send(messages, priority=self._priority)
        for body in messages:
            queue = self._storage.models.of(model_of(body))[self._priority]
            self.sent_to[queue.name] += jobs_of(body)

    async def check(self, models: Iterable[str]) -> None:
        """Raises JobError for a model that is neither in the storage nor served by a worker."""
        for model in set(models) - self._known:
            stored = await stored_models(self._storage.files)
            # Without a model in the storage, workers have theirs from elsewhere.
            is_there = not stored or model in stored
            if not is_there and not await self._storage.models.is_served(model):
                raise JobError(
                    f"no worker can have the model {model!r}: it is not in {MODELS} of the storage,"
                    f" and no worker serves it now{validation.suggestion(model, stored)}; add it"
                    " with `imagefleet files add model`, or say that workers have it from"
                    " elsewhere: --model NAME"
                )
            self._known.add(model)


class KnownModels:
    """The models that workers serve, and those that the storage holds, as of some seconds ago."""

    def __init__(self, storage: Storage, own: str | None = None) -> None:
        """*own*: a model whose worker may not have said yet that it serves it."""
        #: Models that a worker has served in the last 5 to 10 minutes.
        self.served: set[str] = set()
        self.stored: set[str] = set()
        self._storage = storage
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

    async def are_unserved(self, model: str | None) -> bool:
        """True if no worker has served the model, or None any model, for five minutes."""
        try:
            await self.refresh()
        except FleetError:
            return False  # nobody knows
        return not self.served if model is None else model not in self.served


async def stored_models(files: BlobStore) -> set[str]:
    """The models in the storage; none where the credentials do not allow to list them."""
    try:
        names = [PurePosixPath(name) async for name in files.names(MODELS)]
    except SetupError:
        return set()
    return {name.stem for name in names if name.suffix in MODEL.suffixes}
