"""The job queue of one priority and model, which is several queues if one has too few messages/s.

How many shards there are is kept with the first one, as metadata: whoever measures or checks that
queue learns it without another request. A queue of one shard is that one, with no request more.

With more shards, jobs sent before stay where they are. With fewer, nothing is sent to the last ones
any more, and workers go on to ask them.

A worker has one home shard, which it asks at every receive; the others it asks when its home has
nothing, and one of them first at one of 8 receives, so that a shard which is nobody's home is
emptied all the same. A shard that was empty is asked again after a pause that doubles.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from imagefleet import concurrency, errors
from imagefleet.job import sizes
from imagefleet.storage import protocol
from imagefleet.storage.protocol import Shards
from imagefleet.storage.settings import MAX_SHARDS
from imagefleet.telemetry import logs

log = logs.EventLog(__name__)

#: One of so many receives that return jobs asks another shard before the home, and one the queues
#: of lower priorities first.
FAIR_EVERY = 8

#: A queue that was empty is asked again after this pause, which doubles up to the longest.
FIRST_PAUSE_SECONDS = 0.5

#: A queue that does not exist, whose token is missing, or that does not answer while the main one
#: does, is asked again after this time.
MISSING_PAUSE_SECONDS = 60.0

#: The longest pauses of a home that is empty: short where other queues have jobs, since a job of
#: high priority may arrive, long where none has any. For three queues an idle worker makes some
#: 23,000 receives a day, half of them for these pauses: 0.1 cents.
LONGEST_HOME_PAUSE_SECONDS = 2.0
LONGEST_IDLE_PAUSE_SECONDS = 10.0

#: The other shards together cost an idle worker as much as its home, asked each 10 seconds, up to
#: a shard's longest pause.
SECONDS_PER_SHARD = 10.0
LONGEST_PAUSE_SECONDS = 120.0

#: Seconds after which whoever sends jobs all the time reads the number of shards again.
SENDERS_LOOK_SECONDS = 60.0

#: Times as long between two looks at the sizes of all shards, at most.
MOST_SELDOM = 5


def in_order(share: float, shards: Shards) -> list[int]:
    """The shards as a worker asks them, its home first; *share*, from 0 to 1, is where it stands.

    The homes are those that jobs are sent to. Each worker has another order of the rest, so that
    those who help do not all go to one shard.
    """
    home = min(int(share * shards.used), shards.used - 1)
    others = [each for each in range(shards.made) if each != home]
    random.Random(share).shuffle(others)  # noqa: S311 - the same for the same worker
    return [home, *others]


def pause_seconds(shard: Shard, *, is_idle: bool) -> float:
    """How long a shard is left alone that was empty once more; *is_idle*: all queues are."""
    longest = min(SECONDS_PER_SHARD * (len(shard.of.order) - 1), LONGEST_PAUSE_SECONDS)
    if shard.number == shard.of.order[0]:
        longest = LONGEST_IDLE_PAUSE_SECONDS if is_idle else LONGEST_HOME_PAUSE_SECONDS
    return min(FIRST_PAUSE_SECONDS * 2.0 ** min(shard.empty_receives, 30), longest)


def spread(bodies: list[str], shards: int, first: int) -> dict[int, list[str]]:
    """Messages by shard, as many to each, beginning with the shard *first*."""
    dealt = {
        (first + number) % shards: bodies[number::shards] for number in range(shards)
    }
    return {shard: some for shard, some in dealt.items() if some}


@dataclass(slots=True, eq=False)
class Shard:
    """One plain queue of a route, and what the receives so far have found there."""

    queue: protocol.StoredQueue
    of: Route
    number: int
    due_at: float = 0.0
    """When it is asked next."""
    empty_receives: int = 0
    last_receive: int = 0
    """The number of the last receive of its route that it had jobs for."""
    is_missing: bool = False
    """Whether it did not exist, had no token or did not answer when it was asked last."""

    def labelled(self, message: protocol.AnyMessage) -> protocol.AnyMessage:
        """A message as callers know it: they settle it by its route's name and its shard."""
        if not self.number:
            return message
        return dataclasses.replace(message, queue=self.of.name, shard=self.number)

    async def depth(self, *, must_exist: bool = False) -> protocol.QueueDepth | None:
        """Its size; None if it is missing, unless it *must_exist*."""
        try:
            depth = await self.queue.depth()
        except errors.SetupError as error:
            if must_exist:
                raise
            # One that is not there, of another fleet's model say, matters to those who take jobs.
            if not isinstance(error, errors.MissingResourceError):
                self.set_missing(error)
            return None
        self.is_missing = False
        if depth.oldest_age_seconds is not None:
            self.due_at = 0.0  # there is something to receive
        return depth

    def set_missing(self, error: errors.FleetError) -> None:
        """Notes that it cannot be asked for a while, and reports it once."""
        self.due_at = self.of.clock() + MISSING_PAUSE_SECONDS
        if self.is_missing:
            return
        self.is_missing = True
        is_usual = isinstance(
            error, errors.MissingResourceError
        )  # made by the next load
        level = logging.INFO if is_usual else logging.WARNING
        text = f"no jobs are taken from the queue {self.queue.name}: {error.message}"
        log.log(level, text, action="queue_missing", queue=self.queue.name)


