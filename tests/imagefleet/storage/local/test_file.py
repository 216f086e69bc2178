"""A queue file that is damaged, foreign, deleted or replaced, and clocks that jump."""

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from browsing import visible
from imagefleet import errors
from imagefleet.storage.local import file as sqlite_file
from imagefleet.storage.local.queue import LocalQueue, QueueFile
from imagefleet.storage.protocol import Message, Operations

LEASE_SECONDS = 30

Opened = Callable[[], tuple[QueueFile, LocalQueue]]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "data" / "queue.sqlite"


@pytest.fixture
async def opened(path: Path) -> AsyncIterator[Opened]:
    """Opens the file as another process would."""
    files: list[QueueFile] = []

    def open_queue() -> tuple[QueueFile, LocalQueue]:
        files.append(QueueFile(path))
        return files[-1], LocalQueue(files[-1], "jobs", Operations())

    yield open_queue
    for file in files:
        await file.close()


async def filled(path: Path, jobs: int) -> None:
    file = QueueFile(path)
    await file.create("jobs")
    await LocalQueue(file, "jobs", Operations()).send(
        f"job {number}" for number in range(jobs)
    )
    await file.close()


def overwrite(path: Path, *, offset: int, size: int) -> None:
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(offset)
        file.write(b"\xff" * size)


def make_database(path: Path, *statements: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def content_of(path: Path) -> bytes:
    return path.read_bytes()


def move(path: Path, name: str) -> Path:
    return path.replace(path.with_name(name))


def delete_files(folder: Path) -> None:
    for each in folder.iterdir():
        each.unlink()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no bytes": lambda path: os.truncate(path, 0),
    "cut off": lambda path: os.truncate(path, path.stat().st_size // 2),
    "no header": lambda path: overwrite(path, offset=0, size=64),
    "no database": lambda path: path.write_bytes(b"no database at all " * 100),
    "damaged pages": lambda path: overwrite(
        path, offset=4096, size=path.stat().st_size - 4096
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_damaged_file_is_neither_used_nor_replaced_by_an_empty_queue(
    path: Path, opened: Opened, damage: str
):
    await filled(path, 500)
    DAMAGE[damage](path)
    content = content_of(path)
    file, queue = opened()
    with pytest.raises(errors.SetupError, match=r"is damaged.*move it away"):
        await queue.receive(32, LEASE_SECONDS)
    with pytest.raises(errors.SetupError, match=r"is damaged.*load --restart"):
        await file.create("jobs")
    assert content_of(path) == content


FOREIGN = {
    "another program": ["CREATE TABLE notes (text)"],
    "empty": ["PRAGMA user_version = 1"],
    "another version": [
        "CREATE TABLE queues (name)",
        "CREATE TABLE messages (id, text)",
    ],
}


@pytest.mark.parametrize("kind", FOREIGN)
async def test_the_database_of_another_program_is_left_as_it_is(
    path: Path, opened: Opened, kind: str
):
    make_database(path, *FOREIGN[kind])
    content = content_of(path)
    file, queue = opened()
    with pytest.raises(errors.SetupError, match="not a queue file"):
        await queue.check()
    with pytest.raises(errors.SetupError, match="not a queue file"):
        await file.create("jobs")
    assert content_of(path) == content


@pytest.fixture
def folder_in_the_way(path: Path) -> None:
    path.mkdir(parents=True)


@pytest.mark.usefixtures("folder_in_the_way")
async def test_a_folder_in_the_place_of_the_file_is_named(opened: Opened):
    file, _ = opened()
    with pytest.raises(errors.SetupError, match="is a folder"):
        await file.create("jobs")


async def test_the_log_of_a_lost_file_is_not_deleted_with_the_jobs_in_it(
    path: Path, opened: Opened
):
    file, queue = opened()
    await file.create("jobs")
    await queue.send(["a job"])
    log = sqlite_file.log_of(path)
    content = content_of(log)
    saved = move(path, "saved")
    with pytest.raises(errors.SetupError, match="missing, but its log"):
        await opened()[0].create("jobs")
    overwrite(path, offset=0, size=0)
    with pytest.raises(errors.SetupError, match="0 bytes"):
        await opened()[0].create("jobs")
    assert content_of(log) == content
    move(saved, path.name)
    _, other = opened()
    assert [message.body async for message in visible(other)] == ["a job"]


async def test_a_new_file_appears_in_one_step_with_nothing_beside_it(
    path: Path,
):
    files = [QueueFile(path) for _ in range(8)]
    await asyncio.gather(*(file.create("jobs") for file in files))
    await LocalQueue(files[0], "jobs", Operations()).send(["a job"])
    depth = await LocalQueue(files[-1], "jobs", Operations()).depth()
    assert depth.messages == 1
    for file in files:
        await file.close()
    assert [each.name for each in path.parent.iterdir()] == ["queue.sqlite"]


async def deleted_in_use(path: Path, opened: Opened) -> tuple[LocalQueue, Message]:
    """A queue whose file is gone, and a message that was leased from it."""
    file, queue = opened()
    await file.create("jobs")
    await queue.send(["an old job"])
    (message,) = await queue.receive(1, LEASE_SECONDS)
    delete_files(path.parent)
    return queue, message


async def test_a_file_deleted_in_use_is_missed_and_a_new_one_is_used(
    path: Path, opened: Opened
):
    queue, old = await deleted_in_use(path, opened)
    for call in (
        queue.receive(1, LEASE_SECONDS),
        queue.send(["lost"]),
        queue.delete(old),
    ):
        with pytest.raises(errors.SetupError, match="there is no queue"):
            await call
    _, other = opened()
    await filled(path, 3)
    assert [each.body for each in await queue.receive(3, LEASE_SECONDS)] == [
        f"job {number}" for number in range(3)
    ]
    assert (await other.depth()).messages == 3


async def test_a_receipt_of_a_replaced_file_ends_no_job_of_the_new_one(
    path: Path, opened: Opened
):
    queue, old = await deleted_in_use(path, opened)
    await filled(path, 1)
    (new,) = await opened()[1].receive(1, LEASE_SECONDS)
    assert new.receipt == old.receipt
    with pytest.raises(errors.LeaseLost):
        await queue.delete(old)
    with pytest.raises(errors.LeaseLost):
        await queue.renew(old, LEASE_SECONDS)
    assert (await queue.depth()).messages == 1


async def test_whoever_still_had_the_deleted_file_open_leaves_the_log_of_the_new_one(
    path: Path, opened: Opened
):
    """The last connection deletes the log by its name."""
    old = QueueFile(path)
    await old.create("jobs")
    await LocalQueue(old, "jobs", Operations()).send(["an old job"])
    delete_files(path.parent)
    file, queue = opened()
    await file.create("jobs")
    await queue.send(["a new job"])
    await old.close()
    assert sqlite_file.log_of(path).exists()
    _, other = opened()
    assert [message.body async for message in visible(other)] == ["a new job"]


# Access


async def test_a_locked_file_is_reported_with_its_name(
    path: Path, opened: Opened, monkeypatch
):
    await filled(path, 1)
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_SECONDS", 0.05)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    _, queue = opened()
    with pytest.raises(errors.TransientError, match=r"has kept .*queue.sqlite locked"):
        await queue.receive(1, LEASE_SECONDS)
    other.close()
    assert len(await queue.receive(1, LEASE_SECONDS)) == 1
