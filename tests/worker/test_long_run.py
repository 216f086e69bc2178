"""What a worker must not do more of with each job: lose one, keep files open, add metrics."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "million" / "run.py"


def test_a_worker_keeps_no_file_open_and_adds_no_series_per_job():
    command = [sys.executable, str(BENCHMARK), "--jobs", "1000", "--processes", "1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    ended = {
        name: figures[name]
        for name in ("stored", "left_in_queue", "lost", "done_twice")
    }
    assert ended == {"stored": 1000, "left_in_queue": 0, "lost": 0, "done_twice": 0}
    assert figures["series_at_end"] == figures["series_at_start"]
    assert figures["descriptors_at_end"] <= figures["descriptors_at_start"] + 20
    assert figures["threads_at_end"] <= figures["threads_at_start"] + 8
