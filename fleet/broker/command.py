"""`imagefleet broker`: issues short-lived tokens to workers on SaladCloud."""

from __future__ import annotations

import asyncio
import logging

from fleet import console, options
from fleet.settings import BrokerSettings
from imagefleet import errors
from imagefleet.telemetry import logs, probes

log = logging.getLogger(__name__)


@options.from_settings(BrokerSettings)
async def command(settings: BrokerSettings) -> None:
    """Issues short-lived SAS tokens to workers on SaladCloud.

    Its address is the workers' IMAGEFLEET_BROKER_URL. A node authenticates with SaladCloud's
    identity token, and the account's key stays here. Run it behind a proxy that terminates TLS:
    workers use https only.

    imagefleet broker --organization acme
    """
    logs.configure(settings.log_format)
    if not settings.organization:
        raise errors.SetupError("--organization is required: any other's nodes would get tokens")
    try:
        from fleet.broker import service
    except ModuleNotFoundError as error:
        raise errors.SetupError(
            f"{error.name} is not installed; for the broker: pip install '.[broker]'"
        ) from None
    fleets = settings.salad_fleets.split(",") if settings.salad_fleets else ()
    broker = service.Broker(settings, service.Identities(settings.organization, fleets))
    app = service.application(broker)
    async with probes.listening(app, settings.host, settings.port, "requests") as port:
        log.info(
            "issuing tokens on port %d to nodes of %s",
            port,
            settings.salad_fleets or settings.organization,
            extra={"action": "broker_started"},
        )
        await console.until_stopped(asyncio.Event().wait())
