"""A worker on a terminal: its live line, its log above it, and what Ctrl-C leaves there."""

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyte
import pytest

from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings
from polling import until
from storages import local_only

ROOT = Path(__file__).parents[2]

LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING|ERROR) ")
LOGGED = re.compile(LOG_LINE.pattern.replace(" ", ""))

#: The live line, or the summary.
REST = re.compile(r"[|/\\-] \S|images {4}")

pytestmark = [
    pytest.mark.slow,
    local_only,
]


class Terminal:
    """A terminal of *columns* x 12, with what has scrolled out of it."""

    def __init__(self, columns: int) -> None:
        self.screen = pyte.HistoryScreen(columns, 12, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.controller, self.device = pty.openpty()
        self.resize(columns)
        self.raw = b""
        self._reader = threading.Thread(target=self._read)

    def resize(self, columns: int) -> None:
        size = struct.pack("HHHH", 12, columns, 0, 0)
        fcntl.ioctl(self.controller, termios.TIOCSWINSZ, size)
        self.screen.resize(12, columns)

    def start(
        self, command: list[Any], variables: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=self.device,
            stdout=self.device,
            stderr=self.device,
            start_new_session=True,
        )
        os.close(self.device)
        self._reader.start()
        return process

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.controller, 65_536)
            except OSError:  # the process has ended
                return
            self.raw += data
            self._stream.feed(data)

    def close(self) -> None:
        self._reader.join(10)
        os.close(self.controller)

    @property
    def shown(self) -> list[str]:
        """The rows of the screen that are not empty."""
        return [row.rstrip() for row in self.screen.display if row.strip()]

    @property
    def all(self) -> list[str]:
        """The rows that have scrolled out and those of the screen."""
        scrolled = [
            "".join(row[column].data for column in range(self.screen.columns)).rstrip()
            for row in self.screen.history.top
        ]
        return [*filter(None, scrolled), *self.shown]


Start = Callable[..., tuple[Terminal, "subprocess.Popen[bytes]"]]


@pytest.fixture
def start(
    storage_settings: StorageSettings,
    stand_in_worker,
    tmp_path,
) -> Iterator[Start]:
    """Starts a worker on a terminal; it is killed at the end of the test."""
    started = []

    def begin(
        *flags: str,
        columns: int = 100,
        program: dict[str, str] | None = None,
        **variables: str,
    ) -> tuple[Terminal, subprocess.Popen[bytes]]:
        terminal = Terminal(columns)
        command = stand_in_worker(*flags, **(program or {}))
        own = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        settings = {
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm-256color",
            "IMAGEFLEET_STORAGE": storage_settings.storage,
            "IMAGEFLEET_CACHE": str(tmp_path / "cache"),
        }
        process = terminal.start(command, {**own, **settings, **variables})
        started.append((terminal, process))
        return terminal, process

    yield begin
    for terminal, process in started:
        process.kill()
        process.wait()
        terminal.close()


async def fill(storage: Storage, jobs: int) -> None:
    await storage.queue.send(
        f'{{"prompt": "a house", "id": "j{each}"}}' for each in range(jobs)
    )


async def end(terminal: Terminal, process: subprocess.Popen[bytes]) -> int:
    code = await asyncio.to_thread(process.wait)
    await asyncio.to_thread(terminal._reader.join)
    return code


def log_and_rest(terminal: Terminal) -> tuple[list[str], list[str]]:
    """The lines of the log, without the white space at which the terminal wraps, and the rest."""
    rows = terminal.all
    begins = [number for number, row in enumerate(rows) if REST.match(row)]
    log, rest = (rows[: begins[-1]], rows[begins[-1] :]) if begins else (rows, [])
    lines: list[str] = []
    for row in log:
        if LOG_LINE.match(row) or not lines:
            lines.append("")
        lines[-1] += "".join(row.split())
    return lines, rest


