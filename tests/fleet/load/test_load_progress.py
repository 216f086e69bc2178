import codecs
import os
import pty
import re
import sys
from pathlib import Path

from cli import console, filling
from in_process import Imagefleet

ROOT = Path(__file__).parents[3]


def test_a_line_says_the_rate_and_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr(filling, "SECONDS_BETWEEN_LINES", 0.0)
    with filling.showing(10_000_000, is_live=False, quiet=False) as show:
        show(1_000)
        show(2_000)
    _, calm = capsys.readouterr().err.splitlines()
    assert "2,000 of 10,000,000 jobs sent" in calm
    assert "jobs/s" in calm
    assert calm.endswith("left")


LINE = '{"prompt":"a red house in a forest, digital art, no ' + "x" * 400 + '"}\n'


def long_file(folder: Path, beginning: str = "", lines: int = 4_000) -> str:
    """A file that takes a third of a second to check, if it has no more lines."""
    (folder / "long.jsonl").write_text(beginning + LINE * lines)
    return "long.jsonl"


def on_a_terminal(
    folder: Path, *arguments: str, ctrl_c_after: str | None = None
) -> tuple[int, str]:
    """The exit code and the output of `imagefleet load` in a terminal of 80 columns."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.update(PYTHONPATH=str(ROOT), TERM="xterm", COLUMNS="80")
        os.execv(
            sys.executable, [sys.executable, "-m", "fleet.main", "load", *arguments]
        )
    output = ""
    decoder = codecs.getincrementaldecoder(
        "utf-8"
    )()  # a read may end within a character
    while True:
        try:
            output += decoder.decode(os.read(terminal, 65_536))
        except OSError:  # the program has ended
            break
        if ctrl_c_after is not None and ctrl_c_after in output:
            os.write(terminal, b"\x03")
            ctrl_c_after = None
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output


def test_ctrl_c_ends_a_long_check_and_nothing_is_sent(tmp_path):
    # Long enough that a test that has to wait for the processor is in time.
    file = long_file(tmp_path, lines=65_000)
    code, output = on_a_terminal(tmp_path, file, ctrl_c_after="checking long.jsonl")

    assert code == console.EXIT_INTERRUPTED
    plain = re.sub(r"\x1b\[[?\d;]*\w", "", output)
    assert "stopped while checking long.jsonl; nothing was sent" in plain
    assert "\x1b[?25h" in output, "the cursor is shown again"
    assert "Traceback" not in output
    assert [each.name for each in tmp_path.iterdir()] == ["long.jsonl"]


def test_a_long_check_shows_nothing_in_a_pipe(in_process: Imagefleet, tmp_path):
    result = in_process("load", long_file(tmp_path, beginning="no job\n" * 10))

    assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert "checking" not in result.stderr
