import socket

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from imagefleet import errors
from imagefleet.telemetry import probes


@pytest.mark.parametrize(
    ("host", "shown"), [("::1", "[::1]:80"), ("127.0.0.1", "127.0.0.1:80")]
)
def test_an_ipv6_address_stands_in_brackets(host: str, shown: str):
    assert probes.authority(host, 80) == shown


async def test_the_probes_report_the_state_of_the_worker():
    registry = CollectorRegistry()
    Counter("imagefleet_images", "Images stored.", registry=registry).inc(3)
    state = {"live": True, "ready": False}
    async with (
        probes.serving(
            registry,
            is_live=lambda: state["live"],
            is_ready=lambda: state["ready"],
            host="127.0.0.1",
            port=0,
        ) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
    ):

        async def status(path: str) -> int:
            async with client.get(path) as response:
                return response.status

        assert (await status("/live"), await status("/ready")) == (200, 503)
        state.update(live=False, ready=True)
        assert (await status("/live"), await status("/ready")) == (503, 200)
        async with client.get("/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=")
            text = await response.text()
            assert "imagefleet_images_total 3.0" in text
            assert "_created" not in text
        assert await status("/etc/passwd") == 404


async def test_a_port_in_use_is_a_setup_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(errors.SetupError, match=f"{port}.*--port"):
            async with probes.serving(
                CollectorRegistry(),
                is_live=lambda: True,
                is_ready=lambda: True,
                host="127.0.0.1",
                port=port,
            ):
                pass
