from __future__ import annotations

import math
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from fleet.monitor.queue_flow import Exporter, FlowCollector, QueueFlow
from fleet.monitor.rates import FleetRates
from fleet.settings import ExporterSettings
from imagefleet import errors
from imagefleet.storage.open import open_storage
from imagefleet.storage.protocol import QueueDepth, Storage


def flow_of(*looks: tuple[float, int], window_seconds: float = 300) -> QueueFlow:
    flow = QueueFlow(window_seconds)
    for at, messages in looks:
        flow.look(at, messages)
    return flow


def fleet_rates(jobs_per_second: float, dollars_per_hour: float) -> FleetRates:
    return FleetRates(3, jobs_per_second, jobs_per_second, 0.1, dollars_per_hour, 9.0, 8.0)


def told(flow: QueueFlow, fleet: FleetRates | None, price: float | None) -> dict[str, float]:
    registry = CollectorRegistry()
    collector = FlowCollector()
    collector.tell(flow, fleet, price)
    registry.register(collector)
    names = {
        "arrivals": "imagefleet_exporter_arrivals_per_second",
        "completions": "imagefleet_exporter_completions_per_second",
        "seconds": "imagefleet_queue_seconds_to_empty",
        "dollars": "imagefleet_queue_dollars_to_empty",
    }
    found = {short: registry.get_sample_value(name) for short, name in names.items()}
    return {short: value for short, value in found.items() if value is not None}


def test_a_queue_that_drains_tells_when_it_is_empty_and_for_how_much() -> None:
    # 1,200 left and 2 a second fewer: 10 minutes, at $6 an hour a dollar.
    flow = flow_of((0, 1800), (150, 1500), (300, 1200))

    assert told(flow, None, 6.0) == pytest.approx(
        {"arrivals": 0, "completions": 2, "seconds": 600, "dollars": 1}
    )


def test_with_the_workers_metrics_arrivals_and_completions_are_told_apart() -> None:
    flow = flow_of((0, 1800), (300, 1200))

    assert told(flow, fleet_rates(5, 12), None) == pytest.approx(
        {"arrivals": 3, "completions": 5, "seconds": 600, "dollars": 2}
    )


def test_a_queue_that_grows_is_never_empty() -> None:
    found = told(flow_of((0, 100), (10, 150)), None, 6.0)

    assert found["arrivals"] == pytest.approx(5)
    assert found["completions"] == 0
    assert found["seconds"] == math.inf
    assert found["dollars"] == math.inf


def test_an_empty_queue_takes_no_time_and_no_money() -> None:
    assert told(flow_of((0, 0), (10, 0)), None, 6.0) == {
        "arrivals": 0,
        "completions": 0,
        "seconds": 0,
        "dollars": 0,
    }


def test_one_look_tells_no_rate_and_an_unknown_price_no_dollars() -> None:
    assert told(flow_of((0, 100)), None, 6.0) == {}
    assert "dollars" not in told(flow_of((0, 100), (10, 50)), None, None)


def test_rates_are_of_the_last_minutes_alone() -> None:
    looks = [
        (float(at), 10_000 - at if at <= 600 else 9_400 - 5 * (at - 600))
        for at in range(0, 1001, 10)
    ]
    flow = flow_of(*looks, window_seconds=300)

    assert flow.net_per_second == pytest.approx(-5)


async def test_depths_and_ages_of_both_queues_are_told(storage: Storage) -> None:
    await storage.queue.send(["a", "b", "c"])
    await storage.queue.receive(1, lease_seconds=60)
    await storage.poison.send(["x"])
    exporter = Exporter(storage, ExporterSettings(), None)
    await exporter.look()
    value = exporter.registry.get_sample_value
    depth = await storage.queue.depth()

    def messages(queue: str, state: str) -> float | None:
        return value("imagefleet_queue_messages", {"queue": queue, "state": state})

    name = storage.queue.name
    if depth.leased is None:
        assert messages(name, "any") == 3
        assert messages(storage.poison.name, "any") == 1
    else:
        assert (messages(name, "visible"), messages(name, "leased")) == (2, 1)
        assert messages(storage.poison.name, "visible") == 1
    assert value("imagefleet_queue_oldest_age_seconds", {"queue": name}) is not None
    assert value("imagefleet_exporter_last_look_timestamp_seconds") is not None


async def test_an_outage_is_counted_and_what_was_seen_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ExporterSettings(storage=f"local:{tmp_path}", look_seconds=0.1)
    async with open_storage(settings) as storage:
        await storage.create()
        exporter = Exporter(storage, settings, None)
        await exporter.look()

        async def no_answer() -> QueueDepth:
            # The second time something that no exporter outlives, to end the test.
            raise errors.TransientError if not exporter.flows.failed_looks else errors.SetupError

        monkeypatch.setattr(storage.queue, "depth", no_answer)
        with pytest.raises(errors.SetupError):
            await exporter.run()
    assert exporter.registry.get_sample_value("imagefleet_exporter_failed_looks_total") == 1
    messages = {"queue": "jobs", "state": "visible"}
    assert exporter.registry.get_sample_value("imagefleet_queue_messages", messages) == 0
