"""A fleet that pushes to a real Prometheus, and every query of the dashboards.

One scenario, run once: three workers and an exporter push for a minute, one worker is killed, the
others are stopped, and a report is made. The tests check what was recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fleet.monitor import prometheus
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

COMMAND = Path(sys.executable).with_name("imagefleet")

#: The command, with pushes and measurements every second.
FAST_COMMAND = """
from fleet.entry import main
from imagefleet.telemetry import push
from worker import pipeline
push.PUSH_SECONDS = pipeline.DEPTH_SECONDS = 1.0
main()
"""
PAGES = Path(__file__).parents[2] / "dashboards" / "grafana"

CAMPAIGN = "live"
LORA = "magic"
JOBS = 10_000
PUSHING_SECONDS = 60

#: Five minutes by default; shorter here, so that a dead worker's series go stale sooner.
LOOK_BACK = "10s"

#: Grafana's variables: at least four pushes of a second each, and the time range.
VARIABLES = {"$__rate_interval": "10s", "$__range": f"{PUSHING_SECONDS}s"}

Tool = Callable[[str], str]  # the fixture of conftest.py
Answers = dict[str, list[prometheus.Series]]


@dataclass(frozen=True, slots=True)
class Seen:
    """What the scenario recorded."""

    answers: Answers
    metrics: set[str]
    before_the_kill: set[str]
    after_the_kill: set[str]
    victim: str
    report: dict[str, Any]


def queries() -> list[Any]:
    """Every query of every panel, named by its page, panel and letter."""
    found = []
    for path in sorted(PAGES.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                name = f"{path.stem}: {panel['title']}: {target['refId']}"
                found.append(pytest.param(target["expr"], id=name))
    return found


@pytest.fixture(scope="module")
def seen(tool: Tool, dashboards: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("live")
    with contextlib.ExitStack() as processes:
        server = start_prometheus(processes, tool, dashboards, folder)
        push_url = start_vmagent(processes, tool, server, folder)
        yield watch(processes, server, push_url, folder)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("expression", queries())
def test_the_panel_has_data(seen: Seen, expression: str) -> None:
    assert seen.answers[expression], f"nothing answers {expression}"


def test_every_metric_that_is_pushed_is_in_the_readme(seen: Seen, dashboards: Path) -> None:
    text = (dashboards / "README.md").read_text()
    documented = set(re.findall(r"^\| `(imagefleet_[^`{]+)", text, re.MULTILINE))
    pushed = {re.sub(r"_(sum|count|bucket)$", "", name) for name in seen.metrics}
    assert pushed == documented


def test_a_killed_workers_series_go_stale_and_the_others_stay(seen: Seen) -> None:
    assert len(seen.before_the_kill) == 3
    assert seen.after_the_kill == seen.before_the_kill - {seen.victim}


def test_the_metrics_and_the_records_agree_on_images_per_dollar(seen: Seen) -> None:
    records, metrics = seen.report, seen.report["metrics"]
    assert metrics["images"] == pytest.approx(records["images"], rel=0.01)
    by_records = records["money"]["images_per_dollar_gpu_only"]
    assert metrics["images_per_dollar_gpu_only"] == pytest.approx(by_records, rel=0.01)
    assert metrics["jobs"]["duplicate"] > 0
    assert records["failed"] > 0


def start_prometheus(
    processes: contextlib.ExitStack, tool: Tool, dashboards: Path, folder: Path
) -> str:
    """Starts Prometheus with the rules, evaluated every second; returns its URL."""
    for name in ("rules.yaml", "alerts.yaml"):
        text = (dashboards / "prometheus" / name).read_text()
        (folder / name).write_text(text.replace("interval: 30s", "interval: 1s"))
    config = folder / "prometheus.yaml"
    config.write_text("global: {evaluation_interval: 1s}\nrule_files: [rules.yaml, alerts.yaml]\n")
    address = f"127.0.0.1:{free_port()}"
    command = [
        tool("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        f"--query.lookback-delta={LOOK_BACK}",
        "--web.enable-remote-write-receiver",
        "--log.level=error",
    ]
    processes.enter_context(started(command, folder / "prometheus.log"))
    return f"http://{address}"


def start_vmagent(processes: contextlib.ExitStack, tool: Tool, server: str, folder: Path) -> str:
    """Starts a vmagent that forwards to *server*; returns the URL to push to."""
    address = f"127.0.0.1:{free_port()}"
    command = [
        tool("vmagent"),
        f"-remoteWrite.url={server}/api/v1/write",
        f"-remoteWrite.tmpDataPath={folder / 'vmagent'}",
        f"-httpListenAddr={address}",
        "-loggerLevel=ERROR",
    ]
    processes.enter_context(started(command, folder / "vmagent.log"))
    return f"http://{address}/api/v1/import/prometheus"


def watch(processes: contextlib.ExitStack, server: str, push_url: str, folder: Path) -> Seen:
    model = make_model(folder)
    storage = f"local:{folder / 'storage'}"
    asyncio.run(fill(storage))
    flags = ["--storage", storage, "--push-url", push_url]
    worker = ["worker", "--model", model, "--lora-directory", folder / "loras", "--slots", "4"]
    worker += ["--gpu"]
    fast = [sys.executable, "-c", FAST_COMMAND]
    workers = [
        processes.enter_context(
            started(
                [*fast, *worker, gpu, "--name", f"worker-{number}", *flags],
                folder / f"worker-{number}.log",
            )
        )
        for number, gpu in enumerate(["RTX 3060 Ti", "RTX 3060 Ti", "RTX 4090"])
    ]
    exporter = processes.enter_context(
        started(
            [
                *fast,
                "exporter",
                "--prometheus",
                server,
                "--sample-seconds",
                "1",
                "--port",
                "0",
                *flags,
            ],
            folder / "exporter.log",
        )
    )
    wait_until(lambda: len(busy_workers(server)) == 3, 90, folder)
    time.sleep(PUSHING_SECONDS)

    answers = asyncio.run(ask_all(server))
    metrics = names_of_metrics(server)
    before = busy_workers(server)
    workers[0].kill()
    victim = "worker-0"
    # Its series are stale at the latest when the look-back is over.
    wait_until(lambda: victim not in busy_workers(server), 40, folder)
    after = busy_workers(server)
    for process in (*workers[1:], exporter):
        process.send_signal(signal.SIGTERM)
    for process in (*workers[1:], exporter):
        assert process.wait(60) == 0, logs(folder)
    time.sleep(3)  # until vmagent has forwarded the last push
    report = [COMMAND, "report", "--storage", storage, "--campaign", CAMPAIGN, "--json"]
    printed = subprocess.run(
        [*report, "--prometheus", server],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert printed.returncode == 0, printed.stderr
    return Seen(answers, metrics, before, after, victim, json.loads(printed.stdout))


def make_model(folder: Path) -> Path:
    import tiny_model

    model = tiny_model.build_tiny_checkpoint(folder / "tiny")
    tiny_model.build_tiny_lora(folder / "loras" / f"{LORA}.safetensors", model)
    return model


async def fill(storage: str) -> None:
    """Sends more jobs than can be done: plain, with a LoRA, duplicates and bad ones."""
    job: dict[str, Any] = {"prompt": "a house", "steps": 4, "campaign": CAMPAIGN}
    messages = []
    for number in range(JOBS // 10):
        messages += [{**job, "id": f"j{number}-{each}"} for each in range(4)]
        lora = f"a house <lora:{LORA}:0.5>"
        messages += [{**job, "id": f"l{number}-{each}", "prompt": lora} for each in range(3)]
        messages.append({**job, "id": f"j{max(0, number - 20)}-0"})
        messages.append({**job, "id": f"m{number}", "prompt": "a house <lora:nowhere:1>"})
        messages.append({"prompt": "a house", "stepz": 4})
    async with open_storage(StorageSettings(storage=storage)) as opened:
        await opened.create()
        await opened.queue.send(json.dumps(message) for message in messages)


async def ask_all(server: str) -> Answers:
    answers = {}
    async with prometheus.connected(server) as client:
        for each in queries():
            (expression,) = each.values
            asked = expression
            for name, value in VARIABLES.items():
                asked = asked.replace(name, value)
            answers[expression] = await client.at(asked, now())
    return answers


def busy_workers(server: str) -> set[str]:
    """The names of the workers that have made images and are not stale."""
    question = "imagefleet_worker_info and on (job, instance) imagefleet_images_total > 0"

    async def ask() -> set[str]:
        async with prometheus.connected(server) as client:
            found = await client.at(question, now())
        return {series.labels["worker"] for series in found}

    return asyncio.run(ask())


def names_of_metrics(server: str) -> set[str]:
    """All metrics that were pushed."""

    async def ask() -> set[str]:
        async with prometheus.connected(server) as client:
            found = await client.at('count by (__name__) ({__name__=~"imagefleet_.+"})', now())
        return {series.labels["__name__"] for series in found}

    return asyncio.run(ask())


def wait_until(is_so: Callable[[], bool], seconds: float, folder: Path) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, logs(folder)
        time.sleep(0.5)


def logs(folder: Path) -> str:
    return "\n".join(
        f"{path.name}: {path.read_text()[-1000:]}" for path in sorted(folder.glob("*.log"))
    )


@contextlib.contextmanager
def started(command: list[Any], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def environment() -> dict[str, str]:
    """Without the settings of the person who runs the tests; conftest removes them later."""
    kept = {name: value for name, value in os.environ.items() if "IMAGEFLEET" not in name}
    return {**kept, "OMP_NUM_THREADS": "1"}


def now() -> datetime:
    return datetime.now(UTC)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port: int = bound.getsockname()[1]
        return port
