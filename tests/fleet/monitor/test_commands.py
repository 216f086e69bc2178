"""The commands that read the workers' metrics, with a real server."""

import asyncio
import json
import re
import signal
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import polling
from fleet.monitor import prometheus, rates
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet

COMMAND = Path(sys.executable).with_name("imagefleet")


def history(
    worker: str,
    gpu: str,
    images_per_second: float,
    price: float,
    fleet: str,
    instance: str = "",
) -> str:
    """A worker's pushes over the last 150 s, ten seconds apart."""
    now = int(time.time() * 1000)
    labels = f'job="imagefleet-worker",instance="{instance or uuid.uuid4().hex}",fleet="{fleet}"'
    if instance:
        labels += f',device="{worker}"'
    lines = []
    for ago in range(150, -1, -10):
        seconds = 150 - ago
        at = now - 1000 * ago
        values = {
            f'imagefleet_worker_info{{{labels},worker="{worker}",gpu="{gpu}",group="g"}}': 1,
            f"imagefleet_images_total{{{labels}}}": images_per_second * seconds,
            f'imagefleet_cost_dollars_total{{{labels},kind="gpu"}}': price
            * seconds
            / 3600,
            f'imagefleet_cost_dollars_total{{{labels},kind="storage"}}': price
            * seconds
            / 14_400,
            f"imagefleet_price_dollars_per_hour{{{labels}}}": price,
            f"imagefleet_gpu_busy_seconds_total{{{labels}}}": 0.75 * seconds,
            f'imagefleet_gpu_idle_seconds_total{{{labels},reason="starved"}}': 0.25
            * seconds,
            f'imagefleet_jobs_total{{{labels},outcome="completed"}}': images_per_second
            * seconds,
            f'imagefleet_failed_jobs_total{{{labels},error="JobError"}}': 0,
        }
        lines += [f"{name} {value} {at}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class TwoFleets:
    """A server with the metrics of two fleets, which no other test has used."""

    url: str
    folder: str
    other: str

    @property
    def fleet(self) -> str:
        """That of a storage in *folder*."""
        return f"{self.folder}/jobs"


@pytest.fixture
async def two_fleets(victoria_metrics) -> TwoFleets:
    """A fast worker and a slow one, and another fleet's."""
    name = uuid.uuid4().hex[:12]
    fleets = TwoFleets(victoria_metrics.url, f"a-{name}", f"b-{name}/jobs")
    text = history("fast", "RTX 4090 24GB", 4.0, 0.16, fleets.fleet)
    text += history("slow", "RTX 3060 8GB", 0.5, 0.04, fleets.fleet)
    await pushed(
        victoria_metrics, text + history("other", "RTX 4090 24GB", 9, 0.2, fleets.other)
    )
    return fleets


async def pushed(victoria_metrics: Any, text: str) -> None:
    async with (
        aiohttp.ClientSession() as client,
        client.post(victoria_metrics.push_url, data=text) as response,
    ):
        assert response.status == 204
    await victoria_metrics.arrived()


async def test_status_shows_images_per_second_and_per_dollar(
    two_fleets: TwoFleets, tmp_path, imagefleet: Imagefleet
):
    address = f"local:{tmp_path}/{two_fleets.folder}"
    async with open_storage(StorageSettings(storage=address)) as storage:
        await storage.create()
    arguments = ("status", "--storage", address, "--prometheus", two_fleets.url)
    result = await asyncio.to_thread(imagefleet, *arguments, "--json")
    fleet = json.loads(result.stdout)["fleet"]

    assert fleet["workers"] == 2
    assert fleet["images_per_second"] == pytest.approx(4.5, rel=0.01)
    assert fleet["images_per_dollar_gpu_only"] == pytest.approx(
        4.5 * 3600 / 0.2, rel=0.01
    )
    assert fleet["images_per_dollar"] == pytest.approx(4.5 * 3600 / 0.25, rel=0.01)
    assert fleet["dollars_per_hour"] == pytest.approx(0.25, rel=0.01)
    assert fleet["gpu_idle_fraction"] == pytest.approx(0.25, rel=0.01)

    text = " ".join((await asyncio.to_thread(imagefleet, *arguments)).stdout.split())
    assert re.search(r"images per dollar, all in 6[45],\d{3}", text), text
    assert "GPU idle 25.0 %" in text


async def test_two_gpus_of_a_machine_are_two_workers_and_one_replica(
    victoria_metrics,
):
    fleet = uuid.uuid4().hex[:12]
    machine = uuid.uuid4().hex[:12]
    text = history("0", "H200", 4.0, 2.0, fleet, machine)
    await pushed(
        victoria_metrics, text + history("1", "H200", 1.0, 2.0, fleet, machine)
    )

    async with prometheus.connected(victoria_metrics.url, fleet) as server:
        rates_now = await rates.fleet_rates(server)
    assert (rates_now["workers"], rates_now["replicas"]) == (2, 1)


async def test_all_fleets_are_added_up_only_where_that_is_asked_for(
    two_fleets: TwoFleets,
):
    async with prometheus.connected(two_fleets.url) as everything:
        assert (await rates.fleet_rates(everything))["workers"] >= 3
    async with prometheus.connected(two_fleets.url, two_fleets.fleet) as own:
        assert (await rates.fleet_rates(own))["workers"] == 2


async def test_the_exporter_serves_and_pushes_until_sigterm(victoria_metrics, tmp_path):
    address = f"local:{tmp_path}/storage"
    async with open_storage(StorageSettings(storage=address)) as storage:
        await storage.create()
        await storage.queue.send(["a", "b"])
    command = [
        COMMAND,
        "exporter",
        "--storage",
        address,
        "--port",
        "0",
        "--sample-seconds",
        "0.2",
    ]
    exporter = await asyncio.create_subprocess_exec(
        *command,
        "--push-url",
        victoria_metrics.push_url,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert exporter.stderr is not None
        start = json.loads(await exporter.stderr.readline())
        assert (start["severity"], start["action"]) == ("INFO", "start")
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{start['port']}") as client,
        ):

            async def page() -> str:
                async with client.get("/metrics") as response:
                    return await response.text()

            seen = await polling.until(
                page,
                lambda page: (
                    'queue_messages{fleet="storage/jobs",queue="jobs",' in page
                ),
            )
        assert (
            'imagefleet_queue_messages{fleet="storage/jobs",queue="jobs",state="visible"} 2.0'
            in seen
        )
    finally:
        exporter.send_signal(signal.SIGTERM)
    assert await exporter.wait() == 0
    await victoria_metrics.arrived()
    query = 'imagefleet_queue_messages{job="imagefleet-exporter",queue="jobs",state="visible"}'
    assert [each["value"][1] for each in await victoria_metrics.ask(query)] == ["2"]
