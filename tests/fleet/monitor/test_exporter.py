import asyncio
import math
from collections.abc import Mapping

import pytest

import polling
from fleet.monitor.exporter import Exporter, queue_figures
from fleet.monitor.rates import FleetRates
from fleet.settings import ExporterSettings
from imagefleet import errors
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import QueueDepth
from imagefleet.telemetry.metrics import QueueFlow


def flow_of(*samples: tuple[float, int]) -> QueueFlow:
    flow = QueueFlow()
    for at, messages in samples:
        flow.add_sample(at, messages)
    return flow


def fleet_rates(jobs_per_second: float, dollars_per_hour: float) -> FleetRates:
    return FleetRates(
        jobs_per_second=jobs_per_second, dollars_per_hour=dollars_per_hour
    )


def figures(
    flow: QueueFlow, fleet: FleetRates | None, price: float | None
) -> dict[str, float]:
    names = {
        "imagefleet_exporter_arrivals_per_second": "arrivals",
        "imagefleet_exporter_completions_per_second": "completions",
        "imagefleet_queue_seconds_to_empty": "seconds",
        "imagefleet_queue_dollars_to_empty": "dollars",
    }
    found = queue_figures(flow, fleet, price)
    return {names[name]: value for name, value in found.items()}


def test_a_draining_queue_has_a_time_and_a_cost_to_empty():
    # 1,200 messages at 2/s: 10 minutes, and a dollar at 6 $/h.
    flow = flow_of((0, 1800), (150, 1500), (300, 1200))

    assert figures(flow, None, 6.0) == pytest.approx(
        {"arrivals": 0, "completions": 2, "seconds": 600, "dollars": 1}
    )


def test_the_workers_metrics_separate_arrivals_from_completions():
    flow = flow_of((0, 1800), (300, 1200))

    assert figures(flow, fleet_rates(5, 12), None) == pytest.approx(
        {"arrivals": 3, "completions": 5, "seconds": 600, "dollars": 2}
    )


def test_a_growing_queue_takes_forever_to_empty():
    found = figures(flow_of((0, 100), (10, 150)), None, 6.0)

    assert found["arrivals"] == pytest.approx(5)
    assert found["completions"] == 0
    assert found["seconds"] == math.inf
    assert found["dollars"] == math.inf


def test_an_empty_queue_takes_no_time_and_costs_nothing():
    assert figures(flow_of((0, 0), (10, 0)), None, 6.0) == {
        "arrivals": 0,
        "completions": 0,
        "seconds": 0,
        "dollars": 0,
    }


def test_one_sample_gives_no_rate_and_an_unknown_price_no_cost():
    assert figures(flow_of((0, 100)), None, 6.0) == {}
    assert "dollars" not in figures(flow_of((0, 100), (10, 50)), None, None)


def test_rates_cover_only_the_window():
    samples = [
        (float(at), 10_000 - at if at <= 600 else 9_400 - 5 * (at - 600))
        for at in range(0, 1001, 10)
    ]
    flow = flow_of(*samples)

    assert flow.net_per_second == pytest.approx(-5)


async def test_depths_and_ages_of_all_queues_are_exported(storage: Storage):
    await storage.queue.send(["a", "b", "c"])
    await storage.queues["low"].send(["d", "e"])
    await storage.queue.receive(1, lease_seconds=60)
    await storage.poison.send(["x"])
    exporter = Exporter(storage, ExporterSettings(fleet="mine"), None)
    await exporter.sample()
    depth = await storage.queue.depth()

    def value(name: str, labels: Mapping[str, str] | None = None) -> float | None:
        return exporter.registry.get_sample_value(
            name, {**(labels or {}), "fleet": "mine"}
        )

    def messages(queue: str, state: str) -> float | None:
        return value("imagefleet_queue_messages", {"queue": queue, "state": state})

    name = storage.queue.name
    if depth.leased is None:
        assert messages(name, "any") == 3
        assert messages(storage.poison.name, "any") == 1
        assert (messages(f"{name}-high", "any"), messages(f"{name}-low", "any")) == (
            0,
            2,
        )
    else:
        assert (messages(name, "visible"), messages(name, "leased")) == (2, 1)
        assert messages(storage.poison.name, "visible") == 1
        assert (
            messages(f"{name}-high", "visible"),
            messages(f"{name}-low", "visible"),
        ) == (0, 2)
    assert value("imagefleet_queue_oldest_age_seconds", {"queue": name}) is not None
    assert value("imagefleet_exporter_last_look_timestamp_seconds") is not None


async def test_an_outage_is_counted_and_the_last_values_stay(tmp_path, monkeypatch):
    settings = ExporterSettings(
        storage=f"local:{tmp_path}",
        sample_seconds=0.1,
        fleet="mine",
        dollars_per_hour=7.5,
    )
    async with open_storage(settings) as storage:
        await storage.create()
        exporter = Exporter(storage, settings, None)
        await exporter.sample()

        failures = iter(
            [errors.TransientError, errors.SetupError]
        )  # the second ends the exporter

        async def no_answer() -> QueueDepth:
            raise next(failures)

        monkeypatch.setattr(storage.queue, "depth", no_answer)
        with pytest.raises(errors.SetupError):
            await exporter.run()
    value, mine = exporter.registry.get_sample_value, {"fleet": "mine"}
    (failed,) = (
        each for each in exporter.registry.collect() if "failed_looks" in each.name
    )
    assert failed.samples[0].value == 1
    assert value("imagefleet_confirmed_dollars_per_hour", mine) == 7.5
    assert (
        value(
            "imagefleet_queue_messages", {"queue": "jobs", "state": "visible", **mine}
        )
        == 0
    )


async def test_an_error_of_one_queue_cancels_the_request_to_the_other(
    storage: Storage, monkeypatch
):
    ended = []

    async def refused() -> QueueDepth:
        await polling.turn()
        raise errors.SetupError("no permission")

    async def slow() -> QueueDepth:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        raise AssertionError

    monkeypatch.setattr(storage.queue, "depth", refused)
    monkeypatch.setattr(storage.poison, "depth", slow)

    with pytest.raises(errors.SetupError, match="no permission"):
        await Exporter(storage, ExporterSettings(), None).sample()
    assert ended
