"""Questions to a Prometheus, or to what answers like one (VictoriaMetrics, Mimir)."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from imagefleet import errors

if TYPE_CHECKING:
    import aiohttp  # only those who ask a server wait for it to load

#: A day of a fleet is read in one question; who waits longer has the wrong address.
TIMEOUT_SECONDS = 30.0

_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer: its labels, and its points as Unix seconds and value."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        return self.points[-1][1]


class Prometheus:
    """One server.

    Every method raises SetupError where it refuses a question, TransientError where it fails.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")

    async def at(self, query: str, moment: datetime) -> list[Series]:
        """An instant vector (or scalar): each series with its one point."""
        return await self._ask("query", {"query": query, "time": str(moment.timestamp())})

    async def over(
        self, query: str, begin: datetime, end: datetime, step_seconds: float
    ) -> list[Series]:
        """A range: each series with its points, *step_seconds* apart."""
        times = {"start": str(begin.timestamp()), "end": str(end.timestamp())}
        return await self._ask("query_range", {"query": query, **times, "step": str(step_seconds)})

    async def _ask(self, what: str, parameters: Mapping[str, str]) -> list[Series]:
        import aiohttp

        try:
            async with self._session.post(
                f"{self._url}/api/v1/{what}", data=parameters
            ) as response:
                text = await response.text()
        except aiohttp.InvalidURL:
            raise errors.SetupError(f"{self._url!r} is no address of a Prometheus") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise errors.TransientError(
                f"the Prometheus does not answer: {str(error) or type(error).__name__}"
            ) from error
        try:
            answer = json.loads(text)
            if answer["status"] == "success":
                return _series(answer["data"])
            complaint = str(answer["error"])
        except (ValueError, KeyError, TypeError):
            complaint = f"HTTP {response.status}: {text[:_SHOWN_CHARACTERS]}"
            if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise errors.TransientError(f"the Prometheus fails: {complaint}") from None
        raise errors.SetupError(f"the Prometheus refuses {parameters['query']}: {complaint}")


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Prometheus]:
    """A session with the server at *url*; a name and password may stand in it."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
        yield Prometheus(session, url)


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
    """Without NaN and infinities: nothing divided by nothing is nothing to show."""
    points = ((float(at), float(value)) for at, value in pairs)
    return tuple(point for point in points if math.isfinite(point[1]))
