"""`imagefleet verify`: compares images that two workers drew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import get_args

import typer

from fleet import console, options
from fleet.campaigns import target
from fleet.options import Since, option
from fleet.verify import pairs
from fleet.verify import quarantine as quarantining
from fleet.verify.pairs import Pair
from imagefleet.storage.settings import StorageSettings

#: Lines of each table: about a screen.
_SHOWN = 20


@options.from_settings(StorageSettings)
def command(
    settings: StorageSettings,
    job: target.OnlyJobs = None,
    since: Since = None,
    quarantine: bool = option(
        "Add the workers that draw wrong to quarantine.json: they lease no more jobs.",
        default=False,
    ),
    yes: options.Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Names workers that draw wrong, by second drawings of jobs.

    `imagefleet load --verify-share` has some jobs drawn by two workers; a drawing whose name was
    taken is kept, too. A worker is named when pairs with two others speak against it: a single
    pair does not tell which of the two is wrong. Exit code 4: some pairs differ.

    imagefleet verify spring

    imagefleet verify --since 2026-12-01T08:00 --quarantine
    """
    named = target.read(job)
    moment = options.read_moment("--since", since)
    compared, newest = console.run(_compare(settings, named, moment, quiet=as_json))
    records = pairs.judge(compared)
    wrong = [record.worker for record in records if record.draws_wrong]
    undecided = pairs.undecided(compared, records)
    new: list[str] = []
    if quarantine and wrong:
        console.confirm(f"Quarantine {console.counted(len(wrong), 'worker')}?", yes=yes)
        new = console.run(_quarantine(settings, wrong))
    counts = Counter(pair.result for pair in compared)
    different = [pair for pair in compared if pair.result == "different"]
    if as_json:
        console.print_json(
            {
                "pairs": len(compared),
                **{each: counts[each] for each in get_args(pairs.Result)},
                "newest": newest,
                "workers": [{**asdict(each), "draws_wrong": each.draws_wrong} for each in records],
                "different_pairs": [asdict(each) for each in different],
                "undecided": [each.image for each in undecided],
                "quarantined": new,
            }
        )
    else:
        _show_counts(counts)
        if different:
            _show_different(different, records, {pair.second for pair in undecided})
        if wrong:
            console.print_note(
                "`imagefleet redo --worker WORKER --since TIME` replaces what such a worker drew"
            )
        if undecided:
            console.print_note(
                "undecided: `imagefleet redo IMAGE` has it drawn a third time; then run this again"
            )
        if quarantine:
            console.print_note(f"{console.counted(len(new), 'worker')} added to the quarantine")
    if different:
        raise typer.Exit(console.EXIT_IMAGES_WRONG)


async def _compare(
    settings: StorageSettings, named: target.Target, since: datetime | None, *, quiet: bool
) -> tuple[list[Pair], datetime | None]:
    """The pairs, and when the newest second drawing was stored."""
    async with console.connected(settings) as fleet:
        storage = fleet.storage
        await target.check_campaign(storage, named.campaign)
        seconds = [each async for each in pairs.listed(storage, named, since)]
        with console.counting("compared", len(seconds), quiet=quiet) as on_pair:
            compared = await pairs.compare(storage, seconds, on_pair)
    return compared, max((each.created_at for each in seconds), default=None)


async def _quarantine(settings: StorageSettings, workers: Sequence[str]) -> list[str]:
    async with console.connected(settings) as fleet:
        reason = "its images differ from those of other workers (imagefleet verify)"
        return await quarantining.add(fleet.storage.files, workers, reason)


def _show_counts(counts: Counter[pairs.Result]) -> None:
    if not counts:
        console.print_plain("no second drawings: `imagefleet load --verify-share` asks for them")
        return
    rows = {
        "pairs alike": counts["alike"],
        "pairs that differ": counts["different"],
        "by one worker twice": counts["same_worker"],
        "without their image": counts["not_there"],
        "no readable image": counts["unreadable"],
        "of too few steps": counts["few_steps"],
    }
    shown = {name: f"{count:,}" for name, count in rows.items() if count}
    console.print_tables(console.totals(shown))


def _show_different(
    different: Sequence[Pair], records: Sequence[pairs.Record], undecided: Container[str]
) -> None:
    workers = console.table(
        console.name_column("worker"), *map(console.number_column, ("pairs", "differ")), "verdict"
    )
    for record in [record for record in records if record.different][:_SHOWN]:
        name = console.untrusted(record.worker or "(none: no worker's record)")
        verdict = "draws wrong" if record.draws_wrong else ""
        workers.add_row(name, f"{record.compared:,}", f"{record.different:,}", verdict)
    images = console.table(
        *map(console.name_column, ("image", "drawn by", "and by")),
        console.number_column("distance"),
        "",
    )
    for pair in sorted(different, key=lambda pair: pair.second not in undecided)[:_SHOWN]:
        note = pair.note or ("undecided" if pair.second in undecided else "")
        names = (console.untrusted(each or "(none)") for each in (pair.image, *pair.workers))
        images.add_row(*names, console.number(pair.distance, 1), note)
    console.print_tables("", workers, "", images)
    if len(different) > _SHOWN:
        console.print_plain(f"and {len(different) - _SHOWN:,} others (--json lists them)")
