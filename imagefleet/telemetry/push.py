"""Metrics leave a machine that nobody can reach: they are pushed.

As text to VictoriaMetrics or vmagent, or by remote write to what takes nothing else. A node behind
a home router cannot be scraped. Each push carries every counter's whole value, so one that fails
costs nothing but its moment: nothing is kept for later. A node that dies stops pushing, and its
series go stale by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Mapping

import aiohttp
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from yarl import URL

from imagefleet import errors, retry
from imagefleet.telemetry import remote_write
from imagefleet.telemetry.settings import PushFormat, TelemetrySettings

log = logging.getLogger(__name__)

#: Between two pushes, give or take: as often as Prometheus scrapes by default.
PUSH_SECONDS = 15.0

#: An answer comes within milliseconds; a router that swallows packets must not cost a whole turn.
TIMEOUT_SECONDS = 10.0

#: The last push tells what a run came to; a server that is gone must not keep a worker alive.
LAST_PUSH_SECONDS = 5.0

#: Within one turn: the next one is at most a few minutes away.
PATIENCE = retry.RetryPolicy(tries=3, longest_wait_seconds=2, on_retry=lambda _: None)

#: Answers that may be another one next time.
_MAY_PASS = frozenset({408, 425, 429})


@contextlib.asynccontextmanager
async def pushing(
    registry: CollectorRegistry, settings: TelemetrySettings, job: str
) -> AsyncIterator[None]:
    """Pushes *registry* while the block runs, and once more at its end; without an address, not.

    Every series gets the labels `job` and `instance`, the latter drawn anew for each process, as
    a scrape would add them.
    """
    if settings.push_url is None:
        yield
        return
    if settings.push_format == "remote-write":
        remote_write.check_library()
    token = settings.push_token.get_secret_value() if settings.push_token else None
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as client:
        labels = {"job": job, "instance": new_instance()}
        pusher = Pusher(client, registry, settings.push_url, labels, PATIENCE, settings.push_format)
        pushes = asyncio.create_task(pusher.run(PUSH_SECONDS), name="push metrics")
        try:
            yield
        finally:
            pushes.cancel()
            await asyncio.gather(pushes, return_exceptions=True)
            await pusher.push_for(LAST_PUSH_SECONDS)


def new_instance() -> str:
    """A name for this process that says nothing of its machine."""
    return uuid.uuid4().hex[:12]


class Pusher:
    """Pushes one registry to one address; says once, not every time, that it cannot."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        registry: CollectorRegistry,
        url: str,
        labels: Mapping[str, str],
        patience: retry.RetryPolicy = PATIENCE,
        push_format: PushFormat = "text",
    ) -> None:
        self._client = client
        self._registry = registry
        self._url = URL(url)
        self._labels = labels
        self._format = push_format
        self._patience = patience
        self._is_refused = False

    async def run(self, every_seconds: float) -> None:
        """Pushes at once, so that counters are seen at zero, and then for ever."""
        while True:
            await self.push_for(every_seconds)
            # Jitter: a fleet that starts together must not push together.
            await asyncio.sleep(random.uniform(0.8, 1.2) * every_seconds)  # noqa: S311

    async def push_for(self, seconds: float) -> bool:
        """Pushes, with its repetitions within *seconds*; tells whether it was taken."""
        try:
            async with asyncio.timeout(seconds):
                await self._patience.call(self.push)
        except (errors.FleetError, TimeoutError) as error:
            if not self._is_refused:
                log.warning(
                    "the metrics are not taken, the work goes on: %s",
                    str(error) or f"no answer within {seconds:g} s",
                    extra={"action": "push_failed"},
                )
            self._is_refused = True
            return False
        except Exception:
            # A defect of ours, in a collector say: no reason to end a worker, nor to tell no more.
            log.exception("pushing the metrics met a defect", extra={"action": "push_defect"})
            return False
        if self._is_refused:
            log.info("the metrics are taken again", extra={"action": "push_recovered"})
        self._is_refused = False
        return True

    async def push(self) -> None:
        """One request.

        Raises:
            TransientError: no answer, or one that may pass; SetupError: the address or the token
            is wrong.
        """
        url, body, headers = self._request()
        try:
            async with self._client.post(
                url, data=body, headers=headers, allow_redirects=False
            ) as answer:
                status, reason = answer.status, answer.reason
        except (aiohttp.ClientError, TimeoutError) as error:
            raise errors.TransientError(f"{self._where} does not answer: {error!r}") from None
        if status < 300:  # noqa: PLR2004
            return
        if status >= 500 or status in _MAY_PASS:  # noqa: PLR2004
            raise errors.TransientError(f"{self._where} answers {status} {reason}")
        raise errors.SetupError(
            f"{self._where} answers {status} {reason}; --push-url is the import address of"
            " VictoriaMetrics or vmagent, .../api/v1/import/prometheus, or with --push-format"
            " remote-write an address for that; --push-token is its token"
        )

    def _request(self) -> tuple[URL, bytes, Mapping[str, str]]:
        if self._format == "remote-write":
            body = remote_write.encode(self._registry, self._labels, time.time_ns() // 1_000_000)
            return self._url, body, remote_write.HEADERS
        labels = [("extra_label", f"{name}={value}") for name, value in self._labels.items()]
        body = gzip.compress(generate_latest(self._registry), compresslevel=1)
        headers = {"Content-Type": CONTENT_TYPE_LATEST, "Content-Encoding": "gzip"}
        return self._url.extend_query(labels), body, headers

    @property
    def _where(self) -> str:
        return str(self._url.with_user(None).with_query(None))
