"""Job queues of several priorities, models and shards as one: each receive asks plain queues.

They are drained by priority, so that none starves, and asked less often while they are empty.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
)

from imagefleet import concurrency, errors
from imagefleet.storage import protocol
from imagefleet.storage.routing import route as rule
from imagefleet.storage.routing.route import Route, Shard

FindMore = Callable[[], Awaitable[None]]

Answers = dict[Shard, int | errors.FleetError]
"""What plain queues answered in a receive: how many messages they had, or an error."""


class RoutedQueue:
    """Routes drained as one queue. Messages are sent to the *main* one, and only that must exist.

    A message stays in its queue when it is handed back. Routes of one priority, of several models,
    take turns.
    """

    def __init__(
        self,
        routes: list[Route],
        main: Route | None = None,
        *,
        find_more: FindMore | None = None,
    ) -> None:
        """*find_more* calls `add` for other models' queues, before all queues are looked at."""
        self.main = main or routes[0]
        self.routes = {route.name: route for route in routes}
        self._find_more = find_more
        self._wanted: frozenset[str | None] | None = None
        self._receives = 0  # that returned messages

    @property
    def name(self) -> str:
        return self.main.name

    def add(self, queues: Iterable[RoutedQueue]) -> None:
        """Drains the routes of other queues as well, those of a model's jobs."""
        for queue in queues:
            self.routes = (
                self.routes | queue.routes
            )  # a new one: others may go through the old

    def remove(self, model: str) -> None:
        """The queues of a model no more, of which no message may be in flight."""
        self.routes = {
            name: each for name, each in self.routes.items() if each.model != model
        }

    def receive_only(self, models: Collection[str | None]) -> None:
        """Has `receive` take only jobs of these *models*; None: those without a model."""
        self._wanted = frozenset(models)

    def look_seconds(self, seconds: float) -> float:
        """Seconds between two looks at the sizes; *seconds* where all queues have one shard."""
        shards = max(len(each.order) for each in self.routes.values())
        return seconds * min(shards, rule.MOST_SELDOM)

    async def check(self) -> None:
        await self.main.first.check()
        for route in self.routes.values():
            if route is self.main or await self._exists(route.shard(0)):
                route.notice()
                for number in filter(None, route.order):
                    await self._exists(route.shard(number))

    async def _exists(self, shard: Shard) -> bool:
        try:
            await shard.queue.check()
        except errors.MissingResourceError as error:
            shard.set_missing(error)
            return False
        return True

    async def send(self, bodies: Iterable[str]) -> None:
        await self.main.send(bodies)

    async def receive(
        self, max_messages: int, lease_seconds: float
    ) -> list[protocol.LeasedMessage]:
        received: list[protocol.LeasedMessage] = []
        answers: Answers = {}
        async for shard in self._in_turn(answers):
            try:
                messages = await shard.queue.receive(
                    max_messages - len(received), lease_seconds
                )
            except (errors.SetupError, errors.TransientError) as error:
                must_exist = shard is self.main.shard(0) and isinstance(
                    error, errors.SetupError
                )
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
        outages = (
            each for each in answers.values() if isinstance(each, errors.TransientError)
        )
        if not received and (outage := next(outages, None)) is not None:
            raise outage
        return received

    async def renew(
        self,
        message: protocol.LeasedMessage,
        lease_seconds: float,
        body: str | None = None,
    ) -> protocol.LeasedMessage:
        shard = self._shard_of(message)
        return shard.labelled(await shard.queue.renew(message, lease_seconds, body))

    async def release(
        self,
        message: protocol.LeasedMessage,
        delay_seconds: float = 0,
        body: str | None = None,
    ) -> None:
        shard = self._shard_of(message)
        await shard.queue.release(message, delay_seconds, body)
        shard.due_at = min(shard.due_at, self.main.clock() + delay_seconds)

    async def delete(self, message: protocol.LeasedMessage) -> None:
        await self._shard_of(message).queue.delete(message)

    async def browse(self) -> AsyncIterator[protocol.Message]:
        async for shard in self._all():
            with self._main_must_exist(shard):
                async for message in shard.queue.browse():
                    yield shard.labelled(message)

    @property
    def finds_all(self) -> bool:
        return all(route.first.finds_all for route in self.routes.values())

    async def find(self, text: str) -> AsyncIterator[tuple[protocol.Message, bool]]:
        async for shard in self._all():
            with self._main_must_exist(shard):
                async for message, is_leased in shard.queue.find(text):
                    yield shard.labelled(message), is_leased

    async def clear(self) -> None:
        async for shard in self._all():
            with self._main_must_exist(shard):
                await shard.queue.clear()

    async def depth(self) -> protocol.QueueDepth:
        # The main queue alone at first: without access there is none to the others either.
        found = await self._depths([self.main])
        if self._find_more is not None:
            await self._find_more()
        found |= await self._depths(
            each for each in self.routes.values() if each is not self.main
        )
        if len(self.routes) == 1:
            return found[self.main.name]
        return total({name: found[name] for name in self.routes if name in found})

    async def depth_of(self, models: Collection[str | None]) -> protocol.QueueDepth:
        """The size of the queues of some models."""
        chosen = (each for each in self.routes.values() if each.model in models)
        return total(await self._depths(chosen))

    async def _all(self) -> AsyncIterator[Shard]:
        """Every plain queue there is, after a look for others."""
        if self._find_more is not None:
            await self._find_more()
        for route in list(self.routes.values()):
            for shard in await route.found():
                yield shard

    async def _in_turn(self, answers: Answers) -> AsyncIterator[Shard]:
        """The plain queues to ask now, in this order; notes those that do not answer."""
        # Of one priority, first the queue that has waited longest.
        in_turn = sorted(
            (
                e
                for e in self.routes.values()
                if self._wanted is None or e.model in self._wanted
            ),
            key=lambda route: (route.level, route.last_receive),
        )
        if self._receives % rule.FAIR_EVERY == rule.FAIR_EVERY - 1:
            # With two that are never empty above it, the lowest would get nothing from the turns of
            # the lower queues.
            in_turn.sort(key=lambda route: (route.level == 0, route.last_receive))
        for route in in_turn:
            # Asked each time: the queue of normal priority of a model, or of none.
            is_normal = route.level == self.main.level and not route.shard(0).is_missing
            always = route is self.main or is_normal
            if not route.in_turn(always=always):
                continue
            try:
                await route.found()
            except errors.TransientError as error:
                answers[route.shard(0)] = error
                continue
            for shard in route.in_turn(always=always):
                yield shard

    def _pause(self, answers: Answers, *, is_idle: bool) -> None:
        """Sets when each queue is asked again, by what it answered: messages, none or an error."""
        now = self.main.clock()
        is_outage = isinstance(
            answers.get(self.main.shard(0)), errors.FleetError
        ) or all(isinstance(answer, errors.FleetError) for answer in answers.values())
        for shard, answer in answers.items():
            if not isinstance(answer, errors.FleetError):
                shard.is_missing = False
            # After an outage of all none must wait for long, nor a shard that is throttled.
            elif not is_outage and (
                len(shard.of.order) == 1 or isinstance(answer, errors.SetupError)
            ):
                shard.set_missing(answer)
                continue
            if isinstance(answer, int) and answer:
                shard.empty_receives, shard.due_at = 0, 0.0
                continue
            shard.due_at = now + rule.pause_seconds(shard, is_idle=is_idle)
            shard.empty_receives += 1
        for route in {shard.of for shard in answers}:
            route.note(answers, self._receives)
        if not is_idle:
            for route in self.routes.values():
                home = route.shard(route.order[0])
                if not home.is_missing:
                    home.due_at = min(
                        home.due_at, now + rule.LONGEST_HOME_PAUSE_SECONDS
                    )

    async def _depths(self, routes: Iterable[Route]) -> dict[str, protocol.QueueDepth]:
        """The sizes of the routes' queues, of those that are not missing."""
        chosen = list(routes)
        depths = await concurrency.gather(*map(self._depth, chosen))
        return {
            route.name: depth
            for route, depth in zip(chosen, depths, strict=True)
            if depth
        }

    async def _depth(self, route: Route) -> protocol.QueueDepth | None:
        """The size of a route's queue, with those of its shards if there are several."""
        first = await route.shard(0).depth(must_exist=route is self.main)
        if first is None:
            return None
        route.notice()
        others = [shard for shard in await route.found() if shard.number]
        depths = await concurrency.gather(*(shard.depth() for shard in others))
        found = {
            s.queue.name: depth
            for s, depth in zip(others, depths, strict=True)
            if depth
        }
        depth = total({route.name: first, **found}) if found else first
        return dataclasses.replace(depth, model=route.model)

    @contextlib.contextmanager
    def _main_must_exist(self, shard: Shard) -> Iterator[None]:
        """Any other queue may be missing."""
        try:
            yield
        except errors.SetupError as error:
            if shard is self.main.shard(0):
                raise
            shard.set_missing(error)

    def _shard_of(self, message: protocol.LeasedMessage) -> Shard:
        return self.routes.get(message.queue, self.main).shard(message.shard)


def total(depths: dict[str, protocol.QueueDepth]) -> protocol.QueueDepth:
    """The size of several queues as one."""
    leased = [each.leased for each in depths.values() if each.leased is not None]
    ages = [
        age for each in depths.values() if (age := each.oldest_age_seconds) is not None
    ]
    return protocol.QueueDepth(
        sum(each.messages for each in depths.values()),
        sum(leased) if len(leased) == len(depths) else None,
        max(ages, default=None),
        depths,
    )