@dataclass(eq=False)
class Route:
    """The shards of one queue: how many there are, their order for a worker, and what is sent.

    *level* is its priority's, 0 the highest; *model* is that of its jobs. *granted*: the shards of
    tokens which do not allow to read how many there are.
    """

    open_shard: Callable[[int], protocol.StoredQueue]
    granted: Callable[[], int] = lambda: 1
    level: int = 0
    model: str | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.order = [0]
        """The shards as this worker asks them, its home first."""
        self.last_receive = 0
        """The number of the last receive of all queues that it had jobs for."""
        self._receives = 0  # that returned its messages
        self._was_empty = True  # when it was asked last
        self._opened: list[Shard] = []
        self._shards: Shards | None = None
        self._found_at = 0.0
        self._finding = asyncio.Lock()
        self._share = random.random()  # noqa: S311 - replaced by a worker's own
        self._next_sent = random.randrange(MAX_SHARDS)  # noqa: S311 - few jobs, many senders

    @property
    def name(self) -> str:
        return self.first.name

    @property
    def first(self) -> protocol.StoredQueue:
        return self.shard(0).queue

    def shard(self, number: int) -> Shard:
        for new in range(len(self._opened), number + 1):
            self._opened.append(Shard(self.open_shard(new), self, new))
        return self._opened[number]

    def stand_at(self, share: float) -> None:
        """Sets the home and the order by `in_order`."""
        self._share = share
        self.order = in_order(share, self._shards or Shards())

    async def create(self) -> bool:
        """Creates the first shard, as `StoredQueue.create`; `set_shards` makes the others."""
        created = await self.first.create()
        self.notice()
        if created:
            self.shard(0).is_missing, self.shard(0).due_at = False, 0.0
        return created

    async def set_shards(self, shards: int) -> None:
        """Sets to how many shards jobs are sent; makes those missing, or raises SetupError."""
        known = await self.first.read_shards()
        made = max(shards, known.made)
        if (shards, made) == known:
            self._adopt(known)
            return
        for number in range(1, made):
            if not await self.shard(number).queue.create():
                raise errors.SetupError(
                    f"the shards of the queue {self.name!r} cannot be made with these credentials:"
                    " it takes the account's key"
                )
        # The last step: nobody must send to a queue that does not exist yet.
        await self.first.record_shards(Shards(shards, made))
        self.notice()

    async def found(self) -> list[Shard]:
        """Its shards, as far as it is known which there are; asks for that once."""
        async with (
            self._finding
        ):  # a hundred jobs that are sent at the same time ask once
            if self._shards is None:
                try:
                    self._adopt(await self.first.read_shards())
                except errors.MissingResourceError:
                    pass  # what is asked of it now says so
                except errors.SetupError:
                    self._adopt(Shards(self.granted(), self.granted()))
        return [self.shard(number) for number in range(len(self.order))]

    def notice(self) -> None:
        """Takes the number of shards from the first one's last answer."""
        if self.first.shards is not None:
            self._adopt(self.first.shards)

    async def sent_to(self) -> int:
        """The number of shards that jobs are sent to; who sends for hours finds a new one out."""
        await self.found()
        can_read = self.first.shards is not None
        if can_read and self.clock() - self._found_at >= SENDERS_LOOK_SECONDS:
            self._found_at = self.clock()
            with contextlib.suppress(errors.SetupError, errors.TransientError):
                self._adopt(await self.first.read_shards())
        return self._shards.used if self._shards else 1

    async def send(self, bodies: Iterable[str]) -> None:
        """Adds messages to the shards in turn."""
        shards = await self.sent_to()
        if shards == 1:
            await self.first.send(bodies)
            return
        messages = sizes.checked_messages(bodies)
        dealt = spread(messages, shards, self._next_sent % shards)
        self._next_sent += len(messages)
        await concurrency.gather(*(self._send(*each) for each in dealt.items()))

    async def _send(self, number: int, bodies: list[str]) -> None:
        try:
            await self.shard(number).queue.send(bodies)
        except errors.MissingResourceError as error:
            if not number:
                raise
            self.shard(number).set_missing(error)
            await self.first.send(bodies)

    def note(
        self, answers: Mapping[Shard, int | errors.FleetError], receive: int
    ) -> None:
        """Notes what its shards answered in a *receive*, the number of those with messages."""
        counts = {
            shard: answer
            for shard, answer in answers.items()
            if isinstance(answer, int)
        }
        found = [shard for shard in self._opened if counts.get(shard)]
        if found:
            self._receives += 1
            self.last_receive = receive
        for shard in found:
            shard.last_receive = self._receives
        if found and self._was_empty:  # what was just sent is in all of them
            for shard in self._opened:
                if shard not in answers and not shard.is_missing:
                    shard.due_at = 0.0
        self._was_empty = not found

    def in_turn(self, *, always: bool) -> list[Shard]:
        """The shards to ask now; *always*: its home each time while it has nothing."""
        home, *others = (self.shard(number) for number in self.order)
        due = [shard for shard in others if shard.due_at <= self.clock()]
        if due and self._receives % FAIR_EVERY == FAIR_EVERY - 1:
            longest = min(due, key=lambda shard: shard.last_receive)
            return [longest, home, *(shard for shard in due if shard is not longest)]
        asks_home = home.due_at <= self.clock() or (
            always and (self._was_empty or not due)
        )
        return [home, *due] if asks_home else due

    def _adopt(self, shards: Shards) -> None:
        self._found_at = self.clock()
        if shards == self._shards:
            return
        if self._shards is not None or shards.made > 1:
            text = f"the queue {self.name} has {shards.used} shards"
            log.info(text, action="shards", queue=self.name, shards=shards.used)
        self._shards = shards
        self.order = in_order(self._share, shards)
