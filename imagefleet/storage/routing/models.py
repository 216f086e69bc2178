"""The queues of jobs that name a model: which there are, and how a job gets into its own.

A model's queues are made when the first job is sent to it, or a worker starts that serves it. Then
a blob `-models/NAME` beside the images tells that there are some, since a queue's name does not
hold the model's.
"""

import asyncio
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property

from imagefleet import concurrency
from imagefleet.errors import SetupError
from imagefleet.job import chain, sizes
from imagefleet.job.message import fields_if_any, message_text
from imagefleet.job.prompt import SAFE_NAME
from imagefleet.storage.protocol import BlobStore, LeasedMessage, StoredQueue
from imagefleet.storage.routing.queue import Queues, RoutedQueue
from imagefleet.storage.settings import PRIORITIES, Priority
from imagefleet.telemetry.logs import Occasion, log

#: The folder of the blobs that tell which models have queues, beside the images.
FOLDER = "-models/"

#: Seconds between two listings of that folder.
LISTED_SECONDS = 10.0

#: Models with queues that are looked at: each costs three queues' operations.
MAX_MODELS = 200

#: Workers note which models they serve in spans: an empty blob `-serving/MODEL/SPAN` is the note of
#: any number of them. Older ones are deleted by workers whose credentials allow it.
SERVED_FOLDER = "-serving/"
SERVED_SPAN = timedelta(minutes=5)
_KEPT = timedelta(hours=1)

#: Beside a note, what the worker that wrote it has: some 30 bytes for each LoRA.
HELD_SUFFIX = ".json"
_MAX_HELD_BYTES = 2**20


