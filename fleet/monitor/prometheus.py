"""Queries to Prometheus or a compatible server (VictoriaMetrics, Mimir)."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from imagefleet import errors

if TYPE_CHECKING:
    import aiohttp  # slow to import, and most commands need no server

#: Enough for a query over a fleet's whole day.
TIMEOUT_SECONDS = 30.0

_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Series:
    """One series of a result: its labels, and its points as (Unix seconds, value)."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        return self.points[-1][1]


class Prometheus:
    """One server, and the fleet that is asked about; None: every fleet.

    `$fleet`, the last matcher in each selector of a query, becomes a matcher of the fleet's label.
    Every method raises SetupError if the server rejects the query, TransientError if it fails.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, fleet: str | None = None) -> None:
        self.fleet = fleet
        self._session = session
        self._url = url.rstrip("/")

    async def at(self, query: str, moment: datetime) -> list[Series]:
        """An instant query: each series with its one point."""
        return await self._query("query", query, time=moment.timestamp())

    async def over(
        self, query: str, begin: datetime, end: datetime, step_seconds: float
    ) -> list[Series]:
        """A range query: each series with its points, *step_seconds* apart."""
        times = {"start": begin.timestamp(), "end": end.timestamp(), "step": step_seconds}
        return await self._query("query_range", query, **times)

    async def _query(self, endpoint: str, query: str, **times: float) -> list[Series]:
        import aiohttp

        query = query.replace("$fleet", "" if self.fleet is None else f'fleet="{self.fleet}"')
        url, data = f"{self._url}/api/v1/{endpoint}", {"query": query}
        data |= {name: str(seconds) for name, seconds in times.items()}
        try:
            async with self._session.post(url, data=data) as response:
                text = await response.text()
        except aiohttp.InvalidURL:
            raise errors.SetupError(f"not a Prometheus URL: {self._url!r}") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise errors.TransientError(
                f"Prometheus does not answer: {str(error) or type(error).__name__}"
            ) from error
        try:
            reply = json.loads(text)
            if reply["status"] == "success":
                return _series(reply["data"])
            complaint = str(reply["error"])
        except (ValueError, KeyError, TypeError):
            complaint = f"HTTP {response.status}: {text[:_SHOWN_CHARACTERS]}"
            if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise errors.TransientError(f"Prometheus failed: {complaint}") from None
        raise errors.SetupError(f"Prometheus rejects {query}: {complaint}")


@asynccontextmanager
async def connected(url: str, fleet: str | None = None) -> AsyncIterator[Prometheus]:
    """A session with the server at *url*, which may contain user:password@."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
        yield Prometheus(session, url, fleet)


def connected_if(
    url: str | None, fleet: str | None
) -> AbstractAsyncContextManager[Prometheus | None]:
    """As `connected`; None without a URL."""
    return connected(url, fleet) if url else nullcontext()


def _series(data: Mapping[str, Any]) -> list[Series]:
    result = data["result"]
    if data["resultType"] == "scalar":
        result = [{"metric": {}, "value": result}]
    found = []
    for each in result:
        pairs = each["values"] if "values" in each else [each["value"]]
        points = ((float(at), float(value)) for at, value in pairs)
        # NaN and infinities are the quotients of an idle fleet.
        if finite := tuple(point for point in points if math.isfinite(point[1])):
            found.append(Series(each["metric"], finite))
    return found
