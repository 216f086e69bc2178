"""Measures how fast a stranger verifies an export, offline.

Signed jobs are drawn by a worker with a stand-in engine, as 512 x 512 pictures of some 400 kB,
and exported; `imagefleet verify` then reads the export in a process of its own.

    python -m benchmarks.kept.verify [--images 10000]
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.rows import groups
from benchmarks.stand_in import StandInEngine
from imagefleet.signing import SigningKey
from worker import process
from worker.engine import contract
from worker.settings import WorkerSettings

RESULT = Path(__file__).resolve().parents[1] / "results" / "kept.json"

#: Levels of the noise: a picture of 16 levels takes the bytes of a photograph.
LEVELS = 16


def picture(request: contract.ImageRequest) -> contract.Pixels:
    random = np.random.default_rng(request.seed)
    return random.integers(0, LEVELS, (512, 512, 3), np.uint8)


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "fleet.entry", *arguments]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(arguments)}: {ended.stderr}")
    return ended.stdout


def exported(folder: Path, images: int) -> tuple[Path, str]:
    """An export of so many pictures, and the public key that has signed it."""
    key = SigningKey.create(folder / "key.pem")
    jobs = folder / "jobs.jsonl"
    with jobs.open("w") as file:
        for number in range(images):
            prompt = f"a photo of a house, number {number}, highly detailed"
            file.write(json.dumps({"id": f"{number:06}", "prompt": prompt}) + "\n")
    storage = f"local:{folder / 'storage'}"
    where = ["--storage", storage, "--signing-key", str(folder / "key.pem")]
    run("load", str(jobs), "--campaign", "kept", "--verify-share", "0", *where)
    settings = WorkerSettings(storage=storage, model=Path("stand-in"), until_empty=True)
    engine = lambda: StandInEngine(size=(512, 512), draw=picture)  # noqa: E731 - a short factory
    asyncio.run(process.run_worker(settings, load=engine))
    run("export", "kept", str(folder / "out"), *where)
    return folder / "out", key.public


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=10_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out, key = exported(Path(folder), given.images)
        size = sum(path.stat().st_size for path in out.iterdir())
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began_at = time.monotonic()
        told = run("verify", str(out), "--trusted-key", key, "--json")
        seconds = time.monotonic() - began_at
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = json.loads(told)
    if (found["pictures"], found["signed_jobs"]) != (given.images, given.images):
        sys.exit(f"not all pictures were verified: {told}")
    figures = {
        "verified_per_second": round(given.images / seconds, 1),
        "verified": {
            "images": given.images,
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu_seconds, 1),
            "bytes": size,
            "cores": os.cpu_count(),
        },
    }
    groups.add_figures(RESULT, figures)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
