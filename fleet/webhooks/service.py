"""Delivers events, several at a time, and again later where that fails."""

import asyncio
import itertools
import logging
import time
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge

from cli import console
from fleet.webhooks.endpoint import Answer, Endpoint
from fleet.webhooks.events import Event, Source
from imagefleet import concurrency
from imagefleet.errors import SetupError, TransientError
from imagefleet.telemetry.logs import log

#: Seconds to wait after each failed attempt, by the specification's advice: three days in all.
RETRY_SECONDS = (5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)

#: Seconds after which an event is given up at its next failure.
GIVE_UP_SECONDS = float(sum(RETRY_SECONDS))

CONCURRENCY = 8

#: With so many events that wait, no more records are read: the rest waits there, not in memory.
MAX_WAITING = 256

#: What failed at the same time is not tried again at the same time.
_JITTER = (1.0, 1.2)

#: Seconds between two looks for new records, which cost a listing of the shards each.
POLL_SECONDS = 10.0

#: Seconds between two saves of the state: a service that is killed repeats what it sent since.
SAVE_SECONDS = 5.0

#: Seconds for the requests in flight when the service is stopped.
DRAIN_SECONDS = 10.0

#: The pause of the loop when nothing is due.
_STEP_SECONDS = 1.0


class Service:
    """Delivers what *source* tells, until it is cancelled or all that is new is sent."""

    def __init__(
        self,
        source: Source,
        endpoint: Endpoint,
        registry: CollectorRegistry,
        state_file: Path,
    ) -> None:
        self._source = source
        self._state = state = source.state
        self._endpoint = endpoint
        self._state_file = state_file
        self._saved = ""
        #: The receiver wants no more webhooks.
        self._is_gone = False
        self._poll_at = self._paused_until = 0.0
        self._save_at = time.monotonic() + SAVE_SECONDS
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
            "imagefleet_webhooks_waiting",
            "Events that are not delivered yet.",
            registry=registry,
        ).set_function(lambda: len(state.waiting))

    async def run(self, *, once: bool = False) -> None:
        """Runs; the state is saved at the end, however that comes.

        Raises:
            SetupError: the receiver wants no more webhooks, or the state cannot be saved.
            TransientError: *once*, and the storage or the receiver does not answer.
        """
        state = self._state
        for event in state.waiting.values():
            event.due_at = 0.0  # the receiver may have been mended
        try:
            while not self._is_gone:
                await self._fill(once=once)
                if due := self._due():
                    await self._send(due)
                elif once:
                    break
                else:
                    await asyncio.sleep(_STEP_SECONDS)
                if time.monotonic() >= self._save_at:
                    self._save()
        finally:
            self._save()
        if self._is_gone:
            raise SetupError(
                f"{state.address} answered 410 Gone: it wants no more webhooks. Give another --url,"
                " or start `imagefleet webhooks` again once it takes them"
            )
        if state.waiting:
            raise TransientError(
                f"{console.counted(len(state.waiting), 'webhook')} could not be delivered to"
                f" {state.address}: run it again"
            )

    async def _fill(self, *, once: bool) -> None:
        """Reads new records while there is room, and then asks which campaigns have ended."""
        while (
            len(self._state.waiting) < MAX_WAITING and time.monotonic() >= self._poll_at
        ):
            try:
                if await self._source.read():
                    continue
                await self._source.find_ends(is_patient=not once)
            except TransientError as error:
                if once:
                    raise
                log.warning(f"trying again: {error}", action="storage_unavailable")
            self._poll_at = time.monotonic() + POLL_SECONDS

    def _due(self) -> list[Event]:
        """The next events that have waited long enough."""
        now = time.time()
        if now < self._paused_until:
            return []
        due = (event for event in self._state.waiting.values() if event.due_at <= now)
        return list(itertools.islice(due, CONCURRENCY))

    async def _send(self, events: list[Event]) -> None:
        """Makes an attempt for each; one that is cancelled in flight is made again, with its id."""
        sending = asyncio.gather(*map(self._attempt, events))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            await asyncio.wait([sending], timeout=DRAIN_SECONDS)
            sending.cancel()
            raise

    async def _attempt(self, event: Event) -> None:
        answer = await self._endpoint.send(event)
        if answer.pause_seconds:
            until = time.time() + concurrency.jitter(answer.pause_seconds, *_JITTER)
            self._paused_until = max(self._paused_until, until)
        if answer.failure is None:
            self._attempts.labels("delivered").inc()
            del self._state.waiting[event.id]
            log.info(
                f"delivered {event.type} of {event.subject}",
                action="webhook_delivered",
                webhook_id=event.id,
            )
        else:
            self._failed(event, answer)

    def _failed(self, event: Event, answer: Answer) -> None:
        now = time.time()
        self._attempts.labels("failed").inc()
        if answer.is_gone:
            self._is_gone = True
        event.attempts += 1
        action = "webhook_failed"
        if now - event.since >= GIVE_UP_SECONDS and not answer.is_gone:
            del self._state.waiting[event.id]
            self._given_up.inc()
            level = logging.ERROR
            then = "it is given up"
            action = "webhook_given_up"
        else:
            pause = RETRY_SECONDS[min(event.attempts, len(RETRY_SECONDS)) - 1]
            event.due_at = now + max(
                concurrency.jitter(pause, *_JITTER), answer.pause_seconds
            )
            level = logging.WARNING
            then = f"the next follows in {event.due_at - now:.0f} s"
        log.log(
            level,
            f"{event.type} of {event.subject} is not delivered, attempt {event.attempts}:"
            f" {answer.failure}; {then}",
            action=action,
            webhook_id=event.id,
            attempts=event.attempts,
        )

    def _save(self) -> None:
        self._save_at = time.monotonic() + SAVE_SECONDS
        if (text := self._state.model_dump_json(exclude_defaults=True)) != self._saved:
            console.write_file(self._state_file, text)
            self._saved = text
