import asyncio
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from fleet import health
from imagefleet.telemetry import probes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("code", "is_so"), [(0, True), (1, False)])
@pytest.mark.parametrize("what", ["started", "live", "ready"])
async def test_a_probe_reports_the_workers_state(
    what: str,
    code: int,
    is_so: bool,
    serve_probes: Callable[[bool], AbstractAsyncContextManager[int]],
    capsys,
):
    async with serve_probes(is_so) as port:
        assert await asyncio.to_thread(health.main, [what, "--port", str(port)]) == code

    output = capsys.readouterr().out
    assert output.startswith(f"{what}: " if is_so else f"not {what}: ")
    assert output.count("\n") == 1


def test_a_hung_worker_is_not_live(capsys, monkeypatch):
    monkeypatch.setattr(health, "TIMEOUT_SECONDS", 0.2)
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as hanging:  # the kernel accepts, but nothing answers
        assert health.main(["live", "--port", str(hanging.getsockname()[1])]) == 1

    assert "hangs: no answer within 0.2 s" in capsys.readouterr().out


def test_a_missing_worker_is_not_live(capsys):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = str(gone.getsockname()[1])

    assert health.main(["live", "--port", port]) == 1
    assert "no answer from port" in capsys.readouterr().out


@pytest.mark.parametrize("port", ["", "0", "http", "65536"])
def test_an_invalid_port_names_the_setting(port: str, monkeypatch, capsys):
    monkeypatch.setenv("IMAGEFLEET_PORT", port)

    assert health.main(["ready"]) == 1
    assert "IMAGEFLEET_PORT" in capsys.readouterr().out


async def test_the_workers_settings_are_used_and_proxies_are_not(
    monkeypatch,
):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("IMAGEFLEET_HOST", "0.0.0.0")
    async with probes.serving(
        CollectorRegistry(), is_live=bool, is_ready=bool, host="127.0.0.1", port=0
    ) as port:
        monkeypatch.setenv("IMAGEFLEET_PORT", str(port))
        assert await asyncio.to_thread(health.main, ["started"]) == 0
