"""How a load gets on: a bar, lines, or lines of JSON."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich import progress

from fleet import console
from loadgen.load import Load
from loadgen.pace import Pace, duration

#: Seconds between two lines of progress where there is no terminal.
SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def showing(
    load: Load, total: int | None, *, is_live: bool, quiet: bool, as_json: bool = False
) -> Iterator[Callable[[int], None]]:
    """A bar if *is_live*, else occasional lines on stderr, of JSON with *as_json*."""
    pace = Pace(load.confirmed)
    said_at = time.monotonic()

    def rate() -> str:
        refused = load.refusals.count
        told = f", slowed down by the storage {refused:,} times" if refused else ""
        return f"{pace.per_second:,.0f} jobs/s{told}"

    def facts(confirmed: int) -> dict[str, float | int | None]:
        return {
            "confirmed": confirmed,
            "total": total,
            "jobs_per_second": round(pace.per_second, 1),
            "seconds_left": pace.left(total),
            "refusals": load.refusals.count,
        }

    def show_line(confirmed: int) -> None:
        nonlocal said_at
        pace.note(confirmed)
        if time.monotonic() - said_at < SECONDS_BETWEEN_LINES:
            return
        said_at = time.monotonic()
        if as_json:
            console.print_note(console.json_line(facts(confirmed)).rstrip())
            return
        of_total = "" if total is None else f" of {total:,}"
        left = pace.left(total)
        ends = "" if left is None else f", {duration(left)} left"
        console.print_note(f"{confirmed:,}{of_total} jobs sent, {rate()}{ends}")

    if quiet:
        yield lambda _confirmed: None
    elif not is_live:
        yield show_line
    else:
        columns = (
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.fields[rate]}"),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=console.stderr) as bar:
            task = bar.add_task("", total=total, completed=load.confirmed, rate="")

            def show_bar(confirmed: int) -> None:
                pace.note(confirmed)
                bar.update(task, completed=confirmed, rate=rate())

            yield show_bar
