"""Job queues of several priorities and models as one: each receive asks plain queues.

They are drained by priority, so that none starves, and asked less often while they are empty.
"""

import contextlib
import math
import time
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import replace

from imagefleet import concurrency
from imagefleet.errors import (
    MissingResourceError,
    SetupError,
    TransientError,
)
from imagefleet.storage import bundle
from imagefleet.storage.protocol import (
    FoundMessages,
    LeasedMessage,
    QueueDepth,
    StoredQueue,
)
from imagefleet.storage.routing import route as rule
from imagefleet.storage.routing.route import Route
from imagefleet.storage.settings import PRIORITIES, Priority

FindMore = Callable[[], Awaitable[None]]

#: The queues of one model's jobs, or of those without one, by priority.
Queues = Mapping[Priority, StoredQueue]


class RoutedQueue:
    """Queues drained as one. Messages are sent to the *main* one, and only that must exist.

    A message stays in its queue when it is handed back. Queues of one priority, of several models,
    take turns.
    """

    def __init__(
        self,
        queues: Queues,
        *,
        find_more: FindMore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*queues* are those of jobs without a model; the one of normal priority is the main one.

        *find_more* calls `add` for other models' queues, before all queues are looked at.
        """
        self.clock = clock
        self.routes: dict[str, Route] = {}
        self.add(None, queues)
        self.main = self.routes[queues["normal"].name]
        self._find_more = find_more
        self._wanted: frozenset[str | None] | None = None
        self._receives = 0  # that returned messages

    @property
    def name(self) -> str:
        return self.main.queue.name

    def add(self, model: str | None, queues: Queues) -> None:
        """Drains the queues of a model's jobs as well, if it does not yet."""
        routes = dict(self.routes)  # a new one: others may go through the old
        for priority, queue in queues.items():
            level = PRIORITIES.index(priority)
            routes.setdefault(queue.name, Route(queue, level, model, self.clock))
        self.routes = routes

    def remove(self, model: str) -> None:
        """Stops draining a model's queues; none of their messages may be in flight."""
        self.routes = {
            name: route for name, route in self.routes.items() if route.model != model
        }

    def receive_only(self, models: Collection[str | None]) -> None:
        """Limits `receive` to jobs of these *models*; None: those without a model."""
        self._wanted = frozenset(models)

    async def check(self) -> None:
        await self.main.queue.check()
        for route in self.routes.values():
            if route is self.main:
                continue
            try:
                await route.queue.check()
            except MissingResourceError as error:
                route.set_missing(error)

    async def send(self, bodies: Iterable[str]) -> list[LeasedMessage]:
        return await self.main.queue.send(bodies)

    def level_of(self, message: LeasedMessage) -> int:
        """Rank of the priority of a message's queue; 0 is the highest."""
        return self._route_of(message).level

    def seconds_until_due(self, above: int) -> float:
        """Until a `receive` of that kind asks a queue; infinity where there is none above."""
        dues = [
            route.due_at
            for route in self.routes.values()
            if route.level < above and self._is_wanted(route)
        ]
        return max(0.0, min(dues, default=math.inf) - self.clock())

    async def receive(
        self, max_messages: int, lease_seconds: float, above: int | None = None
    ) -> list[LeasedMessage]:
        """See `protocol.JobQueue`.

        *above*: jobs of priorities above that level alone, for a worker that has enough to do;
        queues that were empty are asked as seldom as beside others that have jobs.
        """
        received: list[LeasedMessage] = []
        failures = {}
        empty = []
        for route in self._in_turn(above):
            try:
                messages = await route.queue.receive(
                    max_messages - len(received), lease_seconds
                )
            except (SetupError, TransientError) as error:
                is_fatal = route is self.main and isinstance(error, SetupError)
                if is_fatal and not received:
                    raise
                failures[route] = error
                continue
            route.is_missing = False
            if messages:
                route.empty_receives = 0
                route.due_at = 0.0
                route.last_receive = self._receives + 1
                received += messages
            else:
                empty.append(route)
            if len(received) == max_messages:
                break
        # After an outage none must wait for long. A queue that is not there is none.
        is_outage = self.main in failures or not (received or empty)
        for route, failure in failures.items():
            if is_outage and isinstance(failure, TransientError):
                empty.append(route)
            else:
                route.set_missing(failure)
        self._receives += bool(received)
        self._pause(empty, is_idle=not received and above is None)
        for failure in failures.values():
            if not received and isinstance(failure, TransientError):
                raise failure
        return received

    async def renew(
        self,
        message: LeasedMessage,
        lease_seconds: float,
        body: str | None = None,
    ) -> LeasedMessage:
        return await self._route_of(message).queue.renew(message, lease_seconds, body)

    async def release(
        self,
        message: LeasedMessage,
        delay_seconds: float = 0,
        body: str | None = None,
    ) -> None:
        route = self._route_of(message)
        await route.queue.release(message, delay_seconds, body)
        route.due_at = min(route.due_at, self.clock() + delay_seconds)

    async def delete(self, message: LeasedMessage) -> None:
        await self._route_of(message).queue.delete(message)

    @property
    def is_local(self) -> bool:
        return all(route.queue.is_local for route in self.routes.values())

    async def find(self, text: str) -> FoundMessages:
        for route in await self._all():
            with self._main_must_exist(route):
                async for message, is_leased in route.queue.find(text):
                    for body in bundle.messages_of(message.body):
                        if text in body or text not in message.body:
                            yield replace(message, body=body), is_leased

    async def clear(self) -> None:
        for route in await self._all():
            with self._main_must_exist(route):
                await route.queue.clear()

    async def depth(self) -> QueueDepth:
        # The main queue alone at first: without access there is none to the others either.
        main = await self.main.depth(must_exist=True)
        routes = await self._all()
        others = [route for route in routes if route is not self.main]
        found = await concurrency.gather(*(route.depth() for route in others))
        depths = dict(zip(others, found, strict=True)) | {self.main: main}
        return _total({route: depths[route] for route in routes})

    async def depth_of(self, models: Collection[str | None]) -> QueueDepth:
        """The size of the queues of some models."""
        routes = [route for route in self.routes.values() if route.model in models]
        found = await concurrency.gather(
            *(route.depth(must_exist=route is self.main) for route in routes)
        )
        return _total(dict(zip(routes, found, strict=True)))

    async def _all(self) -> list[Route]:
        """Every plain queue there is, after a look for others."""
        if self._find_more is not None:
            await self._find_more()
        return list(self.routes.values())

    def _is_wanted(self, route: Route) -> bool:
        return self._wanted is None or route.model in self._wanted

    def _in_turn(self, above: int | None) -> list[Route]:
        """The plain queues to ask now, in this order; those of normal priority are each time."""
        now = self.clock()
        main = self.main
        due = []
        for route in self.routes.values():
            is_normal = route.level == main.level and not route.is_missing
            is_due = route.due_at <= now
            if above is not None:
                is_due = is_due and route.level < above
            elif route is main or is_normal:
                is_due = True
            if is_due and self._is_wanted(route):
                due.append(route)
        # Of one priority, first the queue that has waited longest. With two that are never empty
        # above it, the lowest would get nothing from the turns of the lower queues.
        is_fair = self._receives % rule.FAIR_EVERY == rule.FAIR_EVERY - 1
        by_level = above is not None or not is_fair
        return sorted(
            due,
            key=lambda route: (
                route.level if by_level else route.level == 0,
                route.last_receive,
                route.level,
            ),
        )

    def _pause(self, empty: Iterable[Route], *, is_idle: bool) -> None:
        """Sets when queues without messages are asked again."""
        longest = rule.LONGEST_PAUSE_SECONDS
        if is_idle:
            longest = rule.LONGEST_IDLE_PAUSE_SECONDS
        latest = self.clock() + longest
        for route in empty:
            pause = rule.FIRST_PAUSE_SECONDS * 2.0 ** min(route.empty_receives, 30)
            if route.queue.is_local:
                pause = rule.LOCAL_PAUSE_SECONDS
            route.due_at = min(self.clock() + pause, latest)
            route.empty_receives += 1
        for route in self.routes.values():
            if not (is_idle or route.is_missing):
                route.due_at = min(route.due_at, latest)

    @contextlib.contextmanager
    def _main_must_exist(self, route: Route) -> Iterator[None]:
        """Any other queue may be missing."""
        try:
            yield
        except SetupError as error:
            if route is self.main:
                raise
            route.set_missing(error)

    def _route_of(self, message: LeasedMessage) -> Route:
        return self.routes.get(message.queue, self.main)


def _total(
    found: Mapping[Route, QueueDepth | None],
) -> QueueDepth:
    """The size of several queues as one, without those that are missing."""
    depths = {route.queue.name: depth for route, depth in found.items() if depth}
    leased = [depth.leased for depth in depths.values() if depth.leased is not None]
    ages = [
        depth.oldest_age_seconds
        for depth in depths.values()
        if depth.oldest_age_seconds is not None
    ]
    return QueueDepth(
        sum(depth.messages for depth in depths.values()),
        sum(leased) if len(leased) == len(depths) else None,
        max(ages, default=None),
        depths,
    )
