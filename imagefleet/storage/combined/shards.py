"""A job queue that is several queues of the storage, for more messages/s than one of them takes.

How many there are is kept with the first one, as metadata: whoever measures or checks that queue
learns it without another request. A queue of one shard is that one, with no request more.

With more shards, jobs sent before stay where they are. With fewer, nothing is sent to the last ones
any more, and workers go on to ask them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping

from imagefleet import concurrency, errors
from imagefleet.job import sizes
from imagefleet.storage import protocol
from imagefleet.storage.combined import rule
from imagefleet.storage.combined.queue import CombinedQueue, Source
from imagefleet.storage.queue_names import MAX_SHARDS

log = logging.getLogger(__name__)


class ShardedQueue(CombinedQueue):
    """The shards of one queue as that queue. Only the first must exist."""

    def __init__(
        self,
        open_shard: Callable[[int], protocol.StoredQueue],
        granted: Callable[[], int] = lambda: 1,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*granted*: the shards of tokens which do not allow to read how many there are."""
        self._open_shard = open_shard
        self._granted = granted
        self._opened = [open_shard(0)]
        self._shards: protocol.Shards | None = None
        self._found_at = 0.0
        self._finding = asyncio.Lock()
        self._share = random.random()  # noqa: S311 - replaced by a worker's own
        self._order = [0]
        self._next_sent = random.randrange(MAX_SHARDS)  # noqa: S311 - few jobs, many senders
        self._was_idle = True
        super().__init__(Source(self._opened[0]), [], clock)

    @property
    def shards(self) -> int:
        """The number of shards that are polled for jobs, as far as it is known."""
        return len(self._order)

    @property
    def first(self) -> protocol.StoredQueue:
        return self._opened[0]

    def stand_at(self, share: float) -> None:
        """Sets the home and the order by `rule.in_order`."""
        self._share = share
        self._put_in_order()

    async def create(self) -> bool:
        """Creates the first shard if it does not exist; False if the credentials do not allow it.

        The others are there since the number was set.
        """
        created = await self.first.create()
        self._notice()
        return created

    async def set_shards(self, shards: int) -> None:
        """Sets to how many shards jobs are sent from now on; makes those that are missing.

        Raises:
            SetupError: the credentials do not allow that.
        """
        known = await self.first.read_shards()
        made = max(shards, known.made)
        if (shards, made) == known:
            self._adopt(known)
            return
        for number in range(1, made):
            if not await self._shard(number).create():
                raise errors.SetupError(
                    f"the shards of the queue {self.name!r} cannot be made with these credentials:"
                    " it takes the account's key"
                )
        # The last step: nobody must send to a queue that does not exist yet.
        await self.first.record_shards(protocol.Shards(shards, made))
        self._notice()

    async def sent_to(self) -> int:
        """The number of shards that jobs are sent to; who sends for hours finds a new one out."""
        await self._find()
        can_read = self.first.shards is not None
        if can_read and self._clock() - self._found_at >= rule.SENDERS_LOOK_SECONDS:
            self._found_at = self._clock()
            with contextlib.suppress(errors.SetupError, errors.TransientError):
                self._adopt(await self.first.read_shards())
        return self._shards.used if self._shards else 1

    async def send(self, bodies: Iterable[str]) -> None:
        shards = await self.sent_to()
        if shards == 1:
            await self.first.send(bodies)
            return
        messages = sizes.checked_messages(bodies)
        dealt = rule.spread(messages, shards, self._next_sent % shards)
        self._next_sent += len(messages)
        await concurrency.gather(*(self._send(*each) for each in dealt.items()))

    async def _send(self, number: int, bodies: list[str]) -> None:
        try:
            await self._shard(number).send(bodies)
        except errors.MissingResourceError as error:
            if not number:
                raise
            self._set_missing(self._source(number), error)
            await self.first.send(bodies)

    async def receive(
        self, max_messages: int, lease_seconds: float
    ) -> list[protocol.LeasedMessage]:
        await self._find()
        if self.shards == 1:
            return await self.first.receive(max_messages, lease_seconds)
        return await super().receive(max_messages, lease_seconds)

    async def depth(self) -> protocol.QueueDepth:
        depth = await super().depth()
        return depth if len(depth.by_queue) > 1 else next(iter(depth.by_queue.values()))

    async def _find(self) -> None:
        """Learns how many shards there are, unless it is known."""
        if self._shards is not None:
            return
        async with self._finding:  # a hundred jobs that are sent at the same time ask once
            if self._shards is not None:
                return
            try:
                self._adopt(await self.first.read_shards())
            except errors.MissingResourceError:
                return  # what is asked of it now says so
            except errors.SetupError:
                self._adopt(protocol.Shards(self._granted(), self._granted()))

    def _notice(self) -> None:
        if self.first.shards is not None:
            self._adopt(self.first.shards)

    def _adopt(self, shards: protocol.Shards) -> None:
        self._found_at = self._clock()
        if shards == self._shards:
            return
        if self._shards is not None or shards.made > 1:
            log.info(
                "the queue %s has %d shards",
                self.name,
                shards.used,
                extra={"action": "shards", "queue": self.name, "shards": shards.used},
            )
        self._shards = shards
        for number in range(shards.made):
            self._source(number)
        self._put_in_order()

    def _shard(self, number: int) -> protocol.StoredQueue:
        while len(self._opened) <= number:
            self._opened.append(self._open_shard(len(self._opened)))
        return self._opened[number]

    def _source(self, number: int) -> Source:
        queue = self._shard(number)
        return self._sources.setdefault(queue.name, Source(queue))

    def _put_in_order(self) -> None:
        self._order = rule.in_order(self._share, self._shards or protocol.Shards())

    def _in_turn(self) -> list[Source]:
        now = self._clock()
        home, *others = [self._source(each) for each in self._order]
        due = [each for each in others if each.due_at <= now]
        if self._receives % rule.FAIR_EVERY == rule.FAIR_EVERY - 1 and due:
            longest = min(due, key=lambda each: each.last_receive)
            return [longest, home, *(each for each in due if each is not longest)]
        asks_home = self._was_idle or home.due_at <= now or not due
        return [home, *due] if asks_home else due

    def _longest_pause(self, source: Source, *, is_idle: bool) -> float:
        is_home = source is self._source(self._order[0])
        return rule.longest_pause_seconds(len(self._order), is_home=is_home and not is_idle)

    def _pause(
        self,
        empty: list[Source],
        unanswered: Mapping[Source, errors.FleetError],
        *,
        is_idle: bool,
        is_outage: bool,
    ) -> None:
        # A shard that is throttled is asked again soon; one without a token, after a minute.
        refused = {
            source: error
            for source, error in unanswered.items()
            if isinstance(error, errors.SetupError)
        }
        empty = [*empty, *(each for each in unanswered if each not in refused)]
        super()._pause(empty, refused, is_idle=is_idle, is_outage=is_outage)
        if self._was_idle and not is_idle:
            # What was just sent is in all of them.
            for source in self._sources.values():
                if source not in empty and not source.is_missing:
                    source.due_at = 0.0
        self._was_idle = is_idle

    def _labelled(
        self, source: Source, messages: list[protocol.AnyMessage]
    ) -> list[protocol.AnyMessage]:
        if source is self._main:
            return messages
        shard = next(n for n, each in enumerate(self._opened) if each is source.queue)
        return [dataclasses.replace(each, queue=self.name, shard=shard) for each in messages]

    def _source_of(self, message: protocol.LeasedMessage) -> Source:
        return self._source(message.shard)
