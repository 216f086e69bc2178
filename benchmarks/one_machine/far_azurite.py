"""An Azurite of its own whose answers take as long as those of a storage in another region."""

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "chaos"))

import azurite

#: Read at once from a connection.
_CHUNK_BYTES = 1 << 18

#: Chunks on their way in one direction of a connection: more than are read in any delay.
_CHUNKS = 1024


@contextlib.asynccontextmanager
async def running(round_trip_seconds: float) -> AsyncIterator[str]:
    """Starts it empty; gives its connection string, by which each round trip takes so much longer.

    Raises:
        SystemExit: there is no Azurite, and why.
    """
    if why := azurite.why_missing():
        sys.exit(why)
    async with contextlib.AsyncExitStack() as stack:
        address = stack.enter_context(azurite.running())
        for port in re.findall(r"127\.0\.0\.1:(\d+)", address):
            server = await asyncio.start_server(
                _Forwarder(int(port), round_trip_seconds / 2), "127.0.0.1", 0
            )
            stack.callback(server.close)
            here = server.sockets[0].getsockname()[1]
            address = address.replace(f":{port}/", f":{here}/")
        yield address


class _Forwarder:
    """Forwards a connection to *port* of this machine; every byte arrives *delay_seconds* later."""

    def __init__(self, port: int, delay_seconds: float) -> None:
        self._port = port
        self._delay_seconds = delay_seconds

    async def __call__(
        self, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter
    ) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._forward(client_reader, writer))
                tasks.create_task(self._forward(reader, client_writer))
        except* ConnectionError:
            pass  # one of the two has gone
        finally:
            writer.close()
            client_writer.close()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._deliver(on_the_way, writer))
            while True:
                chunk = await reader.read(_CHUNK_BYTES)
                due_at = asyncio.get_running_loop().time() + self._delay_seconds
                await on_the_way.put((due_at, chunk))
                if not chunk:
                    return

    async def _deliver(
        self,
        on_the_way: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_at, chunk = await on_the_way.get()
            await asyncio.sleep(due_at - loop.time())
            if not chunk:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(chunk)
            await writer.drain()
