"""`imagefleet redo`: has images drawn again, by other workers, and replaces them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import typer

from fleet import console, options
from fleet.options import option
from fleet.redo import replace, select
from fleet.redo.select import Which
from fleet.verify.quarantine import node_of
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import SignerSettings, StorageSettings
from loadgen import sources
from worker.node import quarantine

#: Lines of a list: about a screen.
_SHOWN = 20


@options.from_settings(SignerSettings)
def command(
    settings: SignerSettings,
    which: Which,
    jobs: Path | None = option(
        "The jobs, a line each or as a template, for images without their job in them; it"
        " takes precedence.",
        metavar="FILE",
    ),
    dry_run: bool = options.dry_run("the number of images by worker"),
    yes: options.Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Has images drawn again, and replaces them.

    Each image is put aside under -replaced/, then its job is sent again, as the image has it in
    itself. If this is interrupted, the next run finishes what was begun. It deletes images: the
    tokens of `imagefleet keys mint operator` allow that. Exit code 4: some images stay, because
    their jobs are not known.

    imagefleet redo --worker 0d8f5c1e-7 --since 2026-12-01T08:00 --dry-run

    imagefleet redo --suspect

    imagefleet redo spring/0001
    """
    given = {}
    if jobs is not None:
        source = sources.open_source(str(jobs), key=settings.keys().signing)
        given = replace.by_key(source.bodies(0))
    result = console.run(_run(settings, which, given, dry_run=dry_run, yes=yes, quiet=as_json))
    if as_json:
        console.print_json(result)
    else:
        _show(result, dry_run=dry_run)
    if result.get("not_redone"):
        raise typer.Exit(console.EXIT_IMAGES_WRONG)


async def _run(
    settings: StorageSettings,
    which: Which,
    given: dict[str, str],
    *,
    dry_run: bool,
    yes: bool,
    quiet: bool,
) -> dict[str, Any]:
    async with console.connected(settings) as fleet:
        storage = fleet.storage
        if not dry_run:
            await replace.check_access(storage)
        journals = [name async for name in storage.files.names(replace.JOURNALS)]
        finished = replace.Replaced()
        for journal in () if dry_run else journals:
            await replace.finish(storage, journal, finished)
        with console.counting("listed", None, quiet=quiet) as on_listed:
            found = await select.select(storage, which, on_listed)
        result = {
            "images": len(found.images),
            "workers": dict(found.by_worker.most_common()),
            "dollars": found.dollars,
            "damaged_records": found.damaged_records,
            "unfinished_runs": len(journals),
            "images_of_unfinished_runs": finished.images,
        }
        if dry_run or not found.images:
            return result
        await _warn_of_nodes_at_work(storage, found)
        cost = "" if found.dollars is None else f", which took about ${found.dollars:,.2f}"
        images = console.counted(len(found.images), "image")
        console.confirm(f"Have {images} drawn again{cost}?", yes=yes)
        finder = replace.JobFinder(storage.blobs, given, fleet.keys.trusted)
        await finder.list_duplicates(which.named.prefix)
        with console.counting("replaced", len(found.images), quiet=quiet) as on_image:
            replaced = await replace.replace(storage, found.images, finder, on_image)
    refused = [{"image": name, "reason": why} for name, why in replaced.refused.items()]
    return {
        **result,
        "replaced": replaced.images,
        "jobs": replaced.jobs,
        "not_redone": refused,
    }


async def _warn_of_nodes_at_work(storage: Storage, found: select.Selection) -> None:
    """A worker that may draw its own images again, as wrong as before."""
    known = {node.name for node in (await quarantine.read(storage.files))[0].nodes}
    for worker in sorted(set(found.by_worker) - {""}):
        if known.isdisjoint({worker, node_of(worker)}):
            console.print_warning(
                f"{worker} is not in the quarantine and may draw its images again; `imagefleet"
                " verify --quarantine` adds workers that draw wrong"
            )


def _show(result: dict[str, Any], *, dry_run: bool) -> None:
    if finished := result["images_of_unfinished_runs"]:
        images = console.counted(finished, "image")
        console.print_note(f"finished a run that was interrupted: {images}")
    elif result["unfinished_runs"]:
        console.print_note("a run was interrupted; the next one finishes it")
    if damaged := result["damaged_records"]:
        console.print_warning(f"{console.counted(damaged, 'suspect record')} cannot be read")
    images = console.counted(result["images"], "image")
    if not result["images"]:
        console.print_plain("no images to draw again")
    elif dry_run:
        columns = console.name_column("worker"), console.number_column("images")
        rows = ((worker or "(none)", count) for worker, count in result["workers"].items())
        console.print_tables(console.table(*columns, rows=itertools.islice(rows, _SHOWN)))
        dollars = result["dollars"]
        cost = "" if dollars is None else f"; drawing them took about ${dollars:,.2f}"
        console.print_plain(f"{images} would be drawn again{cost}")
    else:
        replaced = console.counted(result["replaced"], "image")
        jobs = console.counted(result["jobs"], "job")
        console.print_plain(f"{replaced} put aside, {jobs} sent")
        refused = result["not_redone"]
        for each in refused[:_SHOWN]:
            console.print_plain(f"{each['image']} stays: {each['reason']}")
        if len(refused) > _SHOWN:
            console.print_plain(f"and {len(refused) - _SHOWN:,} others stay (--json lists them)")
