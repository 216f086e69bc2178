"""`imagefleet webhooks`: reports the ends of campaigns and jobs to a web address."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from fleet import console, options
from fleet.campaigns import target
from fleet.monitor import service as monitored
from fleet.options import option
from fleet.settings import WebhookSettings
from fleet.webhooks import deliveries, endpoint, service
from fleet.webhooks.events import Event, State
from imagefleet import errors, redaction
from imagefleet.telemetry import logs, metrics


@dataclass(frozen=True, slots=True)
class Events:
    """Which events are sent."""

    campaign: target.OnlyCampaign = None
    each_job: bool = option("Also the end of each job, not only of campaigns.", default=False)
    since: options.Since = None


@options.from_settings(WebhookSettings)
async def command(
    settings: WebhookSettings,
    events: Events,
    url: str = option("Where events are sent: https only.", ..., metavar="URL"),
    secret_file: Path = option(
        "The secret that signs, whsec_ and base64; several, one a line, while you replace it.",
        ...,
        metavar="FILE",
    ),
    state: Path = option("Record of what was delivered.", Path("webhooks.json"), metavar="FILE"),
    once: bool = option("Send what is new, then exit, for cron.", default=False),
    resume: bool = option("Send even if the address answered 410 Gone.", default=False),
    dry_run: bool = options.dry_run("what would be sent, one JSON object per line"),
) -> None:
    """Sends webhooks when campaigns and jobs end.

    It follows the records that workers write, signs as Standard Webhooks does, and tries again for
    three days; a fleet needs one. A job's end is sent with --each-job. Each event is sent at least
    once, with an id that stays the same. On the first start it sends what the records have so far:
    --since leaves out older ones.

    imagefleet webhooks --url https://example.com/hook --secret-file secret.txt

    imagefleet webhooks --url https://example.com/hook --secret-file secret.txt --each-job --dry-run
    """
    logs.configure(settings.log_format)
    campaign = target.campaign(events.campaign)
    endpoint.checked_url(url)
    signer = endpoint.Signer.read(secret_file)
    moment = options.read_moment("--since", events.since)
    wanted = service.Wanted(settings.fleet_name, campaign, each_job=events.each_job, since=moment)
    in_use = f"another `imagefleet webhooks` keeps the state {state}"
    # A preview may run beside the service itself.
    with contextlib.nullcontext() if dry_run else console.only_one(state, in_use):
        console.check_writable(None if dry_run else state)
        found = State.read(state, redaction.address(url), campaign)
        async with console.connected(settings) as client:
            if dry_run:
                await _preview(service.Source(client.storage, wanted, found), found)
                return
            if found.gone_at is not None and not resume:
                raise errors.SetupError(service.gone(found))
            found.gone_at = None
            source = service.Source(client.storage, wanted, found)
            await _deliver(settings, source, found, state, (url, signer), once=once)


async def _deliver(
    settings: WebhookSettings,
    source: service.Source,
    state: State,
    state_file: Path,
    receiver: tuple[str, endpoint.Signer],
    *,
    once: bool,
) -> None:
    registry = metrics.LabelledRegistry({"fleet": settings.fleet_name})
    async with aiohttp.ClientSession(trust_env=True) as session:
        to = endpoint.Endpoint(session, *receiver)
        sending = deliveries.Deliveries(to, registry, state)
        running = service.Service(source, sending, state, state_file)
        if once:
            await console.until_stopped(running.run(once=True))
            return
        await monitored.run(
            running.run,
            registry,
            settings,
            name="imagefleet-webhooks",
            doing=f"sending to {to.address}",
        )


async def _preview(source: service.Source, state: State) -> None:
    """Prints what would be sent."""
    known = state.waiting.keys() | state.delivered
    for waiting in state.waiting.values():
        _print(waiting.event)
    while await source.read():
        while (event := source.next_event()) is not None:
            if event.id not in known:
                _print(event)
    async for event in source.ends.found(is_patient=False):
        _print(event)


def _print(event: Event) -> None:
    console.print_json_line({"webhook-id": event.id, **json.loads(event.body())})
