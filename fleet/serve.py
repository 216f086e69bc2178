"""`imagefleet serve`: AUTOMATIC1111's and OpenAI's APIs in front of the storage."""

import asyncio
import sys

from cli import console, options
from gateway import server
from gateway.jobs.desk import Desk
from gateway.settings import GatewaySettings
from imagefleet import aio, concurrency
from imagefleet.http import bodies
from imagefleet.storage.open import open_storage
from imagefleet.telemetry import logs, probes
from imagefleet.telemetry.logs import log
from worker.settings import WorkerSettings, require_libraries

#: Seconds for which a thread that parses keeps Python's lock, while the event loop waits for it.
_SWITCH_SECONDS = 0.001

#: The settings of the gateway that are its worker's as well.
_SHARED = GatewaySettings.model_fields.keys() & WorkerSettings.model_fields.keys()


@options.flat
async def command(settings: GatewaySettings) -> None:
    """Serves AUTOMATIC1111's and OpenAI's APIs in front of the storage.

    Their clients need no change but this address. Each key in the file of --clients has a campaign
    of its own; without the file, only programs of this machine are served. With --model it starts
    a worker as well; else workers are elsewhere. Its API is at /docs. Runs until SIGTERM or Ctrl-C.

    imagefleet serve --model ./model.safetensors

    imagefleet serve --host 0.0.0.0 --clients clients.yaml
    """
    logs.configure(settings.log_format)
    if settings.model is None:
        _serve_alone()
    async with aio.Fleet(open_storage(settings), settings.keys()) as fleet:
        await fleet.storage.create()
        async with server.serving(fleet, settings) as (gateway, port):
            url = f"http://{probes.authority(settings.host, port)}"
            log.info(
                f"serving {fleet.storage.url} at {url}; its API: {url}/docs",
                action="start",
            )
            tasks = [gateway.desk.run()]
            if settings.model is not None:
                tasks.append(_work(settings, gateway.desk))
            await console.until_stopped(concurrency.gather(*tasks))


def _serve_alone() -> None:
    """Sets up a process whose threads only serve: of a worker's, both would cost images/s."""
    bodies.give_memory_back()
    sys.setswitchinterval(_SWITCH_SECONDS)


async def _work(settings: GatewaySettings, desk: Desk) -> None:
    """Runs a worker in this process; a signal ends it, and then the gateway."""
    require_libraries()
    from worker import process  # needs the extra `worker`

    shared = {name: getattr(settings, name) for name in _SHARED}
    of_metrics = {"host": "127.0.0.1", "port": 0}
    await process.run_worker(
        options.read(WorkerSettings, shared | of_metrics),
        on_settled=lambda _: desk.look_soon(),
    )
    raise asyncio.CancelledError
