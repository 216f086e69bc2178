"""The commands that the documents name for their figures run, with little to do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

ENGINE_ROWS = "mixed,worker,baseline"


@pytest.mark.parametrize(
    "command",
    [
        ("overlap.py", "--jobs", "40"),
        ("store.py", "--jobs", "200"),
        (
            "engine.py",
            "--tiny",
            "--device",
            "cpu",
            "--rows",
            ENGINE_ROWS,
            "--scale",
            "0.1",
        ),
    ],
    ids=lambda command: command[0],
)
def test_a_documented_benchmark_prints_its_figures_as_json(
    command: tuple[str, ...], tmp_path
):
    script, *arguments = command
    if script == "engine.py":
        arguments += ["--out", str(tmp_path / "out.json"), "--seconds", "3600"]
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )

    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert figures
    if script == "engine.py":
        rows = json.loads((tmp_path / "out.json").read_text())["rows"]
        assert not {
            name: row
            for name, row in rows.items()
            if row.keys() & {"error", "not_measured"}
        }
