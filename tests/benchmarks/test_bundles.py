"""What bundles save, against single jobs in the same run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_bundles_take_a_third_of_the_operations_of_single_jobs():
    command = [sys.executable, "-m", "benchmarks.bundles.measure", "--jobs", "96"]

    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    single, bundled = (
        found[f"dollars_per_million_operations{kind}"] for kind in ("_single", "")
    )
    assert bundled < single / 3
    assert found["bundled"]["jobs_per_message"] == 32
