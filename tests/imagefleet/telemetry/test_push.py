import asyncio
import contextlib
import gzip
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter
from yarl import URL

from imagefleet import concurrency, errors
from imagefleet.telemetry import metrics, push
from imagefleet.telemetry.settings import TelemetrySettings
from polling import turn, until

FAST = concurrency.RetryPolicy(
    tries=3, first_wait_seconds=0.001, on_retry=lambda _: None
)

PATH = "/api/v1/import/prometheus"


@dataclass
class Received:
    """One push."""

    text: str
    labels: list[str]
    headers: dict[str, str]


@dataclass
class Recorder:
    """A server that records what is pushed to it; answers with *answers* first, then 204."""

    url: str = ""
    pushes: list[Received] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    hangs: bool = False

    async def take(self, request: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.Event().wait()
        # aiohttp has decompressed it.
        body = await request.read()
        labels = request.query.getall("extra_label", [])
        self.pushes.append(Received(body.decode(), labels, dict(request.headers)))
        return web.Response(status=self.answers.pop(0) if self.answers else 204)


@pytest.fixture
async def recorder() -> AsyncIterator[Recorder]:
    recorder = Recorder()
    app = web.Application()
    app.router.add_post(PATH, recorder.take)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    recorder.url = f"http://127.0.0.1:{runner.addresses[0][1]}{PATH}"
    yield recorder
    await runner.cleanup()


@pytest.fixture
def images() -> tuple[CollectorRegistry, Counter]:
    registry = CollectorRegistry()
    return registry, Counter("imagefleet_images", "Images stored.", registry=registry)


@contextlib.asynccontextmanager
async def a_pusher(url: str, registry: CollectorRegistry) -> AsyncIterator[push.Pusher]:
    async with aiohttp.ClientSession() as client:
        yield push.Pusher(client, registry, URL(url), FAST)


async def test_counters_are_pushed_at_zero_at_each_interval_and_at_the_end(
    recorder: Recorder,
    images: tuple[CollectorRegistry, Counter],
    monkeypatch,
):
    monkeypatch.setattr(push, "PUSH_SECONDS", 1)
    registry, counter = images
    settings = TelemetrySettings(push_url=recorder.url, push_token="s3cret")
    async with push.pushing(registry, settings, job="imagefleet-worker"):
        await until(lambda: len(recorder.pushes) == 1)
        counter.inc(3)
        await until(lambda: len(recorder.pushes) == 2)
        counter.inc(4)

    values = [f"imagefleet_images_total {each}" for each in ("0.0", "3.0", "7.0")]
    assert [
        value in each.text for value, each in zip(values, recorder.pushes, strict=True)
    ] == [True] * 3
    first, *others = recorder.pushes
    assert first.headers["Content-Encoding"] == "gzip"
    assert first.headers["Authorization"] == "Bearer s3cret"
    assert first.labels[0] == "job=imagefleet-worker"
    assert first.labels[1].startswith("instance=")
    assert all(each.labels == first.labels for each in others)

    async with push.pushing(registry, settings, job="imagefleet-worker"):
        await until(lambda: len(recorder.pushes) == 4)
    assert recorder.pushes[3].labels[1] != first.labels[1]


async def test_without_a_push_url_nothing_is_pushed(
    images: tuple[CollectorRegistry, Counter],
):
    async with push.pushing(images[0], TelemetrySettings(), job="j"):
        assert not [
            task for task in asyncio.all_tasks() if task.get_name() == "push metrics"
        ]


@pytest.mark.parametrize("status", [500, 503, 429, 408])
async def test_a_transient_error_is_retried_at_once(
    status: int,
    recorder: Recorder,
    images: tuple[CollectorRegistry, Counter],
    caplog,
):
    recorder.answers = [status, status]
    async with a_pusher(recorder.url, images[0]) as pusher:
        assert await pusher.push_for(10)

    assert len(recorder.pushes) == 3
    assert not caplog.records


async def test_a_refusal_is_logged_once_with_what_to_do_and_without_the_password(
    recorder: Recorder,
    images: tuple[CollectorRegistry, Counter],
    caplog,
):
    caplog.set_level(logging.INFO)
    recorder.answers = [401, 401]
    url = recorder.url.replace("http://", "http://fleet:s3cret@")
    async with a_pusher(url, images[0]) as pusher:
        assert not await pusher.push_for(10)
        assert not await pusher.push_for(10)
        assert await pusher.push_for(10)

    assert len(recorder.pushes) == 3, (
        "a refusal is not retried before the next push is due"
    )
    refused, recovered = caplog.records
    assert "401" in refused.getMessage()
    assert "--push-token" in refused.getMessage()
    assert "s3cret" not in refused.getMessage()
    assert recovered.getMessage() == "metrics are pushed again"


async def test_an_unreachable_server_does_not_end_the_worker(
    images: tuple[CollectorRegistry, Counter],
    unused_port: int,
    caplog,
):
    async with a_pusher(f"http://127.0.0.1:{unused_port}{PATH}", images[0]) as pusher:
        assert not await pusher.push_for(10)

    assert "does not answer" in caplog.text


async def test_a_server_that_hangs_does_not_delay_the_exit(
    recorder: Recorder,
    images: tuple[CollectorRegistry, Counter],
    monkeypatch,
    caplog,
):
    monkeypatch.setattr(push, "LAST_PUSH_SECONDS", 0.1)
    recorder.hangs = True
    async with push.pushing(
        images[0], TelemetrySettings(push_url=recorder.url), job="j"
    ):
        await turn()

    assert "no answer within 0.1 s" in caplog.text


async def test_an_error_of_the_worker_propagates_after_the_last_push(
    recorder: Recorder, images: tuple[CollectorRegistry, Counter]
):
    registry, counter = images
    settings = TelemetrySettings(push_url=recorder.url)

    async def work() -> None:
        async with push.pushing(registry, settings, job="j"):
            counter.inc()
            raise errors.NodeError

    with pytest.raises(errors.NodeError):
        await work()
    assert "imagefleet_images_total 1.0" in recorder.pushes[-1].text
    assert "_created" not in recorder.pushes[-1].text


async def test_a_bug_in_a_collector_is_logged_and_does_not_end_the_worker(
    recorder: Recorder,
    images: tuple[CollectorRegistry, Counter],
    monkeypatch,
    caplog,
):
    registry, counter = images
    async with push.pushing(
        registry, TelemetrySettings(push_url=recorder.url), job="j"
    ):
        await until(lambda: len(recorder.pushes) == 1)
        monkeypatch.setattr(counter, "collect", lambda: 1 / 0)

    assert "ZeroDivisionError" in caplog.text


def test_a_push_of_a_worker_is_small(images: tuple[CollectorRegistry, Counter]):
    from worker.metrics import WorkerMetrics

    assert len(gzip.compress(metrics.render(WorkerMetrics().registry), 1)) < 8_000
