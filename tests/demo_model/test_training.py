"""The programs that made the demo's models still run, for a few steps on a CPU."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, program: str, *arguments: str) -> str:
    """Runs a program of demo_model/training in *folder*; returns what it prints."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / "demo_model" / "training" / program), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_the_cascade_is_trained_and_goes_on_from_its_state(tmp_path: Path) -> None:
    program = "demo_world/cascade/train.py"
    small = ["--out", "cascade", "--state", "state.pt", "--processes", "0"]
    small += ["--pictures", "6", "--base-batch", "2", "--sr-batch", "2"]
    small += ["--base-seconds", "600", "--sr-seconds", "600"]

    run(tmp_path, program, *small, "--base-steps", "1", "--sr-steps", "1")
    run(tmp_path, program, *small, "--base-steps", "2", "--sr-steps", "1")

    steps = ("--captions", "3", "--steps", "2", "--sr-steps", "2")
    measure = ("--model", "cascade", *steps, "--device", "cpu")
    printed = run(tmp_path, "demo_world/cascade/measure.py", *measure)
    assert json.loads(printed.splitlines()[-1])["captions"] == 3


def test_the_tokenizer_is_made_of_its_vocabulary(tmp_path: Path) -> None:
    made = ROOT / "imagefleet" / "job" / "clip_tokenizer"
    vocabulary = tmp_path / "vocabulary.txt.gz"
    vocabulary.write_bytes(gzip.compress((made / "merges.txt").read_bytes()))

    run(
        tmp_path,
        "demo_world/make_tokenizer.py",
        vocabulary.name,
        "--output",
        "tokenizer",
    )

    for path in (tmp_path / "tokenizer").iterdir():
        assert path.read_bytes() == (made / path.name).read_bytes(), path.name
