"""What every queue that consists of others does: it asks them in turn, and less often if empty."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass

from imagefleet import concurrency, errors
from imagefleet.storage import protocol

log = logging.getLogger(__name__)

#: A queue that was empty is asked again after this pause, which doubles up to the longest.
FIRST_PAUSE_SECONDS = 0.5

#: A queue that does not exist, whose token is missing, or that does not answer while the main one
#: does, is asked again after this time.
MISSING_PAUSE_SECONDS = 60.0


@dataclass(slots=True, eq=False)
class Source:
    """One of the queues, and when it is asked next; *level* is its priority's, 0 the highest."""

    queue: protocol.JobQueue
    level: int = 0
    model: str | None = None
    due_at: float = 0.0
    empty_receives: int = 0
    last_receive: int = 0
    """The number of the last receive that it had jobs for."""
    is_missing: bool = False


class CombinedQueue:
    """Queues that are drained as one, of which only the main one must exist.

    A subclass says which are asked now, in which order, and after which pauses.
    """

    def __init__(
        self, main: Source, others: list[Source], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._main = main
        self._sources = {each.queue.name: each for each in (main, *others)}
        self._clock = clock
        self._receives = 0  # that returned messages

    @property
    def name(self) -> str:
        return self._main.queue.name

    async def check(self) -> None:
        await self._main.queue.check()
        self._notice()
        for source in self._others():
            try:
                await source.queue.check()
            except errors.MissingResourceError as error:
                self._set_missing(source, error)

    async def receive(
        self, max_messages: int, lease_seconds: float
    ) -> list[protocol.LeasedMessage]:
        protocol.check_receive(max_messages, lease_seconds)
        received: list[protocol.LeasedMessage] = []
        empty: list[Source] = []
        unanswered: dict[Source, errors.FleetError] = {}
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
            received += self._labelled(source, messages)
            if messages:
                source.empty_receives, source.last_receive = 0, self._receives + 1
                source.due_at = 0.0
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
                    yield self._labelled(source, [message])[0]

    @property
    def finds_all(self) -> bool:
        return all(source.queue.finds_all for source in self._sources.values())

    async def find(self, text: str) -> AsyncIterator[protocol.FoundMessage]:
        await self._find()
        for source in list(self._sources.values()):
            with self._main_must_exist(source):
                async for found in source.queue.find(text):
                    (message,) = self._labelled(source, [found.message])
                    yield dataclasses.replace(found, message=message)

    async def clear(self) -> None:
        await self._find()
        for source in list(self._sources.values()):
            with self._main_must_exist(source):
                await source.queue.clear()

    async def stamps(self) -> protocol.Stamps:
        return await self._main.queue.stamps()

    async def depth(self) -> protocol.QueueDepth:
        # The main queue alone at first: without access there is none to the others either.
        found = {self._main.queue.name: await self._main.queue.depth()}
        if found[self._main.queue.name].oldest_age_seconds is not None:
            self._main.due_at = 0.0
        self._notice()
        await self._find()
        others = self._others()
        depths_of_others = await concurrency.gather(*(self._depth(each) for each in others))
        for source, depth in zip(others, depths_of_others, strict=True):
            if depth is not None:
                found[source.queue.name] = depth
        return total({name: found[name] for name in self._sources if name in found})

    # What a subclass says.

    async def _find(self) -> None:
        """Looks for other queues, before all of them are looked at."""

    def _notice(self) -> None:
        """Takes from the main queue's last answer what it tells of the others."""

    def _in_turn(self) -> list[Source]:
        """The queues to ask now, in this order."""
        raise NotImplementedError

    def _longest_pause(self, source: Source, *, is_idle: bool) -> float:
        """The longest pause of a queue that is empty; *is_idle*: all of them are."""
        raise NotImplementedError

    def _labelled(
        self, _source: Source, messages: list[protocol.AnyMessage]
    ) -> list[protocol.AnyMessage]:
        """Messages as this queue's callers know them."""
        return messages

    def _source_of(self, message: protocol.LeasedMessage) -> Source:
        return self._sources.get(message.queue, self._main)

    # What subclasses use.

    def _pause(
        self,
        empty: list[Source],
        unanswered: Mapping[Source, errors.FleetError],
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
        for source in empty:
            longest = self._longest_pause(source, is_idle=is_idle)
            source.due_at = now + pause_seconds(source.empty_receives, longest)
            source.empty_receives += 1

    async def _depth(self, source: Source) -> protocol.QueueDepth | None:
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
    def _main_must_exist(self, source: Source) -> Iterator[None]:
        """Any other queue may be missing."""
        try:
            yield
        except errors.SetupError as error:
            if source is self._main:
                raise
            self._set_missing(source, error)

    def _set_missing(self, source: Source, error: errors.FleetError) -> None:
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

    def _others(self) -> list[Source]:
        return [each for each in self._sources.values() if each is not self._main]


def pause_seconds(empty_receives: int, longest_seconds: float) -> float:
    """How long a queue is left alone that was empty once more than *empty_receives* times."""
    return min(FIRST_PAUSE_SECONDS * float(2 ** min(empty_receives, 30)), longest_seconds)


def total(depths: Mapping[str, protocol.QueueDepth]) -> protocol.QueueDepth:
    """The size of several queues as one."""
    leased = [each.leased for each in depths.values() if each.leased is not None]
    ages = [age for each in depths.values() if (age := each.oldest_age_seconds) is not None]
    return protocol.QueueDepth(
        sum(each.messages for each in depths.values()),
        sum(leased) if len(leased) == len(depths) else None,
        max(ages, default=None),
        depths,
    )
