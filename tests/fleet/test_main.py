"""The console command as a whole, each time in a new process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cli import console
from fleet import entry, main
from in_process import Imagefleet, assert_refused

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).with_name("imagefleet")
COMMANDS = [
    "demo",
    "worker",
    "serve",
    "load",
    "import",
    "sweep",
    "cancel",
    "status",
    "exporter",
    "broker",
    "webhooks",
    "plan",
    "results",
    "export",
    "report",
    "score",
    "gallery",
    "verify",
    "gate",
    "redo",
    "scale",
    "prompt",
    "failed",
    "replay",
    "discard",
    "keys",
    "deploy",
    "files",
    "bench",
    "health",
]


def test_help_names_the_commands_in_their_order(imagefleet: Imagefleet):
    result = imagefleet("--help")

    listed = result.stdout.partition("─ Commands ─")[2].splitlines()[1:]
    rows = [line.split() for line in listed[: len(COMMANDS)]]
    assert [row[1] for row in rows] == COMMANDS
    assert not any(row[-2].endswith("…") for row in rows), "a description is cut off"
    assert result.returncode == console.EXIT_DONE


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("imagefleet rep", ["report", "replay"]),
        ("imagefleet keys rev", ["revoke"]),
        ("imagefleet worker --lease", ["--lease-seconds"]),
    ],
)
def test_bash_completes_commands_and_flags(
    imagefleet: Imagefleet, words: str, completions: list[str]
):
    result = imagefleet(
        _IMAGEFLEET_COMPLETE="complete_bash",
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split()) - 1),
    )

    assert result.stdout.split() == completions


@pytest.mark.parametrize("group", ["", "keys", "deploy", "files"])
def test_a_group_without_a_command_prints_its_help(imagefleet: Imagefleet, group: str):
    result = imagefleet(*group.split())

    assert result.stdout == imagefleet(*group.split(), "--help").stdout
    assert f"Usage: imagefleet {group}".rstrip() in result.stdout
    assert result.stderr == ""
    assert result.returncode == console.EXIT_DONE


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], {"torch", "diffusers", "transformers", "numpy", "azure"}),
        (["prompt", "a cat"], {"torch", "diffusers", "transformers"}),
        (["failed"], {"torch", "numpy", "PIL", "azure", "aiohttp"}),
        (["health", "live"], {"typer", "pydantic", "rich", "aiohttp"}),
    ],
)
def test_a_command_imports_nothing_heavy_that_it_does_not_need(
    tmp_path, arguments: list[str], heavy: set[str]
):
    (tmp_path / "imagefleet-data").mkdir()
    program = f"""
import sys
from fleet import entry
sys.argv = ["imagefleet", *{arguments}]
try:
    entry.main()
except SystemExit:
    pass
print("loaded:", sorted({heavy} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["worker", "--log-format", "text"],
            "error: --model / IMAGEFLEET_MODEL: is required",
        ),
        (
            ["worker", "--model", "m", "--lease-seconds", "soon", "--log-format=text"],
            "error: --lease-seconds / IMAGEFLEET_LEASE_SECONDS: should be a valid number",
        ),
        (
            ["status"],
            "error: there is no queue in imagefleet-data",
        ),
        (["statsu"], "error: No such command 'statsu'"),
        (["status", "--quick"], "error: No such option: --quick"),
        (["plan"], "error: give the batch: --jobs COUNT"),
        (
            ["plan", "--jobs", "1", "--gpu", "RTX 9090"],
            "error: unknown GPU class 'RTX 9090'",
        ),
        (["plan", "--jobs", "ten"], "error: --jobs: should be a valid integer"),
        (
            ["status", "--prometheus", "x"],
            "error: --prometheus / IMAGEFLEET_PROMETHEUS: should be a URL that begins with http://",
        ),
        (
            ["bench", "--model", "none"],
            "error: the model 'none' does not exist",
        ),
    ],
)
def test_an_invalid_command_line_is_one_line_and_exit_code_2(
    imagefleet: Imagefleet, arguments: list[str], complaint: str
):
    result = imagefleet(*arguments)

    assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert result.stderr.startswith(complaint)
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "variables", "is_json"),
    [
        (["exporter"], {}, True),
        (["exporter", "--portt", "1"], {}, True),
        (["worker", "--log-format", "yaml"], {}, True),
        (["worker"], {"IMAGEFLEET_LOG_FORMAT": "json"}, True),
        (["worker"], {"IMAGEFLEET_LOG_FORMAT": "text"}, False),
        (["worker", "--log-format=text"], {"IMAGEFLEET_LOG_FORMAT": "json"}, False),
        (["status"], {"IMAGEFLEET_LOG_FORMAT": "json"}, False),
    ],
)
def test_an_error_of_a_service_is_a_line_of_its_log(
    imagefleet: Imagefleet,
    arguments: list[str],
    variables: dict[str, str],
    is_json: bool,
):
    result = imagefleet(*arguments, **variables)

    assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    if is_json:
        record = json.loads(line)
        assert (record["severity"], record["action"]) == ("ERROR", "setup_error")
        assert record["exit_code"] == console.EXIT_OPERATOR_MUST_ACT
    else:
        assert line.startswith("error: ")


def test_a_missing_queue_is_reported_before_the_model_is_loaded(
    imagefleet: Imagefleet,
):
    result = imagefleet("worker", "--model", str(ROOT / "demo_model"))

    assert_refused(result, "there is no queue in")
    assert "Traceback" not in result.stderr


def test_an_unknown_variable_stops_every_command(imagefleet: Imagefleet):
    result = imagefleet("status", IMAGEFLEET_STORGE="local:x")

    assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert result.stderr == (
        "error: unknown setting IMAGEFLEET_STORGE; did you mean 'IMAGEFLEET_STORAGE'?\n"
    )


def test_a_closed_pipe_causes_no_error_output(tmp_path):
    result = subprocess.run(
        f"{COMMAND} plan --jobs 10 --json | true",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stderr == ""


def test_the_version_lists_the_versions_for_a_bug_report(
    imagefleet: Imagefleet,
):
    result = imagefleet("--version")
    names = [line.split()[0] for line in result.stdout.splitlines()]
    assert names == ["imagefleet", "torch", "diffusers", "python"]
    assert result.returncode == console.EXIT_DONE


def test_ctrl_c_during_the_imports_is_no_traceback(
    monkeypatch,
):
    class Interrupted:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr("fleet.main", Interrupted())
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == console.EXIT_INTERRUPTED


def test_the_help_describes_commands_as_they_do_themselves():
    commands = typer.main.get_command(main.app).commands

    for name, summary in main.COMMANDS.items():
        command = commands[name]
        own = command.short_help or command.help.partition("\n")[0]
        assert own == summary, name
