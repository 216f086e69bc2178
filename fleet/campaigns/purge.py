"""`imagefleet purge`: empties the job queue."""

from __future__ import annotations

from typing import Annotated

from fleet import console, options
from imagefleet.storage.settings import StorageSettings


@options.from_settings(StorageSettings)
def command(
    settings: StorageSettings,
    dry_run: Annotated[bool, options.dry_run("how many messages would be deleted")] = False,
    yes: options.Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Deletes all messages of the job queue for good.

    Those in flight, too: workers finish what they can within half a lease, and drop the rest.
    Failed jobs stay, and a running load goes on: `imagefleet cancel` ends one campaign with its
    loads.

    imagefleet purge --dry-run

    imagefleet purge
    """
    console.run(_purge(settings, dry_run=dry_run, yes=yes, as_json=as_json))


async def _purge(settings: StorageSettings, *, dry_run: bool, yes: bool, as_json: bool) -> None:
    async with console.connected(settings) as fleet:
        queue = fleet.storage.queue
        count = (await queue.depth()).messages
        messages = console.counted(count, "message")
        if not dry_run:
            if count:
                question = f"Delete {messages} of the queue {queue.name} for good?"
                console.confirm(question, yes=yes)
            await queue.clear()
        if as_json:
            console.print_json({"queue": queue.name, "messages": count, "deleted": not dry_run})
        elif dry_run:
            console.print_plain(f"{messages} of the queue {queue.name} would be deleted")
        else:
            console.print_plain(f"{messages} of the queue {queue.name} deleted")
