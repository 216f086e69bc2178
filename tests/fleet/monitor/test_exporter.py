import asyncio
from collections.abc import Mapping

import pytest

import polling
from fleet.monitor.exporter import Exporter
from fleet.settings import ExporterSettings
from imagefleet import errors
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import QueueDepth


async def test_depths_and_ages_of_all_queues_are_exported(storage: Storage):
    await storage.queue.send(["a", "b", "c"])
    await storage.queues["low"].send(["d", "e"])
    await storage.queue.receive(1, lease_seconds=60)
    await storage.poison.send(["x"])
    exporter = Exporter(storage, ExporterSettings(fleet="mine"))
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
        exporter = Exporter(storage, settings)
        await exporter.sample()

        failures = iter(
            [errors.TransientError, errors.SetupError]
        )  # the second ends the exporter

        async def no_answer() -> QueueDepth:
            raise next(failures)

        monkeypatch.setattr(storage.queue, "depth", no_answer)
        with pytest.raises(errors.SetupError):
            await exporter.run()
    value = exporter.registry.get_sample_value
    mine = {"fleet": "mine"}
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
        await Exporter(storage, ExporterSettings()).sample()
    assert ended
