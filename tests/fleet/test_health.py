from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from fleet import health
from imagefleet.telemetry import probes as worker_health

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("code", "is_so"), [(0, True), (1, False)])
@pytest.mark.parametrize("what", ["started", "live", "ready"])
async def test_a_probe_hears_what_the_worker_says(
    what: str, code: int, is_so: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async with worker_health.serving(
        CollectorRegistry(),
        is_live=lambda: is_so,
        is_ready=lambda: is_so,
        is_started=lambda: is_so,
        host="127.0.0.1",
        port=0,
    ) as port:
        assert await asyncio.to_thread(health.main, [what, "--port", str(port)]) == code

    said = capsys.readouterr().out
    assert said.startswith(f"{what}: " if is_so else f"not {what}: ")
    assert said.count("\n") == 1


def test_a_worker_that_hangs_is_not_live(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # the system answers, nobody else
        port = str(hanging.getsockname()[1])
        assert health.main(["live", "--port", port, "--seconds", "0.2"]) == 1

    assert "it hangs" in capsys.readouterr().out


def test_a_worker_that_is_not_there_is_not_live(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = str(gone.getsockname()[1])

    assert health.main(["live", "--port", port]) == 1
    assert "nothing answers" in capsys.readouterr().out


@pytest.mark.parametrize("port", ["", "0", "http", "65536"])
def test_without_a_port_it_says_which_setting_is_missing(
    port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("IMAGEFLEET_PORT", port)

    assert health.main(["ready"]) == 1
    assert "IMAGEFLEET_PORT" in capsys.readouterr().out


async def test_the_workers_own_settings_lead_to_it_past_any_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("IMAGEFLEET_HOST", "0.0.0.0")
    async with worker_health.serving(
        CollectorRegistry(), is_live=bool, is_ready=bool, host="127.0.0.1", port=0
    ) as port:
        monkeypatch.setenv("IMAGEFLEET_PORT", str(port))
        assert await asyncio.to_thread(health.main, ["started"]) == 0


def test_a_probe_takes_a_moment_and_loads_no_library() -> None:
    program = """
import sys
from fleet import entry
sys.argv = ["imagefleet", "health", "live"]
try:
    entry.main()
except SystemExit:
    pass
print("loaded:", sorted({"typer", "pydantic", "rich", "aiohttp"} & set(sys.modules)))
"""

    def probe() -> tuple[float, str]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        output = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, output

    probes = [probe() for _ in range(3)]
    assert "loaded: []" in probes[0][1]
    # Not by the clock, and the best of a few: the machine may be busy with other things.
    assert min(seconds for seconds, _ in probes) < 0.5
