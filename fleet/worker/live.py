"""The live line of a worker on a terminal: its figures at the bottom, its log above them."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from worker.progress import Progress

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


@contextlib.contextmanager
def showing(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Shows what the yielded function is given, until the block ends; long lines are wrapped."""
    spinner = Spinner("line")
    with Live(
        console=console,
        transient=True,
        # A file that stdout is sent to is not the terminal.
        redirect_stdout=sys.stdout.isatty(),
    ) as live:

        def show(progress: Progress) -> None:
            state = [] if progress.phase == "generating" else [progress.state]
            line = Table.grid(padding=(0, 1))
            line.add_row(spinner, Text(" | ".join([*state, *progress.figures]), "bold"))
            live.update(line)

        yield show
