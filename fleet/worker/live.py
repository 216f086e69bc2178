"""The live line of a worker on a terminal: its figures at the bottom, its log above them."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from worker.progress import Progress

#: Often enough for a resized terminal, rarely enough for a slow connection.
REFRESHES_PER_SECOND = 4

_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}


class LogHandler(logging.Handler):
    """Prints each record above the live line, if there is one; long lines are not wrapped."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            style = _STYLES.get(record.levelname, "")
            self._console.print(Text(self.format(record), style), soft_wrap=True)
        except Exception:  # noqa: BLE001 - as the handlers of the standard library do
            self.handleError(record)


class LiveLine:
    """The newest figures, in as many rows as the terminal's width needs."""

    def __init__(self) -> None:
        self.progress: Progress | None = None
        self._spinner = Spinner("line")

    def show(self, progress: Progress) -> None:
        self.progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        if self.progress is None:
            return
        spinner = self._spinner.render(console.get_time())
        lead = Text.assemble(spinner if isinstance(spinner, Text) else "", " ")
        parts = self.progress.figures
        if self.progress.phase != "generating":
            parts = [self.progress.state, *parts]
        separator = " | " if options.ascii_only else " · "
        for number, row in enumerate(_rows(parts, separator, options.max_width - len(lead))):
            start = lead if not number else Text(" " * len(lead))
            yield Text.assemble(start, (row, "bold"), no_wrap=True, overflow="ellipsis")


@contextlib.contextmanager
def showing(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Shows what the yielded function is given, until the block ends."""
    line = LiveLine()
    with Live(
        line,
        console=console,
        refresh_per_second=REFRESHES_PER_SECOND,
        transient=True,
        # A file that stdout is sent to is not the terminal.
        redirect_stdout=sys.stdout.isatty(),
    ):
        yield line.show


def _rows(parts: list[str], separator: str, width: int) -> list[str]:
    """*parts* side by side, as many in each row as fit."""
    rows = [parts[0]]
    for part in parts[1:]:
        longer = rows[-1] + separator + part
        if len(longer) <= width:
            rows[-1] = longer
        else:
            rows.append(part)
    return rows
