"""`imagefleet verify`: compares images that two workers drew; checks an export."""

import asyncio
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import asdict, astuple
from datetime import datetime
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit

from cli import console, options, target
from cli.options import option
from fleet.export.plan import MANIFEST
from fleet.verify import export, pairs
from fleet.verify.pairs import Pair
from imagefleet.errors import SetupError
from imagefleet.storage.settings import SignerSettings
from worker.node import quarantine as quarantining

_NOBODY = "(none: no worker's record)"


_JobsOrExport = Annotated[
    str | None,
    Argument(
        metavar="CAMPAIGN[/ID]|EXPORT",
        help="Only this campaign, or this one of its jobs; or the folder of an export.",
    ),
]


@options.flat
async def command(
    settings: SignerSettings,
    job: _JobsOrExport = None,
    since: datetime | None = options.moment("Only what was stored since then"),
    quarantine: bool = option(
        "Add those of which no drawing is alike to quarantine.json: they lease no more jobs.",
        default=False,
    ),
    yes: options.Yes = False,
    as_json: options.AsJson = False,
) -> None:
    """Names workers that draw wrong, or checks an export offline.

    `imagefleet load --verify-share` has some jobs drawn by two workers; a drawing whose name was
    taken is kept, too. A worker is named when pairs with two others speak against it: a single
    pair does not tell which of the two is wrong. Exit code 4: some pairs differ.

    Of an export (a path, or a folder with a manifest.json) each picture is compared with its
    record, with the job in it, and with signatures of --trusted-key. Exit code 4: some are not so.

    imagefleet verify spring

    imagefleet verify --since 2026-12-01T08:00 --quarantine

    imagefleet verify ./spring --trusted-key KEY
    """
    folder = _folder_of(job, is_only=not (since or quarantine))
    if folder is not None:
        await _verify_export(settings, folder, as_json=as_json)
        return
    named = target.read(job)
    new: list[str] = []
    async with console.connected(settings) as fleet:
        storage = fleet.storage
        await target.check_campaign(storage, named.campaign)
        compared = [each async for each in pairs.listed(storage, named, since)]
        with console.counting("compared", len(compared), quiet=as_json) as on_pair:
            await pairs.compare(storage, compared, on_pair)
        records = pairs.judge(compared)
        wrong = [record.worker for record in records if record.draws_wrong]
        undecided = pairs.undecided(compared, records)
        guilty = [record.worker for record in records if record.is_for_quarantine]
        if quarantine and guilty:
            console.confirm(
                f"Quarantine {console.counted(len(guilty), 'worker')}?", yes=yes
            )
            new = await quarantining.add(
                storage.files,
                guilty,
                "its images differ from those of other workers (imagefleet verify)",
            )
    counts = Counter(pair.result for pair in compared)
    different = [pair for pair in compared if pair.result == "different"]
    if as_json:
        console.print_json(
            {
                "pairs": len(compared),
                **{each: counts[each] for each in pairs.RESULTS},
                "newest": max((each.drawn_at for each in compared), default=None),
                "workers": [
                    {**asdict(each), "draws_wrong": each.draws_wrong}
                    for each in records
                ],
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
            console.print_note(
                f"{console.counted(len(new), 'worker')} added to the quarantine"
            )
            if kept := len(wrong) - len(guilty):
                console.print_note(
                    f"{console.counted(kept, 'worker')} not added: others draw some images alike"
                )
    if different:
        raise Exit(console.EXIT_IMAGES_WRONG)


def _folder_of(text: str | None, *, is_only: bool) -> Path | None:
    """The folder of an export that *text* names; None for a campaign or one of its jobs.

    *is_only*: no option of second drawings was given with it, which is a SetupError.
    """
    if text is None:
        return None
    folder = Path(text).expanduser()
    if not (text.startswith(("/", ".", "~")) or (folder / MANIFEST).is_file()):
        return None
    if not is_only:
        raise SetupError(
            f"{text} is an export: --since and --quarantine are not for it"
        )
    return folder


async def _verify_export(
    settings: SignerSettings, folder: Path, *, as_json: bool
) -> None:
    with console.counting("verified", None, quiet=as_json) as on_picture:
        verifier = export.Verifier(folder, settings.keys().trusted, on_picture)
        verdict = await asyncio.to_thread(verifier.run)
    if not as_json:
        for fault in verdict.faults[: console.SCREEN_LINES]:
            console.print_error(": ".join(filter(None, astuple(fault))))
    facts = {
        "pictures": verdict.pictures,
        "without a job in them": verdict.without_job,
        "jobs signed with a trusted key": verdict.signed_jobs,
        "manifest signed with one": verdict.is_sealed,
        "faults": verdict.fault_count,
    }
    console.show({"export": str(folder), **asdict(verdict)}, facts, as_json=as_json)
    if verifier.keys is None:
        console.print_note(
            "without --trusted-key: the files agree with each other, whoever made them"
        )
    if verdict.fault_count:
        raise Exit(console.EXIT_IMAGES_WRONG)


def _show_counts(counts: Counter[pairs.Result]) -> None:
    shown = {
        label: counts[name] for name, label in pairs.RESULTS.items() if counts[name]
    }
    if shown:
        console.print_tables(console.totals(shown))
    else:
        console.print_plain(
            "no second drawings: `imagefleet load --verify-share` asks for them"
        )


def _show_different(
    different: Sequence[Pair],
    records: Sequence[pairs.Record],
    undecided: Container[str],
) -> None:
    of_workers = (
        (
            each.worker or _NOBODY,
            each.compared,
            each.different,
            "draws wrong" * each.draws_wrong,
        )
        for each in [each for each in records if each.different][: console.SCREEN_LINES]
    )
    of_images = []
    ordered = sorted(different, key=lambda pair: pair.second not in undecided)
    for pair in ordered[: console.SCREEN_LINES]:
        note = pair.note or ("undecided" if pair.second in undecided else "")
        drawn_by = (worker or "(none)" for worker in pair.workers)
        of_images.append(
            (pair.image, *drawn_by, console.number(pair.distance, 1), note)
        )
    console.print_tables(
        "",
        console.table(["worker"], ["pairs", "differ"], ["verdict"], rows=of_workers),
        "",
        console.table(
            ["image", "drawn by", "and by"], ["distance"], [""], rows=of_images
        ),
    )
    console.print_more(len(different) - len(of_images), "others (--json lists them)")
