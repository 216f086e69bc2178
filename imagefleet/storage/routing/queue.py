"""Job queues of several priorities, models and shards as one: each receive asks plain queues.

They are drained by priority, so that none starves, and asked less often while they are empty.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)

from imagefleet import concurrency, errors
from imagefleet.storage import protocol
from imagefleet.storage.routing import route as routes
from imagefleet.storage.routing.route import PolledRoute, PolledShard, Route


class RoutedQueue:
    """Routes drained as one queue. Messages are sent to the *main* one, and only that must exist.

    A message stays in its queue when it is handed back. Routes of one priority, of several models,
    take turns.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        main: Route | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        find_more: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """*main* None is the first one.

        *find_more* calls `add` for other models' queues, before all queues are looked at.
        """
        self._polled = {route.name: PolledRoute(route) for route in routes}
        self._main = self._polled[(main or routes[0]).name]
        self._clock = clock
        self._find_more = find_more
        self._wanted: frozenset[str | None] | None = None
        self._receives = 0  # that returned messages

    @property
    def name(self) -> str:
        return self._main.route.name

    @property
    def main(self) -> Route:
        return self._main.route

    @property
    def routes(self) -> list[Route]:
        return [polled.route for polled in self._polled.values()]

    def add(self, queues: Iterable[RoutedQueue]) -> None:
        """Drains the routes of other queues as well, those of a model's jobs."""
        for queue in queues:
            for route in queue.routes:
                self._polled.setdefault(route.name, PolledRoute(route))

    def remove(self, model: str) -> None:
        """The queues of a model no more, of which no message may be in flight."""
        self._polled = {
            name: polled for name, polled in self._polled.items() if polled.route.model != model
        }

    def receive_only(self, models: Collection[str | None]) -> None:
        """Has `receive` take only jobs of these *models*; None: those without a model."""
        self._wanted = frozenset(models)

    def look_seconds(self, seconds: float) -> float:
        """Seconds between two looks at the sizes; *seconds* where all queues have one shard."""
        return routes.look_seconds(seconds, max(len(route.order) for route in self.routes))

    async def check(self) -> None:
        await self._main.route.first.check()
        for polled in self._polled.values():
            if polled is self._main or await self._exists(polled.shard(0)):
                polled.route.notice()
                for number in polled.route.order:
                    if number:
                        await self._exists(polled.shard(number))

    async def _exists(self, shard: PolledShard) -> bool:
        try:
            await shard.queue.check()
        except errors.MissingResourceError as error:
            self._set_missing(shard, error)
            return False
        return True

    async def send(self, bodies: Iterable[str]) -> None:
        await self._main.route.send(bodies)

    async def receive(
        self, max_messages: int, lease_seconds: float
    ) -> list[protocol.LeasedMessage]:
        protocol.check_receive(max_messages, lease_seconds)
        received: list[protocol.LeasedMessage] = []
        answers: dict[PolledShard, int | errors.FleetError] = {}
        async for shard in self._in_turn(answers):
            try:
                messages = await shard.queue.receive(max_messages - len(received), lease_seconds)
            except (errors.SetupError, errors.TransientError) as error:
                must_exist = shard is self._main.shard(0) and isinstance(error, errors.SetupError)
                if must_exist and not received:
                    raise
                answers[shard] = error
                continue
            answers[shard] = len(messages)
            received += map(shard.labelled, messages)
            if len(received) == max_messages:
                break
        self._receives += bool(received)
        self._pause(answers, is_idle=not received)
        outages = (each for each in answers.values() if isinstance(each, errors.TransientError))
        if not received and (outage := next(outages, None)) is not None:
            raise outage
        return received

    async def renew(
        self, message: protocol.LeasedMessage, lease_seconds: float, body: str | None = None
    ) -> protocol.LeasedMessage:
        shard = self._shard_of(message)
        return shard.labelled(await shard.queue.renew(message, lease_seconds, body))

    async def release(
        self, message: protocol.LeasedMessage, delay_seconds: float = 0, body: str | None = None
    ) -> None:
        shard = self._shard_of(message)
        await shard.queue.release(message, delay_seconds, body)
        shard.due_at = min(shard.due_at, self._clock() + delay_seconds)

    async def delete(self, message: protocol.LeasedMessage) -> None:
        await self._shard_of(message).queue.delete(message)

    async def browse(self) -> AsyncIterator[protocol.Message]:
        async for shard in self._all():
            with self._main_must_exist(shard):
                async for message in shard.queue.browse():
                    yield shard.labelled(message)

    @property
    def finds_all(self) -> bool:
        return all(route.first.finds_all for route in self.routes)

    async def find(self, text: str) -> AsyncIterator[protocol.FoundMessage]:
        async for shard in self._all():
            with self._main_must_exist(shard):
                async for found in shard.queue.find(text):
                    yield dataclasses.replace(found, message=shard.labelled(found.message))

    async def clear(self) -> None:
        async for shard in self._all():
            with self._main_must_exist(shard):
                await shard.queue.clear()

    async def stamps(self) -> protocol.Stamps:
        return await self._main.route.first.stamps()

    async def depth(self) -> protocol.QueueDepth:
        # The main queue alone at first: without access there is none to the others either.
        found = {self._main: await self._depth(self._main)}
        if self._find_more is not None:
            await self._find_more()
        others = [polled for polled in self._polled.values() if polled is not self._main]
        depths = await concurrency.gather(*(self._depth_if_any(each) for each in others))
        found |= {polled: depth for polled, depth in zip(others, depths, strict=True) if depth}
        if len(self._polled) == 1:
            return found[self._main]
        return total(
            {name: found[polled] for name, polled in self._polled.items() if polled in found}
        )

    async def depth_of(self, models: Collection[str | None]) -> protocol.QueueDepth:
        """The size of the queues of some models."""
        chosen = [each for each in self._polled.values() if each.route.model in models]
        depths = await concurrency.gather(*(self._depth_if_any(each) for each in chosen))
        found = zip(chosen, depths, strict=True)
        return total({polled.route.name: depth for polled, depth in found if depth is not None})

    async def _all(self) -> AsyncIterator[PolledShard]:
        """Every plain queue there is, after a look for others."""
        if self._find_more is not None:
            await self._find_more()
        for polled in list(self._polled.values()):
            for shard in await polled.found():
                yield shard

    async def _in_turn(
        self, answers: dict[PolledShard, int | errors.FleetError]
    ) -> AsyncIterator[PolledShard]:
        """The plain queues to ask now, in this order; notes those that do not answer."""
        wanted = [
            polled
            for polled in self._polled.values()
            if self._wanted is None or polled.route.model in self._wanted
        ]
        # Of one priority, first the queue that has waited longest.
        in_turn = sorted(wanted, key=lambda polled: (polled.route.level, polled.last_receive))
        if self._receives % routes.FAIR_EVERY == routes.FAIR_EVERY - 1:
            # With two that are never empty above it, the lowest would get nothing from the turns of
            # the lower queues.
            in_turn.sort(key=lambda polled: (polled.route.level == 0, polled.last_receive))
        now = self._clock()
        for polled in in_turn:
            always = self._is_always_asked(polled)
            if not polled.in_turn(now, always=always):
                continue
            try:
                await polled.route.find()
            except errors.TransientError as error:
                answers[polled.shard(0)] = error
                continue
            for shard in polled.in_turn(now, always=always):
                yield shard

    def _is_always_asked(self, polled: PolledRoute) -> bool:
        """Whether it is asked each time: the queue of normal priority of a model, or of none."""
        is_normal = polled.route.level == self._main.route.level
        return polled is self._main or (is_normal and not polled.route.is_missing(0))

    def _pause(self, answers: dict[PolledShard, int | errors.FleetError], *, is_idle: bool) -> None:
        """Sets when each queue is asked again, by what it answered: messages, none or an error."""
        now = self._clock()
        is_outage = isinstance(answers.get(self._main.shard(0)), errors.FleetError) or all(
            isinstance(answer, errors.FleetError) for answer in answers.values()
        )
        for shard, answer in answers.items():
            shards = len(shard.of.route.order)
            if not isinstance(answer, errors.FleetError):
                shard.of.route.set_found(shard.number)
            # After an outage of all none must wait for long, nor a shard that is throttled.
            elif not is_outage and (shards == 1 or isinstance(answer, errors.SetupError)):
                self._set_missing(shard, answer)
                continue
            if isinstance(answer, int) and answer:
                shard.empty_receives, shard.due_at = 0, 0.0
                continue
            longest = routes.longest_pause_seconds(shards, is_home=shard.is_home, is_idle=is_idle)
            shard.due_at = now + routes.pause_seconds(shard.empty_receives, longest)
            shard.empty_receives += 1
        for polled in {shard.of for shard in answers}:
            polled.note(answers, self._receives)
        if not is_idle:
            for polled in self._polled.values():
                home = polled.shard(polled.route.order[0])
                if not home.is_missing:
                    home.due_at = min(home.due_at, now + routes.LONGEST_HOME_PAUSE_SECONDS)

    async def _depth_if_any(self, polled: PolledRoute) -> protocol.QueueDepth | None:
        """The size of a route's queue; None if it is missing."""
        try:
            return await self._depth(polled)
        except errors.SetupError as error:
            self._set_missing(polled.shard(0), error)
            return None

    async def _depth(self, polled: PolledRoute) -> protocol.QueueDepth:
        """The size of a route's queue, with those of its shards if there are several."""
        found = {polled.route.name: await self._depth_of_shard(polled.shard(0))}
        polled.route.notice()
        others = [shard for shard in await polled.found() if shard.number]

        async def depth_if_any(shard: PolledShard) -> protocol.QueueDepth | None:
            try:
                return await self._depth_of_shard(shard)
            except errors.SetupError as error:
                self._set_missing(shard, error)
                return None

        depths = await concurrency.gather(*map(depth_if_any, others))
        found |= {s.queue.name: depth for s, depth in zip(others, depths, strict=True) if depth}
        depth = total(found) if len(found) > 1 else found[polled.route.name]
        return dataclasses.replace(depth, model=polled.route.model)

    async def _depth_of_shard(self, shard: PolledShard) -> protocol.QueueDepth:
        depth = await shard.queue.depth()
        shard.of.route.set_found(shard.number)
        if depth.oldest_age_seconds is not None:
            shard.due_at = 0.0  # there is something to receive
        return depth

    @contextlib.contextmanager
    def _main_must_exist(self, shard: PolledShard) -> Iterator[None]:
        """Any other queue may be missing."""
        try:
            yield
        except errors.SetupError as error:
            if shard is self._main.shard(0):
                raise
            self._set_missing(shard, error)

    def _set_missing(self, shard: PolledShard, error: errors.FleetError) -> None:
        shard.due_at = self._clock() + routes.MISSING_PAUSE_SECONDS
        shard.of.route.set_missing(shard.number, error)

    def _shard_of(self, message: protocol.LeasedMessage) -> PolledShard:
        return self._polled.get(message.queue, self._main).shard(message.shard)


def total(depths: dict[str, protocol.QueueDepth]) -> protocol.QueueDepth:
    """The size of several queues as one."""
    leased = [each.leased for each in depths.values() if each.leased is not None]
    ages = [age for each in depths.values() if (age := each.oldest_age_seconds) is not None]
    return protocol.QueueDepth(
        sum(each.messages for each in depths.values()),
        sum(leased) if len(leased) == len(depths) else None,
        max(ages, default=None),
        depths,
    )