@dataclass(eq=False)
class ModelQueues:
    """The queues of each model of one storage.

    *open_queue* opens a plain queue by priority and model.
    """

    open_queue: Callable[[Priority, str | None], StoredQueue]
    blobs: BlobStore

    def __post_init__(self) -> None:
        self._opened: dict[str | None, Queues] = {}
        self._made: set[str] = set()
        self._making = asyncio.Lock()
        self._listing = Occasion(LISTED_SECONDS)
        self._names: list[str] = []
        #: The queues of jobs without a model.
        self.default = self.of(None)

    def of(self, model: str | None) -> Queues:
        """A model's queues, whether they exist or not."""
        if model not in self._opened:
            self._opened[model] = {
                priority: self.open_queue(priority, model) for priority in PRIORITIES
            }
        return self._opened[model]

    async def create(self, model: str | None = None) -> bool:
        """Creates a model's queues if need be; False if the credentials, as any token, may not."""
        for priority in sorted(PRIORITIES, key=lambda priority: priority != "normal"):
            if not await self.of(model)[priority].create():
                return False
        return True

    async def make(self, model: str | None) -> Queues:
        """A model's queues, created if need be and allowed; not of a model that no job can name."""
        queues = self.of(model)
        if model is None or model in self._made or not SAFE_NAME.fullmatch(model):
            return queues
        async with self._making:
            if model not in self._made:
                await self.create(model)
                await self.blobs.create(f"{FOLDER}{model}", b"", "text/plain", {})
                self._made.add(model)
        return queues

    async def note_served(
        self, model: str, suffix: str = "", data: bytes = b""
    ) -> None:
        """A worker serves the model: `status` and those who send jobs know it for five minutes."""
        if SAFE_NAME.fullmatch(model):
            now = self.blobs.clock.now()
            name, old = (_note(model, each) + suffix for each in (now, now - _KEPT))
            await self.blobs.create(name, data, "text/plain", {})
            await self.blobs.delete(old)

    async def note_held(self, model: str, held: Mapping[str, object]) -> None:
        """A worker tells what it has to draw with the model: see `HeldFiles`."""
        await self.note_served(model, HELD_SUFFIX, json.dumps(held).encode())

    async def held_now(self, model: str) -> bytes:
        """What a worker has told in the last 5 to 10 minutes; nothing if none has."""
        for note in self._recent(model):
            if found := await self.blobs.read(note + HELD_SUFFIX, _MAX_HELD_BYTES):
                return found
        return b""

    async def is_served(self, model: str) -> bool:
        """True if a worker has noted in the last 5 to 10 minutes that it serves the model."""
        latest, before = self._recent(model)
        return await self.blobs.exists(latest) or await self.blobs.exists(before)

    async def served_now(self) -> set[str]:
        """The models that a worker has noted to serve in the last 5 to 10 minutes; a listing."""
        notes = {name async for name in self.blobs.names(SERVED_FOLDER)}
        models = {name.removeprefix(SERVED_FOLDER).partition("/")[0] for name in notes}
        return {model for model in models if not notes.isdisjoint(self._recent(model))}

    def _recent(self, model: str) -> tuple[str, str]:
        """The notes of the last 5 to 10 minutes that a worker serves a model, if it does."""
        now = self.blobs.clock.now()
        return _note(model, now), _note(model, now - SERVED_SPAN)

    async def names(self) -> list[str]:
        """The models that have queues, as far as the credentials allow to know it."""
        if self._listing.is_due():
            try:
                found = [
                    name.removeprefix(FOLDER) async for name in self.blobs.names(FOLDER)
                ]
            except SetupError as error:
                log.debug(f"which models have queues is not known: {error.message}")
            else:
                self._names = sorted(
                    name for name in found if SAFE_NAME.fullmatch(name)
                )
        return sorted({*self._names[:MAX_MODELS], *self._made})

    @cached_property
    def all(self) -> RoutedQueue:
        """The queues of all jobs as one, those of models included once they are looked for."""

        async def find_more() -> None:
            for model in await self.names():
                queue.add(model, self.of(model))

        queue = RoutedQueue(self.default, find_more=find_more)
        return queue

    def served(self, models: Iterable[str]) -> RoutedQueue:
        """The queues of jobs without a model and of these *models* as one, for a worker."""
        queue = RoutedQueue(self.default)
        for model in models:
            queue.add(model, self.of(model))
        return queue

    async def send(
        self,
        bodies: Iterable[str],
        priority: Priority = "normal",
        *,
        with_queues: Collection[str] | None = None,
    ) -> list[LeasedMessage]:
        """Adds each to the queue of its job's model; none, with a JobError, if one is too large.

        Queues are made if need be. With *with_queues*, jobs of other models wait with those that
        name no model, and workers sort them out. Returns the messages in their order, as
        `JobQueue.send` does.
        """
        messages = sizes.checked_messages(bodies)
        groups: dict[str | None, list[int]] = {}
        for number, body in enumerate(messages):
            model = model_of(body)
            if with_queues is not None and model not in with_queues:
                model = None
            groups.setdefault(model, []).append(number)
        sent: dict[int, LeasedMessage] = {}

        async def send_group(model: str | None, numbers: list[int]) -> None:
            queue = (await self.make(model))[priority]
            found = await queue.send([messages[number] for number in numbers])
            sent.update(zip(numbers, found, strict=True))

        await concurrency.gather(*(send_group(*each) for each in groups.items()))
        return [sent[number] for number in sorted(sent)]

    async def make_for_chains(self, bodies: Iterable[str]) -> None:
        """The queues of later stages, too: workers, which send those, may not be allowed to."""
        chains = [body for body in bodies if f'"{chain.THEN_FIELD}"' in body]
        for model in set().union(*map(models_of, chains)):
            await self.make(model)


def _note(model: str, moment: datetime) -> str:
    span = int(moment.timestamp() // SERVED_SPAN.total_seconds())
    start = datetime.fromtimestamp(span * SERVED_SPAN.total_seconds(), UTC)
    return f"{SERVED_FOLDER}{model}/{start:%Y%m%dT%H%M}"


def model_of(body: str) -> str | None:
    """The model that a message's job names for its stage; None if none, or it is no valid job."""
    if body.startswith("{") and '"model"' not in body:
        return None  # the most common case, without parsing it
    model = chain.model_of(fields_if_any(body))
    return model if isinstance(model, str) and SAFE_NAME.fullmatch(model) else None


def models_of(body: str) -> set[str]:
    """The models that a message's job names, those of its later stages included."""
    if body.startswith("{") and '"model"' not in body:
        return set()
    named = chain.models_of(fields_if_any(body))
    return {
        each for each in named if isinstance(each, str) and SAFE_NAME.fullmatch(each)
    }


def named(body: str, job_id: str | None) -> str:
    """The message of a job with its id, which otherwise would be its message's: it is to move."""
    fields = fields_if_any(body)
    return body if fields.get("id") else message_text(fields | {"id": job_id})
