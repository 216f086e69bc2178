"""Queries to Prometheus or a compatible server (VictoriaMetrics, Mimir)."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Literal

from aiohttp import ClientError, ClientSession, ClientTimeout, InvalidURL
from pydantic import AliasPath, BaseModel, Field, ValidationError

from imagefleet import redaction
from imagefleet.errors import SetupError, TransientError
from imagefleet.telemetry import proxies

#: Seconds that are enough for a query over a fleet's whole day.
TIMEOUT_SECONDS = 30.0

_SHOWN_CHARACTERS = 200

#: Workers push what they like: a figure beyond these is none of a fleet.
_MIN_VALUE = 1e-15
_MAX_VALUE = 1e15


class Series(BaseModel):
    """One series of a result: its labels, and its last value."""

    labels: dict[str, str] = Field(validation_alias="metric")
    #: Unix seconds and value; None in an answer that is none to an instant query.
    value: tuple[float, float] | None = None

    @property
    def last(self) -> float:
        value = self.value[1] if self.value else math.nan
        return value if abs(value) >= _MIN_VALUE else 0.0

    @property
    def is_known(self) -> bool:
        """False for NaN and infinities, which are the quotients of an idle fleet."""
        return self.value is not None and abs(self.value[1]) <= _MAX_VALUE


class _Reply(BaseModel):
    """Either a *result* or, with the status `error`, the *error*."""

    status: Literal["success", "error"]
    result: list[Series] = Field(
        default=[], validation_alias=AliasPath("data", "result")
    )
    error: str = ""


@dataclass(frozen=True)
class Prometheus:
    """One server, and the fleet that is asked about; None: every fleet.

    `$fleet`, the last matcher in each selector of a query, becomes a matcher of the fleet's label.
    Every method raises SetupError if the server rejects the query, TransientError if it fails.
    """

    _session: ClientSession
    #: Without a slash at its end.
    _url: str
    fleet: str | None

    async def at(self, query: str, moment: datetime) -> list[Series]:
        """An instant query: each series with its value at that moment."""
        query = query.replace(
            "$fleet", "" if self.fleet is None else f'fleet="{self.fleet}"'
        )
        shown = redaction.address(self._url)
        try:
            async with self._session.post(
                f"{self._url}/api/v1/query",
                data={"query": query, "time": str(moment.timestamp())},
            ) as response:
                content = await response.read()
        except InvalidURL:
            raise SetupError(f"not a Prometheus URL: {shown}") from None
        except (ClientError, TimeoutError, OSError) as error:
            raise proxies.unreachable(
                f"Prometheus at {shown} does not answer", error
            ) from None
        try:
            reply = _Reply.model_validate_json(content)
        except ValidationError:
            start = " ".join(
                content[:_SHOWN_CHARACTERS].decode(errors="replace").split()
            )
            answer = f"HTTP {response.status}: {redaction.printable(redaction.message(start))}"
            if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise TransientError(
                    f"Prometheus at {shown} failed: {answer}"
                ) from None
            raise SetupError(
                f"{shown} does not answer as a Prometheus does: {answer}"
            ) from None
        if reply.status == "success":
            return [series for series in reply.result if series.is_known]
        complaint = redaction.printable(reply.error[:_SHOWN_CHARACTERS])
        raise SetupError(f"Prometheus rejects {query}: {complaint}")


@asynccontextmanager
async def connected(
    url: str | None, fleet: str | None = None
) -> AsyncIterator[Prometheus | None]:
    """The server at *url*, which may contain user:password@; None without a URL."""
    async with proxies.session(timeout=ClientTimeout(total=TIMEOUT_SECONDS)) as session:
        yield Prometheus(session, url.rstrip("/"), fleet) if url else None