async def test_the_figures_are_below_the_log_and_give_way_to_a_summary(
    storage: Storage, start: Start
):
    await fill(storage, 40)
    terminal, process = start("--until-empty", "--price-per-hour", "0.10")
    await until(lambda: terminal.shown and "to go" in terminal.shown[-1])
    log, (line,) = log_and_rest(terminal)
    assert await end(terminal, process) == 0

    figures = line[2:].split(" | ")
    assert [re.sub(r"[\d.,]+", "N", each) for each in figures] == [
        "N images",
        "N images/s",
        "N in flight",
        "N left",
        "N images/$",
        "~N s to go",
    ]
    assert all(map(LOGGED.match, log)), log
    log, summary = log_and_rest(terminal)
    assert all(map(LOGGED.match, log)), log
    facts = {row[:19].strip(): row[19:] for row in summary}
    assert [facts["images"], facts["failed jobs"]] == ["40", "0"]
    assert 0 < float(facts["images/s"]) <= 20, "the engine makes 20"
    assert int(facts["images per dollar"].replace(",", "")) > 0
    assert terminal.screen.cursor.hidden is False


async def test_a_narrow_terminal_has_the_figures_in_two_rows_and_no_torn_log(
    storage: Storage, start: Start
):
    await fill(storage, 40)
    talk = """
from worker.stages import upload as stage
create = stage.UploadStage._record
def talk(self, image, *facts):
    logging.getLogger("talk").info("%s is on its way, %s", image.job.id, "a long story " * 5)
    return create(self, image, *facts)
stage.UploadStage._record = talk
"""
    terminal, process = start(
        "--until-empty",
        "--price-per-hour",
        "0.1",
        columns=60,
        program={"changes": talk},
        NO_COLOR="1",
    )
    await until(lambda: "to go" in "".join(terminal.shown[-1:]))
    _, rows = log_and_rest(terminal)
    assert await end(terminal, process) == 0

    assert len(rows) == 2
    assert re.match(r"[|/\\-] \d+ images? \| ", rows[0])
    assert rows[1].startswith("  ")
    log, _ = log_and_rest(terminal)
    story = re.compile(LOGGED.pattern + r"j\d+isonitsway,(alongstory){5}")
    assert len([line for line in log if story.fullmatch(line)]) == 40, log
    assert not re.search(rb"\x1b\[[\d;]*3\dm", terminal.raw), (
        "a colour despite NO_COLOR"
    )


async def test_ctrl_c_drains_and_says_so(storage: Storage, start: Start):
    await fill(storage, 400)
    held = """
import signal
from benchmarks import stand_in
may_go_on, tick = threading.Event(), stand_in.StandInEngine.tick
signal.signal(signal.SIGUSR1, lambda *_: may_go_on.set())
stand_in.StandInEngine.tick = lambda engine: may_go_on.wait() and tick(engine)
"""
    terminal, process = start(program={"changes": held})
    await until(lambda: terminal.shown and "in flight" in terminal.shown[-1])
    os.write(terminal.controller, b"\x03")
    await until(lambda: "draining, " in terminal.shown[-1])
    line = terminal.shown[-1]
    process.send_signal(signal.SIGUSR1)
    code = await end(terminal, process)

    assert code == 0
    assert re.search(r"draining, \d+ in flight \| \d+ image", line)
    assert any("SIGINT: finishing what has begun" in row for row in terminal.all)
    assert terminal.shown[-1].startswith("images per dollar")
    assert not terminal.screen.cursor.hidden


async def test_an_error_is_one_red_line_where_the_live_line_was(start: Start):
    terminal, process = start("--queue", "no-such-queue")

    assert await end(terminal, process) == 2
    assert re.fullmatch(
        r"error: there is no queue in .+`imagefleet load` makes it",
        "".join(terminal.all),
    )
    assert not terminal.screen.cursor.hidden


async def test_a_terminal_that_cannot_move_its_cursor_has_a_plain_log(
    storage: Storage, start: Start
):
    await fill(storage, 8)
    terminal, process = start("--until-empty", TERM="dumb")

    assert await end(terminal, process) == 0
    assert b"\x1b" not in terminal.raw
    log, rest = log_and_rest(terminal)
    assert all(map(LOGGED.match, log)), log
    assert "done:8images" in log[-1]
    assert rest == []
