"""`imagefleet cancel`: ends a campaign's jobs that wait, and its running loads."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet import console, options
from imagefleet import cancelled, validation
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings

if TYPE_CHECKING:
    from imagefleet.records.reader import Counts


@options.from_settings(StorageSettings)
def command(
    settings: StorageSettings,
    campaign: Annotated[
        str, typer.Option(metavar="NAME", help="The campaign; `default` for jobs without one.")
    ],
    dry_run: Annotated[bool, options.dry_run("what would be cancelled")] = False,
    yes: options.Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Cancels the queued jobs of a campaign.

    It also ends its running loads. Workers obey within ten seconds, at the speed of the queue;
    what they are drawing is finished and stored. Other campaigns are not touched, and a later load
    of the same one runs.

    imagefleet cancel --campaign spring --dry-run

    imagefleet cancel --campaign spring
    """
    options.check_campaign(campaign)
    console.run(_cancel(settings, campaign, dry_run=dry_run, yes=yes, as_json=as_json))


async def _cancel(
    settings: StorageSettings, campaign: str, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    from imagefleet.records import reader

    async with console.connected(settings) as fleet:
        storage = fleet.storage
        found = await reader.counts(storage, campaign)
        messages = (await storage.queue.depth()).messages
        if dry_run and as_json:
            console.print_json(_record(storage, campaign, found, messages, None))
            return
        await _describe(storage, campaign, found, messages, dry_run=dry_run)
        if dry_run:
            return
        console.confirm(f"Cancel what is left of campaign {campaign}?", yes=yes)
        with console.stderr.status("the list is written; running loads read it within 10 seconds"):
            at = await cancelled.cancel(storage, campaign)
        if as_json:
            console.print_json(_record(storage, campaign, found, messages, at))
        else:
            console.print_plain(
                f"campaign {campaign} is cancelled: workers end what was sent until"
                f" {at:%Y-%m-%d %H:%M:%S} UTC, and a load that begins now runs"
            )


async def _describe(
    storage: Storage, campaign: str, found: Counts, messages: int, *, dry_run: bool
) -> None:
    from imagefleet.records import reader

    to = console.stdout if dry_run else console.stderr
    in_queue = f"the queue {storage.queue.name} holds {console.counted(messages, 'message')}"
    if found.first_at is None:
        names = [name async for name in reader.campaigns(storage)]
        hint = validation.suggestion(campaign, names) or ""
        console.print_plain(
            f"nothing is recorded of a campaign {campaign}{hint}; {in_queue}, of which its jobs"
            " would be cancelled",
            to,
        )
        return
    left = "an unknown number" if found.pending is None else console.counted(found.pending, "job")
    console.print_facts(
        {
            "campaign": campaign,
            "sent": console.number(found.sent),
            "completed": f"{found.completed:,}",
            "failed": f"{found.failed:,}",
            "cancelled before": f"{found.cancelled:,}",
            "would be cancelled": f"{left}, less what is being drawn; {in_queue}",
        },
        to,
    )


def _record(
    storage: Storage, campaign: str, found: Counts, messages: int, at: datetime | None
) -> dict[str, Any]:
    return {
        "campaign": campaign,
        "queue": storage.queue.name,
        "messages": messages,
        **asdict(found),
        "pending": found.pending,
        "cancelled_until": at,
    }
