"""The client of SaladCloud's API: rate limit, retries and errors."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from pydantic import SecretStr

from fleet.salad import client
from imagefleet import concurrency, errors


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The waits between tries, recorded instead of slept."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(concurrency, "asyncio", SimpleNamespace(sleep=sleep))
    return waited


@pytest.fixture
async def api(salad, salad_module, waits: list[float]) -> AsyncIterator[Any]:
    async with aiohttp.ClientSession() as session:
        yield client.SaladClient(session, salad.url, salad_module.KEY)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        self._now += (
            1e-6  # or a timer that is due within the float's precision never is
        )
        if self._scheduled and not self._ready:
            self._now = max(self._now, self._scheduled[0].when())
        super()._run_once()


def test_no_minute_has_more_calls_than_salad_allows():
    begun: list[float] = []

    async def call_often() -> None:
        limiter = client.call_limiter()
        for _ in range(1000):
            await limiter.acquire()
            begun.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(call_often())

    busiest = max(sum(at <= each < at + 60 for each in begun) for at in begun)
    assert 195 <= busiest <= 200


async def test_retry_after_sets_the_wait(salad, salad_module, api, waits: list[float]):
    salad.faults = [salad_module.Fault(429, headers={"Retry-After": "17"})]

    await api.call("GET", "/organizations/acme/quotas")

    assert waits == [17]


async def test_a_wait_of_hours_is_not_taken_for_the_budget_is_not_watched_meanwhile(
    salad, salad_module, api, waits: list[float]
):
    salad.faults = [salad_module.Fault(503, headers={"Retry-After": "86400"})]

    await api.call("GET", "/organizations/acme/quotas")

    assert waits == [client.LONGEST_RETRY_AFTER_SECONDS]


async def test_an_outage_ends_the_call_after_so_many_tries(
    salad, salad_module, api, waits: list[float]
):
    salad.faults = [salad_module.Fault(503, "") for _ in range(client.RETRIES.tries)]

    with pytest.raises(errors.TransientError, match=r"fails \(HTTP 503\)"):
        await api.call("GET", "/organizations/acme/quotas")

    assert len(waits) == client.RETRIES.tries - 1


async def test_a_refused_call_is_not_retried(salad, salad_module, api):
    salad.faults = [
        salad_module.Fault(400, '{"title": "Bad", "errors": {"cpu": ["too many"]}}')
    ]

    with pytest.raises(errors.SetupError, match="too many"):
        await api.call("GET", "/organizations/acme/quotas")

    assert len(salad.requests) == 1


async def test_a_page_of_html_is_not_an_answer(salad, salad_module, api):
    page = "<html><title>Sign in to the hotel's network</title></html>"
    salad.faults = [
        salad_module.Fault(200, page, "text/html") for _ in range(client.RETRIES.tries)
    ]

    with pytest.raises(errors.TransientError, match="Sign in to the hotel's network"):
        await api.call("GET", "/organizations/acme/quotas")


async def test_a_redirect_is_not_followed_with_the_key(salad, salad_module, api):
    to = {"Location": f"{salad.url}/elsewhere"}
    salad.faults = [
        salad_module.Fault(302, headers=to) for _ in range(client.RETRIES.tries)
    ]

    with pytest.raises(errors.TransientError, match="HTTP 302"):
        await api.call("GET", "/organizations/acme/quotas")

    assert not any(path == "/elsewhere" for _, path in salad.requests)


async def test_a_refusal_that_quotes_a_secret_is_shown_without_it(
    salad, salad_module, api
):
    salad.faults = [salad_module.Fault(400, '{"detail": "sig=very-secret is odd"}')]

    with pytest.raises(errors.SetupError, match=r"\(secret\) is odd") as caught:
        await api.call("POST", "/x", {"variable": SecretStr("sig=very-secret")})

    assert "very-secret" not in caught.value.message


async def test_an_answer_in_which_a_secret_stands_by_chance_is_read_as_it_is(
    salad, salad_module, api
):
    salad.faults = [salad_module.Fault(200, '{"replicas": 10}')]

    assert await api.call("POST", "/x", {"variable": SecretStr("1")}) == {
        "replicas": 10
    }


async def test_an_address_without_a_server_is_reported(waits: list[float]):
    async with aiohttp.ClientSession() as session:
        api = client.SaladClient(session, "http://127.0.0.1:9", "key")
        with pytest.raises(errors.TransientError, match="does not answer"):
            await api.call("GET", "/")
