"""Queries to Prometheus or a compatible server (VictoriaMetrics, Mimir)."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
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
    """One server.

    Every method raises SetupError if the server rejects the query, TransientError if it fails.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")

    async def at(self, query: str, moment: datetime) -> list[Series]:
        """An instant query: each series with its one point."""
        return await self._query("query", {"query": query, "time": str(moment.timestamp())})

    async def over(
        self, query: str, begin: datetime, end: datetime, step_seconds: float
    ) -> list[Series]:
        """A range query: each series with its points, *step_seconds* apart."""
        times = {"start": str(begin.timestamp()), "end": str(end.timestamp())}
        return await self._query(
            "query_range", {"query": query, **times, "step": str(step_seconds)}
        )

    async def _query(self, endpoint: str, parameters: Mapping[str, str]) -> list[Series]:
        import aiohttp

        try:
            async with self._session.post(
                f"{self._url}/api/v1/{endpoint}", data=parameters
            ) as response:
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
        raise errors.SetupError(f"Prometheus rejects {parameters['query']}: {complaint}")


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Prometheus]:
    """A session with the server at *url*, which may contain user:password@."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
        yield Prometheus(session, url)


@asynccontextmanager
async def connected_if(url: str | None) -> AsyncIterator[Prometheus | None]:
    """As `connected`; None without a URL."""
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(connected(url)) if url else None


def _series(data: Mapping[str, Any]) -> list[Series]:
    result = data["result"]
    pairs: list[tuple[dict[str, str], list[tuple[float, str]]]]
    match data["resultType"]:
        case "scalar":
            pairs = [({}, [result])]
        case "vector":
            pairs = [(each["metric"], [each["value"]]) for each in result]
        case _:
            pairs = [(each["metric"], each["values"]) for each in result]
    found = (Series(labels, _points(points)) for labels, points in pairs)
    return [series for series in found if series.points]


def _points(pairs: Iterable[tuple[float, str]]) -> tuple[tuple[float, float], ...]:
    """Without NaN and infinities: the quotients of an idle fleet."""
    points = ((float(at), float(value)) for at, value in pairs)
    return tuple(point for point in points if math.isfinite(point[1]))
