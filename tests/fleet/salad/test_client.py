"""Calls of SaladCloud's API: how often, how patiently, and what their errors say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import aiohttp
import pytest
from pydantic import SecretStr

from fleet.salad import client
from imagefleet import errors


@pytest.fixture
async def waits() -> list[float]:
    """The waits between tries, none of which is waited for."""
    return []


@pytest.fixture
async def calls(salad: Any, salad_module: Any, waits: list[float]) -> AsyncIterator[Any]:
    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async with aiohttp.ClientSession() as session:
        yield client.SaladClient(session, salad.url, salad_module.KEY, sleep=sleep)


async def test_no_more_calls_a_minute_than_salad_takes() -> None:
    now = 0.0
    begun: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    limit = client.CallLimit(clock=lambda: now, sleep=sleep)
    for _ in range(1000):
        await limit.wait()
        begun.append(now)
        now += 0.01

    busiest = max(sum(at <= each < at + 60 for each in begun) for at in begun)
    assert busiest == client.CALLS_A_MINUTE < 240


@pytest.mark.parametrize("value", ["17", "date"])
async def test_salad_says_how_long_to_wait(
    value: str, salad: Any, salad_module: Any, calls: Any, waits: list[float]
) -> None:
    if value == "date":
        value = format_datetime(datetime.now(UTC) + timedelta(seconds=17), usegmt=True)
    salad.faults = [salad_module.Fault(429, headers={"Retry-After": value})]

    await calls.call("GET", "/organizations/acme/quotas")

    assert waits == [pytest.approx(17, abs=2)]


async def test_waits_become_longer_and_end(
    salad: Any, salad_module: Any, calls: Any, waits: list[float]
) -> None:
    salad.faults = [salad_module.Fault(503, "") for _ in range(client.TRIES)]

    with pytest.raises(errors.TransientError, match=r"fails \(HTTP 503\), 8 times"):
        await calls.call("GET", "/organizations/acme/quotas")

    assert len(waits) == client.TRIES - 1
    assert waits[-1] > waits[0]


async def test_what_is_refused_is_not_tried_again(
    salad: Any, salad_module: Any, calls: Any
) -> None:
    salad.faults = [salad_module.Fault(400, '{"title": "Bad", "errors": {"cpu": ["too many"]}}')]

    with pytest.raises(errors.SetupError, match="too many"):
        await calls.call("GET", "/organizations/acme/quotas")

    assert len(salad.requests) == 1


async def test_a_page_in_place_of_an_answer_is_no_answer(
    salad: Any, salad_module: Any, calls: Any
) -> None:
    page = "<html><title>Sign in to the hotel's network</title></html>"
    salad.faults = [salad_module.Fault(200, page, "text/html") for _ in range(client.TRIES)]

    with pytest.raises(errors.TransientError, match="Sign in to the hotel's network"):
        await calls.call("GET", "/organizations/acme/quotas")


async def test_a_redirect_does_not_carry_the_key_away(
    salad: Any, salad_module: Any, calls: Any
) -> None:
    to = {"Location": f"{salad.url}/elsewhere"}
    salad.faults = [salad_module.Fault(302, headers=to) for _ in range(client.TRIES)]

    with pytest.raises(errors.TransientError, match="HTTP 302"):
        await calls.call("GET", "/organizations/acme/quotas")

    assert not any(path == "/elsewhere" for _, path in salad.requests)


async def test_a_refusal_that_quotes_a_secret_is_told_without_it(
    salad: Any, salad_module: Any, calls: Any
) -> None:
    salad.faults = [salad_module.Fault(400, '{"detail": "sig=very-secret is odd"}')]

    with pytest.raises(errors.SetupError, match=r"\(secret\) is odd") as caught:
        await calls.call("POST", "/x", {"variable": SecretStr("sig=very-secret")})

    assert "very-secret" not in caught.value.message


async def test_an_address_without_a_server_is_told(waits: list[float]) -> None:
    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async with aiohttp.ClientSession() as session:
        nobody = client.SaladClient(session, "http://127.0.0.1:9", sleep=sleep)
        with pytest.raises(errors.TransientError, match="does not answer"):
            await nobody.call("GET", "/")
