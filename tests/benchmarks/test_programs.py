"""Every program of `benchmarks/` runs, with little to do: each makes a figure of the documents."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

TINY = ("--tiny", "--device", "cpu", "--out", "figures.json")

ONE_THREAD = ("--device", "cpu", "--threads", "1")

OVERLAP = ("--", "benchmarks/overlap.py", "--jobs", "8")

#: The programs and the arguments with which they take seconds.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "bag.py": (
        *TINY,
        "--folder",
        "models",
        "--minute",
        "5",
        "--rows",
        "bag_sizes,uniform",
    ),
    "likeness.py": ("--jobs", "2", "--steps", "2"),
    "compare.py": (str(ROOT), "--pairs", "2", "--within", "0.99", *OVERLAP),
    "families/measure.py": (
        *TINY,
        "--folder",
        "models",
        "--rows",
        "sd2",
        "--seconds",
        "1",
    ),
    "scoring/few_steps.py": (
        "--captions",
        "2",
        *ONE_THREAD,
        "--picture",
        "a.png",
        "--curves",
        ".",
        "--out",
        "a.json",
    ),
    "gpus.py": (
        "--tiny",
        "--counts",
        "1",
        "--seconds",
        "3",
        "--warm",
        "1",
        "--jobs",
        "100",
    ),
    "library/gateway.py": (
        "--pairs",
        "1",
        "--images",
        "100",
        "--seconds",
        "1",
        "--pictures",
        "2",
        "--out",
        "figures.json",
    ),
    "library/measure.py": (*TINY, "--pairs", "1", "--slots", "2"),
    "pixel/measure.py": (*TINY, "--folder", "models"),
    "scoring/speed.py": ("--images", "20", "--processes", "1"),
    "stages/img2img.py": (
        *TINY,
        "--folder",
        "models",
        "--seconds",
        "1",
        "--kinds",
        "img2img",
    ),
}

#: Programs with tests of their own, by these.
ELSEWHERE = {
    "engine.py": "benchmarks/test_documented_commands.py",
    "rows/engine.py": "benchmarks/test_documented_commands.py",  # `engine.py` starts it
    "fleet_sim.py": "benchmarks/test_fleet_sim.py",
    "million/run.py": "worker/test_long_run.py",
    "overlap.py": "benchmarks/test_documented_commands.py",
    "scoring/gate.py": "evaluation/gate/test_power.py",
    "scoring/reference.py": "benchmarks/test_programs.py",
    "store.py": "benchmarks/test_documented_commands.py",
}


def run(folder: Path, program: str, *arguments: str) -> str:
    """What the program prints, in an empty folder."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / program), *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'chaos'}"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs_with_little_to_do(program: str, tmp_path):
    printed = run(tmp_path, program, *PROGRAMS[program])

    assert printed
    assert "nan" not in printed.lower().split()


def test_the_demos_reference_is_made_with_the_networks_that_read_it(
    tmp_path, monkeypatch, load_file: Callable[[Path], Any]
):
    program = load_file(ROOT / "benchmarks" / "scoring" / "reference.py")
    monkeypatch.setattr(program, "PICTURES", 4)
    made, lines = tmp_path / "reference.npz", tmp_path / "captions.txt"
    arguments = ["--captions", str(lines), "--reference", str(made)]
    monkeypatch.setattr(sys, "argv", ["reference.py", *arguments])

    program.main()

    assert len(lines.read_text(encoding="utf-8").splitlines()) == 4
    shipped = np.load(ROOT / "evaluation" / "score" / "demo" / "reference.npz")
    with np.load(made) as found, shipped:
        assert found.keys() == shipped.keys()
        assert len(found["features"]) == len(found["clip_features"]) == 4
        for name in ("extractor", "clip_extractor"):
            assert found[name] == shipped[name]


def test_no_program_is_left_out():
    programs = {
        str(path.relative_to(ROOT / "benchmarks"))
        for path in (ROOT / "benchmarks").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }

    assert programs == PROGRAMS.keys() | ELSEWHERE.keys()
    assert all((ROOT / "tests" / test).exists() for test in ELSEWHERE.values())
