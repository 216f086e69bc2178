"""Full disks: the storage's is waited for, a cache's is the node's, an output's is one line."""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

import polling
from cli import console
from fleet.scale import command as scale
from imagefleet import errors
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.telemetry import logs
from worker.files.disk_cache import DiskCache

pytestmark = pytest.mark.slow

Imagefleet = Callable[..., tuple[int, str]]
Jobs = Callable[..., list[str]]
RunPipeline = Callable[..., Coroutine[Any, Any, Any]]


async def image_names(storage: Storage) -> set[str]:
    return {name async for name in storage.blobs.names("default/")}


async def test_a_full_disk_of_the_storage_is_waited_for_and_costs_no_job(
    mount, jobs: Jobs, work: RunPipeline, caplog
):
    disk = mount()
    settings = StorageSettings(storage=f"local:{disk.folder}/data")
    async with open_storage(settings) as storage:
        await storage.create()
        await storage.queue.send(jobs(30))
        # The log that SQLite writes has no room for a lease either.
        filler = disk.fill()
        working = asyncio.create_task(work(settings, max_attempts=1))
        await polling.until(lambda: "disk is full" in caplog.text)
        assert not working.done()
        assert await image_names(storage) == set()
        with pytest.raises(errors.StorageFullError, match="the disk is full"):
            await storage.queue.send(jobs(1))
        assert (await storage.queue.depth()).messages == 30
        filler.unlink()
        pipeline = await working
        assert await image_names(storage) == {
            f"default/j{number}.png" for number in range(30)
        }
        assert (await storage.poison.depth()).messages == 0
    assert dict(pipeline.metrics.outcomes) == {"completed": 30}
    said = [each for each in caplog.records if "disk is full" in each.getMessage()]
    assert 1 <= len([each for each in said if each.levelno == logging.WARNING]) <= 3


async def test_a_disk_that_is_full_of_images_stores_no_half_image_and_acknowledges_none(
    mount, jobs: Jobs, work: RunPipeline, caplog
):
    caplog.set_level(logging.INFO)  # an upload says so as it is retried
    images = mount(256)
    queue = mount()
    (queue.folder / "images").symlink_to(images.folder)
    settings = StorageSettings(storage=f"local:{queue.folder}")
    async with open_storage(settings) as storage:
        await storage.create()
        await storage.queue.send(jobs(20, width=256, height=256))
        working = asyncio.create_task(work(settings, max_attempts=1))
        await polling.until(lambda: "disk is full" in caplog.text)
        stored = await image_names(storage)
        assert not working.done()
        assert 0 < len(stored) < 20
        for name in stored:
            data = await storage.blobs.read(name)
            assert data is not None
            assert data.endswith(b"IEND\xaeB`\x82")
        # Jobs whose images are stored may wait for their acknowledgement, the others for theirs.
        assert (await storage.queue.depth()).messages >= 20 - len(stored)
        images.change("size=16m")
        await working
        assert len(await image_names(storage)) == 20
        assert (await storage.poison.depth()).messages == 0


def test_room_in_a_full_cache_is_made_by_evicting_what_nobody_uses(
    mount,
):
    disk = mount(1024)
    cache = DiskCache(disk.folder / "loras")
    for name in ("old", "older"):
        path = cache.store(name, b"x" * 300_000)
        os.utime(path, (1_000_000, path.stat().st_mtime))
    filler = disk.fill()
    cache.store("new", b"x" * 500_000)
    assert {path.stem for path in (disk.folder / "loras").iterdir()} == {"new"}
    with pytest.raises(errors.NodeError, match=r"cache .* is full: use a larger disk"):
        cache.store("newer", b"x" * 500_000)
    assert {path.stem for path in (disk.folder / "loras").iterdir()} == {"new"}
    filler.unlink()


