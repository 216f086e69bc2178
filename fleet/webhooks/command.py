"""`imagefleet webhooks`: reports the ends of campaigns and jobs to a web address."""

from datetime import datetime
from pathlib import Path

from cli import console, options, target
from cli.options import option
from fleet.monitor import service as monitored
from fleet.settings import WebhookSettings
from fleet.webhooks import endpoint
from fleet.webhooks.events import Source, State
from fleet.webhooks.service import Service
from imagefleet import redaction
from imagefleet.telemetry import logs, metrics, proxies


@options.flat
async def command(
    settings: WebhookSettings,
    campaign: target.OnlyCampaign = None,
    each_job: bool = option(
        "Also the end of each job, not only of campaigns.", default=False
    ),
    since: datetime | None = options.moment("Only what was stored since then"),
    *,
    url: str = option("Where events are sent: https only.", ..., metavar="URL"),
    secret_file: Path = option(
        "The secret that signs, whsec_ and base64; several, one a line, while you replace it.",
        ...,
        metavar="FILE",
    ),
    state: Path = option(
        "Record of what was delivered.", Path("webhooks.json"), metavar="FILE"
    ),
    once: bool = option("Send what is new, then exit, for cron.", default=False),
) -> None:
    """Sends webhooks when campaigns and jobs end.

    It follows the records that workers write, signs as Standard Webhooks does, and tries again for
    three days; a fleet needs one. A job's end is sent with --each-job. Each event is sent at least
    once, with an id that stays the same. On the first start it sends what the records have so far:
    --since leaves out older ones.

    imagefleet webhooks --url https://example.com/hook --secret-file secret.txt

    imagefleet webhooks --url https://example.com/hook --secret-file secret.txt --each-job
    """
    logs.configure(settings.log_format)
    campaign = target.campaign(campaign)
    endpoint.check_url(url)
    secrets = endpoint.read_secrets(secret_file)
    registry = metrics.LabelledRegistry({"fleet": settings.fleet_name})
    with console.only_one(state):
        console.check_writable(state)
        found = State.read(state, redaction.address(url), campaign)
        async with (
            console.connected(settings) as client,
            proxies.session() as session,
        ):
            source = Source(
                client.storage,
                found,
                settings.fleet_name,
                each_job=each_job,
                since=since,
            )
            receiver = endpoint.Endpoint(
                session, url, secrets, client.storage.blobs.clock
            )
            running = Service(source, receiver, registry, state)
            if once:
                await console.until_stopped(running.run(once=True))
            else:
                await monitored.run(
                    running.run,
                    registry,
                    settings,
                    name="imagefleet-webhooks",
                    doing=f"sending to {found.address}",
                )
