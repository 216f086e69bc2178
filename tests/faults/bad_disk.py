"""A bad disk: real workers on a storage whose disk fills up, is locked and becomes read-only.

    PYTHONPATH=. python tests/faults/bad_disk.py --jobs 400 --faults 30

It mounts a small disk (which needs root), fills the queue on it, and runs workers with a stand-in
engine. At random moments the disk is full, or read-only; another process locks the queue for
longer than a lease; a worker is killed; the cache is deleted. A worker that ends by itself, as it
should on a read-only disk, is started again. Then the faults end, the rest is done, and it prints
the tally, as one JSON object on the last line. Exit code 1 if a job was lost, or an image is wrong.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings

ROOT = Path(__file__).parents[2]
CHAOS = ROOT / "tests" / "chaos"
sys.path.append(str(CHAOS))

from storm import CAPACITY, is_image_of  # noqa: E402 - found by the line above

WORKERS = 3
LEASE_SECONDS = 4

#: Between two looks whether all is done.
LOOK_SECONDS = 0.2
DISK_MEGABYTES = 64

#: Exit codes of a worker that ends by itself: what the operator has to set right.
EXPECTED_CODES = {2}


@dataclass(slots=True)
class Tally:
    """What happened to the disk, and what is left of the jobs."""

    jobs: int
    seconds: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    exit_codes: dict[int, int] = field(default_factory=dict)
    drawn: int = 0
    lost: int = 0
    failed: int = 0
    wrong_images: int = 0
    unexpected_ends: int = 0

    @property
    def is_clean(self) -> bool:
        return not (
            self.lost or self.failed or self.wrong_images or self.unexpected_ends
        )


@dataclass
class BadDisk:
    """The disk, the workers on it and what happens to both."""

    folder: Path
    disk: Path
    random: random.Random
    tally: Tally
    tick_seconds: float
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)

    def start_missing_workers(self) -> None:
        for worker in [each for each in self.workers if each.poll() is not None]:
            self.workers.remove(worker)
            codes = self.tally.exit_codes
            codes[worker.returncode] = codes.get(worker.returncode, 0) + 1
            if (
                worker.pid not in self.killed
                and worker.returncode not in EXPECTED_CODES
            ):
                self.tally.unexpected_ends += 1
        while len(self.workers) < WORKERS:
            self.workers.append(self._start())

    def _start(self) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, CHAOS / "storm_worker.py", self.folder / "events"),
            *(
                f"{self.tick_seconds:g}",
                "0",
                str(self.random.random()),
                "none",
                "--model",
                "none",
            ),
            *("--storage", f"local:{self.disk}/data", "--cache", self.folder / "cache"),
            *("--lease-seconds", str(LEASE_SECONDS), "--grace-seconds", "2"),
        ]
        environment = {
            name: value
            for name, value in os.environ.items()
            if "IMAGEFLEET" not in name
        }
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(CHAOS)])
        with (self.folder / "workers.log").open("ab") as log:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def happen(self) -> None:
        """One fault, and its end."""
        faults = (self._full, self._read_only, self._locked, self._kill, self._no_cache)
        fault = self.random.choice(faults)
        name = fault.__name__.strip("_")
        self.tally.faults[name] = self.tally.faults.get(name, 0) + 1
        with fault():
            await asyncio.sleep(self.random.uniform(0.5, 1.5 * LEASE_SECONDS))

    @contextlib.contextmanager
    def _full(self) -> Iterator[None]:
        filler = self.disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        yield
        filler.unlink()

    @contextlib.contextmanager
    def _read_only(self) -> Iterator[None]:
        # Refused while a worker has a file open for writing, as it always has.
        for worker in self.workers:
            self.killed.add(worker.pid)
            worker.kill()
            worker.wait()
        self._remount("ro")
        self.start_missing_workers()
        yield
        self._remount("rw")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with contextlib.closing(
            sqlite3.connect(
                self.disk / "data" / "queue.sqlite", isolation_level=None, timeout=30
            )
        ) as connection:
            connection.execute("BEGIN EXCLUSIVE")
            yield

    @contextlib.contextmanager
    def _kill(self) -> Iterator[None]:
        worker = self.random.choice(self.workers)
        self.killed.add(worker.pid)
        worker.kill()
        yield

    @contextlib.contextmanager
    def _no_cache(self) -> Iterator[None]:
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        yield

    def _remount(self, flag: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{flag}", self.disk], check=True)


async def work(bad: BadDisk, storage: Storage, faults: int) -> None:
    bad.start_missing_workers()
    while sum(bad.tally.faults.values()) < faults:
        await asyncio.sleep(bad.random.uniform(0.2, 1.5))
        await bad.happen()
        bad.start_missing_workers()
    while (await storage.queue.depth()).messages:
        bad.start_missing_workers()
        await asyncio.sleep(LOOK_SECONDS)


async def count_up(bad: BadDisk, storage: Storage) -> None:
    tally = bad.tally
    stored = {name async for name in storage.blobs.names("default/")}
    tally.lost = len(
        {f"default/j{number}.png" for number in range(tally.jobs)} - stored
    )
    tally.failed = (await storage.poison.depth()).messages
    for name in stored:
        seed = int(name.removeprefix("default/j").removesuffix(".png"))
        tally.wrong_images += not is_image_of(
            seed, await storage.blobs.read(name) or b""
        )
    events = (bad.folder / "events").read_text().splitlines()
    tally.drawn = sum(each.startswith("drawn") for each in events)


async def run(bad: BadDisk, faults: int) -> None:
    settings = StorageSettings(storage=f"local:{bad.disk}/data")
    async with open_storage(settings) as storage:
        await storage.create()
        await storage.queue.send(
            json.dumps({"id": f"j{seed}", "prompt": "a house", "seed": seed})
            for seed in range(bad.tally.jobs)
        )
    # Closed meanwhile: a disk with a file open for writing does not become read-only.
    async with open_storage(settings) as storage:
        await work(bad, storage, faults)
        await count_up(bad, storage)


def run_on_disk(jobs: int, faults: int, seed: int) -> Tally:
    tally, began_at = Tally(jobs), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="imagefleet-bad-disk-") as folder:
        disk = Path(folder, "disk")
        disk.mkdir()
        size = f"size={DISK_MEGABYTES}m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", disk], check=True)
        # The jobs last as long as the faults.
        tick_seconds = faults * LEASE_SECONDS * WORKERS * CAPACITY / jobs
        bad = BadDisk(Path(folder), disk, random.Random(seed), tally, tick_seconds)
        try:
            asyncio.run(run(bad, faults))
        finally:
            for worker in bad.workers:
                worker.kill()
                worker.wait()
            if not tally.is_clean:
                sys.stderr.write((bad.folder / "workers.log").read_text()[-20_000:])
            subprocess.run(["umount", "--lazy", disk], check=True)
    tally.seconds = round(time.monotonic() - began_at, 1)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    tally = run_on_disk(arguments.jobs, arguments.faults, arguments.seed)
    sys.stdout.write(json.dumps(asdict(tally)) + "\n")
    sys.exit(not tally.is_clean)


if __name__ == "__main__":
    main()
