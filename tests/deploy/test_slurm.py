"""The job array of Slurm: sbatch's options, and what the script does with a worker's end."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from imagefleet.job.message import is_safe_id
from polling import until

#: Options of sbatch's manual (25.05) that the script uses, and the form of their values.
OPTIONS = {
    "job-name": r"[\w-]+",
    "array": r"\d+-\d+(%\d+)?",
    "gpus": r"\d+",
    "cpus-per-task": r"\d+",
    "mem": r"\d+[KMGT]",
    "time": r"(\d+-)?\d{1,2}:\d{2}:\d{2}",
    "requeue": None,
    "open-mode": "append|truncate",
    "signal": r"([BR]:)?[A-Z0-9]+(@\d+)?",
    "output": r"[\w.%-]+",
}

#: Stands in for the worker: notes its arguments and variables, then ends, or waits for SIGTERM.
WORKER = """#!/bin/bash
printf '%s\\n' "$@" > "$RECORD/arguments"
env > "$RECORD/environment"
[ "$END_WITH" = stopped ] || exit "$END_WITH"
tail -f /dev/null &
trap 'kill $!; exit 143' TERM
touch "$RECORD/waits"
wait
"""

SCONTROL = '#!/bin/sh\necho "$@" >> "$RECORD/requeued"\n'


@pytest.fixture
def script(repository: Path) -> Path:
    return repository / "deploy" / "slurm" / "array.sbatch"


def start(script: Path, folder: Path, end_with: str) -> "subprocess.Popen[bytes]":
    (folder / "worker.env").write_text("IMAGEFLEET_STORAGE='local:/a b'\n")
    for name, text in (("imagefleet", WORKER), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    variables = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "RECORD": str(folder),
        "END_WITH": end_with,
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "3",
    }
    command = ["bash", str(script), "--model", "./my model"]
    return subprocess.Popen(command, cwd=folder, env=variables)


def test_every_option_is_one_of_sbatch(script: Path):
    text = script.read_text()
    given = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE)

    assert len(given) == text.count("\n#SBATCH")
    for name, value in given:
        assert re.fullmatch(OPTIONS[name] or "", value), name
    assert "requeue" in dict(given), "a preempted task would end for good"
    assert dict(given)["signal"].startswith("B:"), (
        "srun is not used: the script gets it"
    )


@pytest.mark.parametrize("code", [0, 2, 3])
def test_a_task_ends_as_its_worker_does_and_is_not_requeued(
    script: Path, tmp_path: Path, code: int
):
    with start(script, tmp_path, str(code)) as running:
        assert running.wait(60) == code

    assert (tmp_path / "arguments").read_text().splitlines() == [
        "worker",
        "--until-empty",
        "--model",
        "./my model",
    ]
    told = dict(
        line.split("=", 1)
        for line in (tmp_path / "environment").read_text().splitlines()
        if line.startswith("IMAGEFLEET_")
    )
    assert told["IMAGEFLEET_STORAGE"] == "local:/a b"
    assert told["IMAGEFLEET_NAME"] == "slurm-7-3-0"
    assert is_safe_id(told["IMAGEFLEET_GROUP"])
    assert not (tmp_path / "requeued").exists()


async def test_a_task_whose_time_is_over_stops_its_worker_and_queues_up_again(
    script: Path, tmp_path: Path
):
    with start(script, tmp_path, "stopped") as running:
        await until((tmp_path / "waits").exists)
        running.terminate()
        assert running.wait(60) == 143

    assert (tmp_path / "requeued").read_text() == "requeue 7_3\n"
