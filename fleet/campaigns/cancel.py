"""`imagefleet cancel`: ends or pauses a campaign's waiting jobs, or empties the queue."""

from dataclasses import asdict

from cli import console, options, target
from cli.options import argument, option
from fleet.results import forms
from imagefleet import cancelled
from imagefleet.errors import SetupError
from imagefleet.records import reader
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import JobQueue
from imagefleet.storage.settings import StorageSettings


@options.flat
async def command(
    settings: StorageSettings,
    campaign: str | None = argument(
        "The campaign; `default` for jobs without one.", None, metavar="CAMPAIGN"
    ),
    everything: bool = option(
        "Delete all messages of the job queue for good, of all campaigns.",
        False,
        "--all",
    ),
    pause: bool = option("Put the jobs off until --resume, and cancel none.", False),
    resume: bool = option("Go on with the jobs of a paused campaign.", False),
    dry_run: bool = options.dry_run("what would be cancelled or deleted"),
    yes: options.Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Cancels the queued jobs of a campaign.

    It also ends its running loads. Workers obey within ten seconds, at the speed of the queue;
    what they are drawing is finished and stored. Other campaigns are not touched, and a later load
    of the same one runs. With --all the queue is emptied, messages in flight included: workers
    drop what they cannot finish within half a lease. Failed jobs stay, and running loads go on.

    With --pause workers put the jobs off, five minutes at a time, whenever they are sent. They stay
    in the queue, so a fleet that scales by it stays up. A campaign that is cancelled is paused no
    more.

    imagefleet cancel spring --dry-run

    imagefleet cancel spring

    imagefleet cancel spring --pause

    imagefleet cancel spring --resume

    imagefleet cancel --all
    """
    named = target.campaign(campaign)
    if everything == (named is not None):
        raise SetupError("choose what to cancel: a CAMPAIGN or --all")
    if (pause or resume) and (named is None or pause == resume or dry_run):
        raise SetupError(
            "--pause and --resume are for a CAMPAIGN, one of the two, without --dry-run"
        )
    async with console.connected(settings) as fleet:
        storage = fleet.storage
        if unsure := await target.check_campaign(storage, named):
            console.print_warning(unsure)
        if named is None:
            await _clear(storage.queue, dry_run=dry_run, yes=yes, as_json=as_json)
        elif pause or resume:
            await _pause(storage, named, is_paused=pause, as_json=as_json)
        else:
            await _cancel(storage, named, dry_run=dry_run, yes=yes, as_json=as_json)


async def _clear(queue: JobQueue, *, dry_run: bool, yes: bool, as_json: bool) -> None:
    count = (await queue.depth()).messages
    messages = f"{console.counted(count, 'job')} of the queue {queue.name}"
    if not dry_run:
        if count:
            console.confirm(f"Delete {messages} for good?", yes=yes)
        await queue.clear()
    record = {"queue": queue.name, "messages": count, "deleted": not dry_run}
    would = "would be " if dry_run else ""
    console.show(record, f"{messages} {would}deleted", as_json=as_json)


async def _pause(
    storage: Storage, campaign: str, *, is_paused: bool, as_json: bool
) -> None:
    is_new = await cancelled.pause(storage, campaign, is_paused=is_paused)
    sentence = (
        f"campaign {campaign} is paused: workers put its jobs off, within ten seconds;"
        f" `imagefleet cancel {campaign} --resume` goes on"
        if is_paused
        else f"campaign {campaign} is not paused: workers take its jobs, within six minutes"
    )
    if not is_new:
        sentence = f"{sentence} (as before)"
    record = {"campaign": campaign, "paused": is_paused, "changed": is_new}
    console.show(record, sentence, as_json=as_json)


async def _cancel(
    storage: Storage, campaign: str, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    messages = (await storage.queue.depth()).messages
    found = await reader.counts(storage, campaign)
    at = None
    if not (dry_run and as_json):
        left = (
            "an unknown number"
            if found.pending is None
            else console.counted(found.pending, "job")
        )
        held = f"the queue {storage.queue.name} holds {console.counted(messages, 'message')}"
        to = console.stdout if dry_run else console.stderr
        console.print_tables(forms.counts_table(found), to=to)
        console.print_plain(
            f"to be cancelled: {left}, less what is being drawn; {held}", to
        )
    if not dry_run:
        console.confirm(f"Cancel what is left of campaign {campaign}?", yes=yes)
        with console.stderr.status(
            "the list is written; running loads read it within 10 seconds"
        ):
            at = await cancelled.cancel(storage, campaign)
    if as_json:
        console.print_json(
            {
                "campaign": campaign,
                "queue": storage.queue.name,
                "messages": messages,
                **asdict(found),
                "pending": found.pending,
                "cancelled_until": at,
            }
        )
    elif at is not None:
        console.print_plain(
            f"campaign {campaign} is cancelled: workers end what was sent until"
            f" {at:%Y-%m-%d %H:%M:%S} UTC, and a load that begins now runs"
        )
