"""Metrics pushed as text to VictoriaMetrics or vmagent, for nodes that cannot be scraped.

Each push has the total of every counter, so the one after a failed one makes up for it.
"""

import asyncio
import contextlib
import gzip
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import ClientError, ClientSession, ClientTimeout
from prometheus_client import CollectorRegistry
from yarl import URL

from imagefleet import concurrency, redaction
from imagefleet.errors import FleetError, SetupError, TransientError
from imagefleet.telemetry import metrics, proxies
from imagefleet.telemetry.logs import log
from imagefleet.telemetry.settings import TelemetrySettings

#: Seconds between two pushes, varied by 20 %: as often as Prometheus scrapes by default.
PUSH_SECONDS = 15.0

#: A router that drops packets must not block until the next push is due.
TIMEOUT_SECONDS = 10.0

#: The last push carries a run's totals, but an unreachable server must not delay the exit.
LAST_PUSH_SECONDS = 5.0

#: The retries of one push: the next one is minutes away at most.
RETRY_POLICY = concurrency.RetryPolicy(
    tries=3, longest_wait_seconds=2, on_retry=lambda _: None
)

_RETRYABLE = {408, 425, 429}


@contextlib.asynccontextmanager
async def pushing(
    registry: CollectorRegistry, settings: TelemetrySettings, job: str
) -> AsyncIterator[None]:
    """Pushes *registry* while the block runs and once more at its end, if `push_url` is set.

    Every series gets the labels of a scrape: `job`, and `instance`, a new random name, which does
    not identify the machine.
    """
    if settings.push_url is None:
        yield
        return
    token = settings.push_token.get_secret_value() if settings.push_token else None
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = ClientTimeout(total=TIMEOUT_SECONDS)
    async with proxies.session(headers=headers, timeout=timeout) as client:
        labels = f"job={job}", f"instance={uuid.uuid4().hex[:12]}"
        url = URL(settings.push_url).extend_query(
            [("extra_label", label) for label in labels]
        )
        pusher = Pusher(client, registry, url)
        try:
            async with concurrency.beside(pusher.run(PUSH_SECONDS)):
                yield
        finally:
            await pusher.push_for(LAST_PUSH_SECONDS)


@dataclass(eq=False)
class Pusher:
    """Pushes one registry to one address; logs the first of several failures, and the recovery."""

    _client: ClientSession
    _registry: CollectorRegistry
    _url: URL
    _retry_policy: concurrency.RetryPolicy = RETRY_POLICY
    _failing: bool = False

    async def run(self, every_seconds: float) -> None:
        """Pushes now, so that counters start at zero, and then forever."""
        while True:
            await self.push_for(every_seconds)
            await asyncio.sleep(concurrency.jitter(every_seconds, 0.8, 1.2))

    async def push_for(self, seconds: float) -> bool:
        """Pushes, retrying for at most *seconds*; False if that failed."""
        try:
            async with asyncio.timeout(seconds):
                await self._retry_policy.call(self.push)
        except (FleetError, TimeoutError) as error:
            if not self._failing:
                why = str(error) or f"no answer within {seconds:g} s"
                log.warning(
                    f"cannot push metrics, continuing without: {why}",
                    action="push_failed",
                )
            self._failing = True
            return False
        except Exception:  # noqa: BLE001 - logged
            # A bug in a collector must end neither the worker nor the later pushes.
            log.exception("a bug prevents pushing the metrics", action="push_defect")
            return False
        if self._failing:
            log.info("metrics are pushed again", action="push_recovered")
        self._failing = False
        return True

    async def push(self) -> None:
        """Sends one request; raises TransientError, or SetupError for a wrong address or token."""
        body = gzip.compress(metrics.render(self._registry), compresslevel=1)
        headers = {"Content-Type": metrics.CONTENT_TYPE, "Content-Encoding": "gzip"}
        where = redaction.address(str(self._url))
        try:
            async with self._client.post(
                self._url, data=body, headers=headers, allow_redirects=False
            ) as answer:
                status = answer.status
                reason = answer.reason
        except (ClientError, TimeoutError) as error:
            raise proxies.unreachable(f"{where} does not answer", error) from None
        if status < 300:  # noqa: PLR2004
            return
        if status >= 500 or status in _RETRYABLE:  # noqa: PLR2004
            raise TransientError(f"{where} answered {status} {reason}")
        raise SetupError(
            f"{where} answered {status} {reason}; --push-url must be an import address of"
            " VictoriaMetrics or vmagent (.../api/v1/import/prometheus), --push-token its token"
        )
