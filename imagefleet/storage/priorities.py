"""Job queues of several priorities and models as one, drained by priority, which starves none."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass

from imagefleet import concurrency, errors
from imagefleet.storage import protocol

log = logging.getLogger(__name__)

#: One of so many receives that return jobs asks the lower queues first.
FAIR_EVERY = 8

#: A queue that was empty is asked again after this pause, which doubles up to the longest: short
#: where other queues have jobs, since a job of high priority may arrive, long where none has any.
#: An idle worker makes some 23,000 receives a day, half of them for these pauses: 0.1 cents.
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 2.0
LONGEST_IDLE_PAUSE_SECONDS = 10.0

#: A queue that does not exist, whose token is missing, or that does not answer while the main one
#: does, is asked again after this time.
MISSING_PAUSE_SECONDS = 60.0


@dataclass(slots=True, eq=False)
class _Source:
    """One of the queues, and when it is asked next; *level* is its priority's, 0 the highest."""

    queue: protocol.JobQueue
    level: int
    model: str | None = None
    due_at: float = 0.0
    empty_receives: int = 0
    last_receive: int = 0
    """The number of the last receive that it had jobs for."""
    is_missing: bool = False


class OrderedQueues:
    """Queues drained in their order. Messages are sent to *main*, and only that must exist.

    A message stays in its queue when it is handed back. Queues of one priority, of several models,
    take turns.
    """

    def __init__(
        self,
        queues: Sequence[protocol.JobQueue],
        main: protocol.JobQueue,
        *,
        clock: Callable[[], float] = time.monotonic,
        find_more: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """*queues* are those of jobs without a model, by priority.

        *find_more* calls `add` for other models' queues, before all queues are looked at.
        """
        self._sources = {queue.name: _Source(queue, level) for level, queue in enumerate(queues)}
        self._main = self._sources[main.name]
        self._find_more = find_more
        self._wanted: frozenset[str | None] | None = None
        self._clock = clock
        self._receives = 0  # that returned messages

    @property
    def name(self) -> str:
        return self._main.queue.name

    def add(self, model: str, queues: Sequence[protocol.JobQueue]) -> None:
        """The queues of a model's jobs as well, by priority."""
        for level, queue in enumerate(queues):
            self._sources.setdefault(queue.name, _Source(queue, level, model))

    def remove(self, model: str) -> None:
        """The queues of a model no more, of which no message may be in flight."""
        self._sources = {name: each for name, each in self._sources.items() if each.model != model}

    def receive_only(self, models: Collection[str | None]) -> None:
        """From now on `receive` takes jobs of these *models*; None: those without a model."""
        self._wanted = frozenset(models)

    async def depth_of(self, models: Collection[str | None]) -> protocol.QueueDepth:
        """The size of the queues of some models."""
        chosen = [each for each in self._sources.values() if each.model in models]
        found = await concurrency.gather(*(self._depth(each) for each in chosen))
        return _sum(
            {
                source.queue.name: depth
                for source, depth in zip(chosen, found, strict=True)
                if depth is not None
            }
        )

    async def check(self) -> None:
        await self._main.queue.check()
        for source in self._others():
            try:
                await source.queue.check()
            except errors.MissingResourceError as error:
                self._set_missing(source, error)

    async def send(self, bodies: Iterable[str]) -> None:
        await self._main.queue.send(bodies)

    async def receive(
        self, max_messages: int, lease_seconds: float
    ) -> list[protocol.LeasedMessage]:
        protocol.check_receive(max_messages, lease_seconds)
        received: list[protocol.LeasedMessage] = []
        empty: list[_Source] = []
        unanswered: dict[_Source, errors.FleetError] = {}
        asked = self._in_turn()
        for source in asked:
            try:
                messages = await source.queue.receive(max_messages - len(received), lease_seconds)
            except (errors.SetupError, errors.TransientError) as error:
                if source is self._main and isinstance(error, errors.SetupError) and not received:
                    raise
                unanswered[source] = error
                continue
            source.is_missing = False
            received += messages
            if messages:
                source.empty_receives, source.last_receive = 0, self._receives + 1
            else:
                empty.append(source)
            if len(received) == max_messages:
                break
        self._pause(
            empty, unanswered, is_idle=not received, is_outage=len(unanswered) == len(asked)
        )
        outages = [each for each in unanswered.values() if isinstance(each, errors.TransientError)]
        if outages and not received:
            raise outages[0]
        self._receives += bool(received)
        return received

    async def renew(
        self, message: protocol.LeasedMessage, lease_seconds: float, body: str | None = None
    ) -> protocol.LeasedMessage:
        return await self._source_of(message).queue.renew(message, lease_seconds, body)

    async def release(
        self, message: protocol.LeasedMessage, delay_seconds: float = 0, body: str | None = None
    ) -> None:
        source = self._source_of(message)
        await source.queue.release(message, delay_seconds, body)
        source.due_at = min(source.due_at, self._clock() + delay_seconds)

    async def delete(self, message: protocol.LeasedMessage) -> None:
        await self._source_of(message).queue.delete(message)

    async def browse(self) -> AsyncIterator[protocol.Message]:
        await self._find()
        for source in list(self._sources.values()):
            with self._main_must_exist(source):
                async for message in source.queue.browse():
                    yield message

    @property
    def finds_all(self) -> bool:
        return all(source.queue.finds_all for source in self._sources.values())

    async def find(self, text: str) -> AsyncIterator[protocol.FoundMessage]:
        await self._find()
        for source in list(self._sources.values()):
            with self._main_must_exist(source):
                async for found in source.queue.find(text):
                    yield found

    async def clear(self) -> None:
        await self._find()
        for source in list(self._sources.values()):
            with self._main_must_exist(source):
                await source.queue.clear()

    async def stamps(self) -> protocol.Stamps:
        return await self._main.queue.stamps()

    async def depth(self) -> protocol.QueueDepth:
        # The main queue alone at first: without access there is none to the others either.
        found = {self.name: await self._main.queue.depth()}
        await self._find()
        others = self._others()
        depths_of_others = await concurrency.gather(*(self._depth(each) for each in others))
        for source, depth in zip(others, depths_of_others, strict=True):
            if depth is not None:
                found[source.queue.name] = depth
        return _sum({name: found[name] for name in self._sources if name in found})

    async def _find(self) -> None:
        if self._find_more is not None:
            await self._find_more()

    async def _depth(self, source: _Source) -> protocol.QueueDepth | None:
        """The size of a queue other than the main one; None if it is missing."""
        try:
            depth = await source.queue.depth()
        except errors.SetupError as error:
            self._set_missing(source, error)
            return None
        source.is_missing = False
        if depth.oldest_age_seconds is not None:
            source.due_at = 0.0  # there is something to receive
        return dataclasses.replace(depth, model=source.model)

    @contextlib.contextmanager
    def _main_must_exist(self, source: _Source) -> Iterator[None]:
        """Any other queue may be missing."""
        try:
            yield
        except errors.SetupError as error:
            if source is self._main:
                raise
            self._set_missing(source, error)

    def _in_turn(self) -> list[_Source]:
        """The queues to ask now, in this order."""
        now = self._clock()
        wanted = [
            each
            for each in self._sources.values()
            if self._wanted is None or each.model in self._wanted
        ]
        # Of one priority, first the queue that has waited longest.
        in_turn = sorted(wanted, key=lambda each: (each.level, each.last_receive))
        if self._receives % FAIR_EVERY == FAIR_EVERY - 1:
            # With two that are never empty above it, the lowest would get nothing from the turns of
            # the lower queues.
            in_turn.sort(key=lambda each: (each.level == 0, each.last_receive))
        return [each for each in in_turn if self._is_main(each) or each.due_at <= now]

    def _is_main(self, source: _Source) -> bool:
        """Whether it is asked each time: the queue of normal priority of a model, or of none."""
        is_normal = source.level == self._main.level and not source.is_missing
        return source is self._main or is_normal

    def _pause(
        self,
        empty: list[_Source],
        unanswered: Mapping[_Source, errors.FleetError],
        *,
        is_idle: bool,
        is_outage: bool,
    ) -> None:
        """Sets when the queues that had nothing are asked again."""
        if self._main in unanswered or is_outage:
            empty = [*empty, *unanswered]  # an outage of all; none must wait for long after it
        else:
            for source, error in unanswered.items():
                self._set_missing(source, error)
        now = self._clock()
        longest = LONGEST_IDLE_PAUSE_SECONDS if is_idle else LONGEST_PAUSE_SECONDS
        for source in empty:
            seconds = FIRST_PAUSE_SECONDS * 2 ** min(source.empty_receives, 30)
            source.due_at = now + min(seconds, longest)
            source.empty_receives += 1
        if not is_idle:
            for source in self._others():
                if not source.is_missing:
                    source.due_at = min(source.due_at, now + LONGEST_PAUSE_SECONDS)

    def _set_missing(self, source: _Source, error: errors.FleetError) -> None:
        source.due_at = self._clock() + MISSING_PAUSE_SECONDS
        if not source.is_missing:
            source.is_missing = True
            is_usual = isinstance(error, errors.MissingResourceError)  # of an older deployment
            log.log(
                logging.INFO if is_usual else logging.WARNING,
                "no jobs are taken from the queue %s: %s",
                source.queue.name,
                error.message,
                extra={"action": "queue_missing", "queue": source.queue.name},
            )

    def _others(self) -> list[_Source]:
        return [each for each in self._sources.values() if each is not self._main]

    def _source_of(self, message: protocol.LeasedMessage) -> _Source:
        return self._sources.get(message.queue, self._main)


def _sum(depths: Mapping[str, protocol.QueueDepth]) -> protocol.QueueDepth:
    leased = [each.leased for each in depths.values() if each.leased is not None]
    ages = [age for each in depths.values() if (age := each.oldest_age_seconds) is not None]
    return protocol.QueueDepth(
        sum(each.messages for each in depths.values()),
        sum(leased) if len(leased) == len(depths) else None,
        max(ages, default=None),
        depths,
    )