def test_a_load_onto_a_full_disk_is_one_line_and_goes_on_later(
    mount, jobs: Jobs, tmp_path, imagefleet: Imagefleet
):
    disk = mount(64)
    file = tmp_path / "jobs.jsonl"
    file.write_text("".join(f"{job}\n" for job in jobs(40)))
    filler = disk.fill()
    command = ["load", str(file), "--storage", f"local:{disk.folder}/data"]
    code, said = imagefleet(*command)
    assert code == 1
    (line,) = said.splitlines()
    assert "the disk is full" in line or "No space left on device" in line
    filler.unlink()
    disk.change("size=1m")
    code, said = imagefleet(*command)
    assert code == 0
    assert "40 jobs sent" in said


@pytest.fixture
def full() -> Iterator[TextIO]:
    path = Path("/dev/full")
    if not path.exists():
        pytest.skip("this system has no /dev/full")
    file = path.open("w")
    yield file
    with contextlib.suppress(OSError):
        file.close()


def test_output_to_a_full_disk_is_one_line_and_no_traceback(
    full: TextIO, jobs: Jobs, tmp_path
):
    (tmp_path / "jobs.jsonl").write_text("".join(f"{job}\n" for job in jobs(3)))
    done = subprocess.run(
        [sys.executable, "-m", "fleet.entry", "load", "jobs.jsonl", "--dry-run"],
        cwd=tmp_path,
        stdout=full,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last == "error: the disk is full: cannot write the output; free some space"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("flags", "code"), [([], 0), (["--rate", "x"], 2)])
def test_what_is_said_to_a_full_disk_changes_no_exit_code(
    full: TextIO,
    jobs: Jobs,
    tmp_path,
    imagefleet: Imagefleet,
    monkeypatch,
    flags: list[str],
    code: int,
):
    file = tmp_path / "jobs.jsonl"
    file.write_text("".join(f"{job}\n" for job in jobs(3)))
    monkeypatch.setattr(sys, "stderr", full)
    assert (
        imagefleet("load", str(file), "--storage", f"local:{tmp_path}/data", *flags)[0]
        == code
    )


def test_a_log_to_a_full_disk_says_nothing_of_itself_and_goes_on(full: TextIO, capsys):
    handler = logs._StandardError()
    record = logging.makeLogRecord({"msg": "a line"})
    handler.stream = full
    handler.emit(record)
    assert capsys.readouterr().err == ""
    handler.stream = sys.stderr
    handler.emit(record)
    assert capsys.readouterr().err == "a line\n"


async def test_a_probe_whose_answer_cannot_be_written_does_not_restart_a_good_worker(
    full: TextIO,
    serve_probes: Callable[[bool], contextlib.AbstractAsyncContextManager[int]],
):
    async with serve_probes(True) as port:
        command = (
            sys.executable,
            "-m",
            "fleet.entry",
            "health",
            "live",
            "--port",
            str(port),
        )
        probe = await asyncio.create_subprocess_exec(*command, stdout=full)
        assert await probe.wait() == 0


def test_a_scaler_whose_output_is_full_goes_on_watching_the_budget(
    full: TextIO, monkeypatch, caplog
):
    monkeypatch.setattr(sys, "stdout", full)
    scale._print_record({"now": 0.0})
    assert "the decision cannot be printed" in caplog.text


def test_a_page_that_cannot_be_written_leaves_the_old_one(mount):
    disk = mount(64)
    page = disk.folder / "report.html"
    console.write_file(page, "the old page")
    filler = disk.fill()
    with pytest.raises(errors.SetupError, match="No space left"):
        console.write_file(page, "the new page" * 10_000)
    assert page.read_text() == "the old page"
    assert {path.name for path in disk.folder.iterdir()} == {"report.html", filler.name}


def test_a_demo_without_room_ends_before_it_begins(mount, imagefleet: Imagefleet):
    code, said = imagefleet("demo", "--output", str(mount(64).folder / "demo"))
    assert code == 2
    line = said.splitlines()[-1]
    assert "is full: free 20 MB, or choose another --output" in line
