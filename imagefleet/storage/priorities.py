"""Job queues of several priorities and models as one, drained by priority, which starves none."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

from imagefleet import concurrency, errors
from imagefleet.storage import protocol
from imagefleet.storage.combined import rule
from imagefleet.storage.combined.queue import CombinedQueue, Source, total
from imagefleet.storage.combined.shards import ShardedQueue

#: One of so many receives that return jobs asks the lower queues first.
FAIR_EVERY = 8

#: The longest pauses of a queue that is empty: short where other queues have jobs, since a job of
#: high priority may arrive, long where none has any. For three queues an idle worker makes some
#: 23,000 receives a day, half of them for these pauses: 0.1 cents.
LONGEST_PAUSE_SECONDS = 2.0
LONGEST_IDLE_PAUSE_SECONDS = 10.0


class OrderedQueues(CombinedQueue):
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
        sources = {queue.name: Source(queue, level) for level, queue in enumerate(queues)}
        super().__init__(sources[main.name], [], clock)
        self._sources = sources
        self._find_more = find_more
        self._wanted: frozenset[str | None] | None = None

    def add(self, model: str, queues: Sequence[protocol.JobQueue]) -> None:
        """The queues of a model's jobs as well, by priority."""
        for level, queue in enumerate(queues):
            self._sources.setdefault(queue.name, Source(queue, level, model))

    def remove(self, model: str) -> None:
        """The queues of a model no more, of which no message may be in flight."""
        self._sources = {name: each for name, each in self._sources.items() if each.model != model}

    def receive_only(self, models: Collection[str | None]) -> None:
        """Has `receive` take only jobs of these *models*; None: those without a model."""
        self._wanted = frozenset(models)

    def look_seconds(self, seconds: float) -> float:
        """Seconds between two looks at the sizes; *seconds* where all queues have one shard."""
        sharded = (each.queue for each in self._sources.values())
        shards = max((each.shards for each in sharded if isinstance(each, ShardedQueue)), default=1)
        return rule.look_seconds(seconds, shards)

    async def depth_of(self, models: Collection[str | None]) -> protocol.QueueDepth:
        """The size of the queues of some models."""
        chosen = [each for each in self._sources.values() if each.model in models]
        found = await concurrency.gather(*(self._depth(each) for each in chosen))
        return total(
            {
                source.queue.name: depth
                for source, depth in zip(chosen, found, strict=True)
                if depth is not None
            }
        )

    async def send(self, bodies: Iterable[str]) -> None:
        await self._main.queue.send(bodies)

    async def _find(self) -> None:
        if self._find_more is not None:
            await self._find_more()

    def _in_turn(self) -> list[Source]:
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

    def _is_main(self, source: Source) -> bool:
        """Whether it is asked each time: the queue of normal priority of a model, or of none."""
        is_normal = source.level == self._main.level and not source.is_missing
        return source is self._main or is_normal

    def _longest_pause(self, _source: Source, *, is_idle: bool) -> float:
        return LONGEST_IDLE_PAUSE_SECONDS if is_idle else LONGEST_PAUSE_SECONDS

    def _pause(
        self,
        empty: list[Source],
        unanswered: Mapping[Source, errors.FleetError],
        *,
        is_idle: bool,
        is_outage: bool,
    ) -> None:
        super()._pause(empty, unanswered, is_idle=is_idle, is_outage=is_outage)
        if not is_idle:
            now = self._clock()
            for source in self._others():
                if not source.is_missing:
                    source.due_at = min(source.due_at, now + LONGEST_PAUSE_SECONDS)
