import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import typer

from cli import console
from imagefleet import errors

ROOT = Path(__file__).parents[2]


async def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.SetupError("no queue"), console.EXIT_OPERATOR_MUST_ACT),
        (errors.NodeError("no GPU"), console.EXIT_REPLACE_THIS_NODE),
        (errors.TransientError("no answer"), console.EXIT_UNEXPECTED),
        (errors.InvalidMessageError("invalid"), console.EXIT_UNEXPECTED),
    ],
)
def test_an_error_is_one_line_and_its_class_decides_the_exit_code(
    error: errors.FleetError, code: int, capsys
):
    with pytest.raises(typer.Exit) as caught:
        console.run(_raise(error))

    assert caught.value.exit_code == code
    assert capsys.readouterr() == ("", f"error: {error.message}\n")


def test_a_long_error_with_brackets_stays_one_plain_line(
    capsys,
):
    message = "[bold] is no markup, " + "and this line is long " * 20

    console.print_error(message)

    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        console.run(_raise(ZeroDivisionError()))


def test_ctrl_c_ends_a_command_without_output(
    capsys,
):
    with pytest.raises(typer.Exit) as caught, console.one_line_errors():
        raise KeyboardInterrupt

    assert caught.value.exit_code == console.EXIT_INTERRUPTED
    assert capsys.readouterr() == ("", "")


def test_json_is_neither_wrapped_nor_styled(capsys):
    record = {"prompt": "[red]ü " + "x" * 500, "count": 1}

    console.print_json(record)

    out = capsys.readouterr().out
    assert json.loads(out) == record
    assert "ü" in out


#: Both in one process, whose standard output they find as it is.
TWO_COMMANDS = """
import sys
from fleet import entry
for words in (["prompt", sys.argv[1]], ["load", "a.jsonl", "--dry-run"]):
    sys.argv = ["imagefleet", *words]
    try:
        entry.main()
    except SystemExit as ended:
        assert not ended.code, ended
"""


def test_a_locale_without_a_prompts_letters_ends_no_command(tmp_path):
    prompt = "caf\u00e9 \u2192 \u732b \U0001f98a"
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": prompt}))
    variables = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"}
    shown, _, job = (
        subprocess.run(
            [sys.executable, "-c", TWO_COMMANDS, prompt],
            env={**os.environ, **variables},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            check=True,
        )
        .stdout.decode("latin-1")
        .strip()
        .rpartition("\n")
    )
    assert "caf" in shown
    assert json.loads(job)["prompt"] == prompt


def test_half_a_surrogate_pair_in_a_record_is_escaped(
    capsys,
):
    record = {"metadata": {"\ud800": "a\udfffb"}}

    console.print_json(record)

    out = capsys.readouterr().out
    assert out.encode()
    assert json.loads(out) == record


def test_a_jobs_text_controls_neither_the_terminal_nor_its_markup(
    capsys,
):
    console.print_error("job [/red] \x1b[2J\x07\x9b31m failed")

    err = capsys.readouterr().err
    assert "[/red]" in err
    assert all(each.isprintable() or each == "\n" for each in err)


async def test_sigterm_ends_a_task_without_an_error():
    task = asyncio.create_task(asyncio.Event().wait())
    asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)

    await console.until_stopped(task)

    assert task.cancelled()


async def test_an_error_of_a_task_is_raised():
    with pytest.raises(errors.TransientError):
        await console.until_stopped(
            asyncio.create_task(_raise(errors.TransientError()))
        )


def test_a_file_that_cannot_be_written_is_reported_before_the_work(
    tmp_path,
):
    (tmp_path / "file").touch()

    console.check_writable(None)
    console.check_writable(tmp_path / "file")
    console.check_writable(tmp_path / "new" / "folder" / "file")
    for path, reason in (
        (tmp_path, "cannot write .*: Is a directory"),
        (tmp_path / "file" / "x", "cannot write .*file: File exists"),
    ):
        with pytest.raises(errors.SetupError, match=reason):
            console.check_writable(path)
    assert (tmp_path / "file").read_bytes() == b""


def test_only_one_process_has_a_path_to_itself(tmp_path):
    with console.only_one(tmp_path / "ledger"):
        with (
            pytest.raises(
                errors.SetupError, match="ledger: wait for it or end it first"
            ),
            console.only_one(tmp_path / "ledger"),
        ):
            pytest.fail("two at once")
        with console.only_one(tmp_path / "another"):
            pass
    with console.only_one(tmp_path / "ledger"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_path_by_another_name_is_the_same_path(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with console.only_one(tmp_path / "ledger"):
        for other in (tmp_path / "link" / "ledger", tmp_path / "x" / ".." / "ledger"):
            with (
                pytest.raises(
                    errors.SetupError, match="another `imagefleet` is at work"
                ),
                console.only_one(other),
            ):
                pytest.fail("two at once")


@pytest.mark.parametrize("name", ["engine", "engine compiler", "engine import"])
def test_a_thread_inside_torch_does_not_end_the_process_in_a_crash(
    name: str, monkeypatch
):
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name=name)
    thread.start()
    try:
        with pytest.raises(SystemExit):
            console.leave(3)
    finally:
        end.set()
        thread.join()
    assert left == [3]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.03124, "0.0312"),
        (4.954, "4.95"),
        (4954.4, "4,954"),
        (30, "30"),
        (0.5, "0.5"),
    ],
)
def test_a_number_has_three_significant_digits(value: float, text: str):
    assert console.significant(value) == text
