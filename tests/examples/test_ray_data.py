"""The example of Ray Data on a real Ray of this machine, with the demo's checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

#: 120 rows, of which three are no jobs; an actor is killed when it has drawn 30 images.
PROGRAM = """
import itertools, json, os, signal, sys
from pathlib import Path
import ray, ray_data

model, killed, found = sys.argv[1], *map(Path, sys.argv[2:])

class Draw(ray_data.Draw):
    drawn = itertools.count()

    def __call__(self, batch):
        for row in super().__call__(batch):
            if next(self.drawn) == 30 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield row

ray_data.Draw = Draw
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200_000_000)
rows = [{"id": f"{n:03}", "prompt": f"house {n}", "steps": int(n % 50 > 0)} for n in range(120)]
drawn = ray_data.draw(
    ray.data.from_items(rows), model, actors=(1, 2), gpus=0, device="cpu", compile="off"
)
lines = [{**row, "image": len(row["image"])} for row in drawn.take_all()]
found.write_text(json.dumps(lines))
"""


def test_an_actor_that_is_killed_and_rows_that_are_no_jobs_lose_and_double_nothing(
    tmp_path,
):
    pytest.importorskip("ray")
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
        ),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        # By default Ray's workers are at 15, and get nothing of a busy machine.
        "RAY_worker_niceness": "0",
    }
    killed = tmp_path / "killed"
    told = tmp_path / "found.json"

    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            str(ROOT / "demo_model"),
            str(killed),
            str(told),
        ],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    found = json.loads(told.read_text())
    assert killed.exists()
    assert sorted(row["id"] for row in found) == [
        f"{number:03}" for number in range(120)
    ]
    assert sum(row["image"] > 0 for row in found) == 117
    reasons = [row["error"] for row in found if not row["image"]]
    assert len(reasons) == 3
    assert all("steps" in reason and "\n" not in reason for reason in reasons)
