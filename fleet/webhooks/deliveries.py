"""Delivers events, several at a time, and again later where that fails."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Counter, Gauge

from fleet.webhooks.endpoint import Answer, Endpoint
from fleet.webhooks.events import Event, State, Waiting
from imagefleet import retry

log = logging.getLogger(__name__)

#: Seconds to wait after each failed attempt, by the specification's advice: three days in all.
RETRY_SECONDS = (5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)

#: Seconds after which an event is given up at its next failure.
GIVE_UP_SECONDS = float(sum(RETRY_SECONDS))

#: Requests at the same time.
CONCURRENCY = 8

#: Events that are not delivered yet. With so many, no others are made from the records: the rest
#: waits there, not in memory.
MAX_WAITING = 256

#: So many failed events since the last success mean that the receiver itself is down: the oldest
#: is tried every few minutes, and all of them once it answers.
DOWN_FROM = 3
PROBE_SECONDS = 300.0

#: What failed at the same time is not tried again at the same time.
_JITTER = (1.0, 1.2)


class Deliveries:
    """Delivers the events of *state* that wait, and counts what comes of it."""

    def __init__(self, endpoint: Endpoint, registry: CollectorRegistry, state: State) -> None:
        self._endpoint = endpoint
        self._state = state
        self._attempts = Counter(
            "imagefleet_webhook_attempts",
            "Attempts to deliver an event, by outcome: delivered or failed.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("delivered", "failed"):
            self._attempts.labels(outcome)
        self._given_up = Counter(
            "imagefleet_webhooks_given_up",
            "Events that could not be delivered in three days, and are not tried again.",
            registry=registry,
        )
        Gauge(
            "imagefleet_webhooks_waiting", "Events that are not delivered yet.", registry=registry
        ).set_function(lambda: len(state.waiting))
        self._in_flight: dict[asyncio.Task[Answer], Waiting] = {}
        self._paused_until = 0.0
        self._failing: set[str] = set()
        self._probe_at = 0.0

    @property
    def has_room(self) -> bool:
        return len(self._state.waiting) < MAX_WAITING

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight or due."""
        return not self._in_flight and not self._due()

    def add(self, event: Event) -> None:
        """Takes an event, unless it was delivered or waits."""
        state = self._state
        if event.id not in state.delivered and event.id not in state.waiting:
            state.waiting[event.id] = Waiting(event=event, since=time.time(), due_at=0.0)

    def retry_now(self) -> None:
        """Makes all events due: the receiver may have been mended."""
        for waiting in self._state.waiting.values():
            waiting.due_at = 0.0

    def start_due(self) -> None:
        """Sends the events that have waited long enough, some at a time."""
        now = time.time()
        if len(self._failing) >= DOWN_FROM and now >= self._probe_at and self._state.waiting:
            min(self._state.waiting.values(), key=lambda each: each.since).due_at = 0.0
            self._probe_at = now + retry.jitter(PROBE_SECONDS, *_JITTER)
        for each in self._due()[: CONCURRENCY - len(self._in_flight)]:
            task = asyncio.create_task(self._endpoint.send(each.event), name=each.event.id)
            self._in_flight[task] = each

    async def wait(self, seconds: float) -> None:
        """Waits until an attempt ends, and for some seconds at most."""
        if not self._in_flight:
            await asyncio.sleep(seconds)
            return
        done, _ = await asyncio.wait(
            self._in_flight, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        self._settle(done)

    async def finish(self, seconds: float) -> None:
        """Waits for the attempts in flight; what does not end in time will be sent again."""
        if self._in_flight:
            done, late = await asyncio.wait(self._in_flight, timeout=seconds)
            self._settle(done)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _due(self) -> list[Waiting]:
        now = time.time()
        if self._state.gone_at is not None or now < self._paused_until:
            return []
        busy = {each.event.id for each in self._in_flight.values()}
        due = (each for each in self._state.waiting.values() if each.due_at <= now)
        return [each for each in due if each.event.id not in busy]

    def _settle(self, done: set[asyncio.Task[Answer]]) -> None:
        for task in done:
            each, answer = self._in_flight.pop(task), task.result()
            if answer.pause_seconds:
                until = time.time() + retry.jitter(answer.pause_seconds, *_JITTER)
                self._paused_until = max(self._paused_until, until)
            if answer.failure is None:
                self._succeeded(each)
            else:
                self._failed(each, answer, answer.failure)

    def _succeeded(self, each: Waiting) -> None:
        event = each.event
        self._attempts.labels("delivered").inc()
        del self._state.waiting[event.id]
        self._state.delivered.add(event.id)
        if len(self._failing) >= DOWN_FROM:
            log.info("%s answers again", self._endpoint.address, extra={"action": "recovered"})
            self.retry_now()
        self._failing.clear()
        log.info(
            "delivered %s of %s",
            event.type,
            _subject(event),
            extra={"action": "webhook_delivered", "webhook_id": event.id},
        )

    def _failed(self, each: Waiting, answer: Answer, reason: str) -> None:
        event, now = each.event, time.time()
        self._attempts.labels("failed").inc()
        if not self._failing:
            self._probe_at = now + retry.jitter(PROBE_SECONDS, *_JITTER)
        self._failing.add(event.id)
        if answer.is_gone:
            self._state.gone_at = datetime.now(UTC)
        each.attempts += 1
        extra = {"action": "webhook_failed", "webhook_id": event.id, "attempts": each.attempts}
        if now - each.since >= GIVE_UP_SECONDS and not answer.is_gone:
            del self._state.waiting[event.id]
            self._state.delivered.add(event.id)
            self._given_up.inc()
            log.error(
                "%s of %s is given up after %d attempts: %s",
                event.type,
                _subject(event),
                each.attempts,
                reason,
                extra=extra | {"action": "webhook_given_up"},
            )
            return
        seconds = retry.jitter(RETRY_SECONDS[min(each.attempts, len(RETRY_SECONDS)) - 1], *_JITTER)
        each.due_at = now + max(seconds, answer.pause_seconds)
        log.warning(
            "%s of %s is not delivered, attempt %d: %s; the next follows in %.0f s",
            event.type,
            _subject(event),
            each.attempts,
            reason,
            each.due_at - now,
            extra=extra,
        )


def _subject(event: Event) -> str:
    parts = (event.data.get(name) for name in ("campaign", "id"))
    return "/".join(str(each) for each in parts if each is not None)
