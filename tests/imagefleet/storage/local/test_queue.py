"""Properties of the local queue alone: strict order, indexed statements, safety in crashes."""

import asyncio
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

import polling
from browsing import visible
from imagefleet import errors
from imagefleet.storage.local import file as sqlite_file
from imagefleet.storage.local import queue as local_queue
from imagefleet.storage.local.queue import LocalQueue, QueueFile
from imagefleet.storage.open import open_storage
from imagefleet.storage.protocol import LeasedMessage, Message, Operations
from imagefleet.storage.settings import StorageSettings

LEASE_SECONDS = 30


class Clock:
    """A clock that moves only by assignment."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def file(tmp_path) -> AsyncIterator[QueueFile]:
    file = QueueFile(tmp_path / "storage" / "queue.sqlite")
    await file.create("jobs")
    yield file
    await file.close()


@pytest.fixture
def queue(file: QueueFile, clock: Clock, monkeypatch) -> LocalQueue:
    queue = LocalQueue(file, "jobs", Operations())
    monkeypatch.setattr(queue, "_clock", clock)
    return queue


def bodies(messages: list[Message]) -> list[str]:
    return [message.body for message in messages]


# Order


async def test_a_released_message_comes_first_again(queue: LocalQueue):
    await queue.send(["first", "second", "third"])
    first, second = await queue.receive(2, LEASE_SECONDS)
    await queue.release(second)
    await queue.release(first)
    assert bodies(await queue.receive(3, LEASE_SECONDS)) == ["first", "second", "third"]


async def test_a_message_whose_lease_expired_comes_first_again(
    queue: LocalQueue, clock: Clock
):
    await queue.send(["first", "second", "third"])
    await queue.receive(2, LEASE_SECONDS)
    clock.now += LEASE_SECONDS
    assert bodies(await queue.receive(3, LEASE_SECONDS)) == ["first", "second", "third"]


async def test_a_message_released_with_a_delay_keeps_its_place(
    queue: LocalQueue, clock: Clock
):
    await queue.send(["first", "second"])
    (first,) = await queue.receive(1, LEASE_SECONDS)
    await queue.release(first, delay_seconds=5)
    assert bodies([message async for message in visible(queue)]) == ["second"]
    clock.now += 5
    assert bodies([message async for message in visible(queue)]) == ["first", "second"]


async def test_find_reads_all_pages(queue: LocalQueue, monkeypatch):
    monkeypatch.setattr(local_queue, "_FOUND_AT_ONCE", 2)
    await queue.send("abcde")
    assert bodies([message async for message in visible(queue)]) == list("abcde")


# A million messages


FREQUENT_STATEMENTS = {
    "any visible": (sqlite_file.ANY_VISIBLE, 2),
    "any expired": (sqlite_file.ANY_EXPIRED, 2),
    "sweep": (sqlite_file.SWEEP, 2),
    "lease": (sqlite_file.LEASE, 3),
    "renew": (sqlite_file.UPDATE, 5),
    "delete": (sqlite_file.DELETE, 3),
    "oldest": (sqlite_file.OLDEST, 1),
}


@pytest.mark.parametrize("name", FREQUENT_STATEMENTS)
async def test_no_frequent_statement_scans_or_sorts_the_queue(
    file: QueueFile, name: str
):
    statement, parameters = FREQUENT_STATEMENTS[name]

    def plan(connection: sqlite3.Connection) -> list[str]:
        values = [0] * parameters
        rows = connection.execute(f"EXPLAIN QUERY PLAN {statement}", values).fetchall()
        return [row[3] for row in rows]

    steps = await file.run(plan)
    assert any("SEARCH messages" in step for step in steps)
    assert not [
        step for step in steps if step.startswith("SCAN") or "TEMP B-TREE" in step
    ]


# Many processes


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )


DRAIN = """
    import asyncio, sys
    from imagefleet.storage.open import open_storage
    from imagefleet.storage.settings import StorageSettings

    async def main():
        async with open_storage(StorageSettings(storage=sys.argv[1])) as storage:
            while page := await storage.queue.receive(8, 60):
                for message in page:
                    print(message.body)
                    await storage.queue.delete(message)

    asyncio.run(main())
"""


async def test_two_processes_receive_each_message_once(tmp_path):
    settings = StorageSettings(storage=f"local:{tmp_path}")
    async with open_storage(settings) as storage:
        await storage.create()
        await storage.queue.send(str(number) for number in range(1_000))
        workers = [start(DRAIN, settings.storage) for _ in range(2)]
        done = [await asyncio.to_thread(worker.communicate) for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0]
        numbers = [int(number) for output, _ in done for number in output.split()]
        assert sorted(numbers) == list(range(1_000))
        assert (await storage.queue.depth()).messages == 0


async def test_a_process_killed_inside_a_transaction_changes_nothing(
    tmp_path, file: QueueFile, queue: LocalQueue
):
    await queue.send(["a job", "another"])
    worker = start(
        """
        import signal, sqlite3, sys
        connection = sqlite3.connect(sys.argv[1], isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM messages")
        print("ready", flush=True)
        signal.pause()
        """,
        file.path,
    )
    assert worker.stdout is not None
    assert await asyncio.to_thread(worker.stdout.readline) == "ready\n"
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    assert bodies(await queue.receive(32, LEASE_SECONDS)) == ["a job", "another"]


async def test_many_processes_can_create_one_storage_at_once(tmp_path):
    create = """
        import asyncio, sys
        from imagefleet.storage.open import open_storage
        from imagefleet.storage.settings import StorageSettings

        async def main():
            async with open_storage(StorageSettings(storage=sys.argv[1])) as storage:
                await storage.create()
                await storage.queue.send(["a job"])

        asyncio.run(main())
    """
    settings = StorageSettings(storage=f"local:{tmp_path / 'new'}")
    workers = [start(create, settings.storage) for _ in range(3)]
    for worker in workers:
        await asyncio.to_thread(worker.communicate)
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    async with open_storage(settings) as storage:
        assert (await storage.queue.depth()).messages == 3


async def test_a_locked_file_is_waited_for_and_does_not_block_the_event_loop(
    file: QueueFile, queue: LocalQueue, monkeypatch
):
    begins = threading.Event()
    transaction = local_queue.transaction

    def noting(connection: sqlite3.Connection, **given: bool) -> Any:
        begins.set()
        return transaction(connection, **given)

    monkeypatch.setattr(local_queue, "transaction", noting)
    other = sqlite3.connect(file.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    sending = asyncio.create_task(queue.send(["a job"]))
    await polling.until(begins.is_set)
    await polling.turn(
        100
    )  # the loop goes on meanwhile: else it fails as one that waited too long
    assert not sending.done()
    other.execute("COMMIT")
    other.close()
    await sending
    assert bodies(await queue.receive(1, LEASE_SECONDS)) == ["a job"]


# Durability and faults


async def test_a_send_is_synced_to_the_disk_and_a_lease_is_not(
    file: QueueFile, queue: LocalQueue
):
    def synchronous(connection: sqlite3.Connection) -> int:
        return int(connection.execute("PRAGMA synchronous").fetchone()[0])

    full = 2
    normal = 1
    await queue.send(["a job"])
    assert await file.run(synchronous) == full
    (message,) = await queue.receive(1, LEASE_SECONDS)
    assert await file.run(synchronous) == normal
    await queue.delete(message)
    await queue.send(["a job"])
    assert await file.run(synchronous) == full


async def test_a_file_that_stays_locked_is_a_transient_error(
    tmp_path, file: QueueFile, monkeypatch
):
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_SECONDS", 0.05)
    short_timeout = QueueFile(file.path)
    other = sqlite3.connect(file.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(errors.TransientError, match="locked"):
        await LocalQueue(short_timeout, "jobs", Operations()).send(["a job"])
    other.close()
    await LocalQueue(short_timeout, "jobs", Operations()).send(["a job"])
    await short_timeout.close()


async def leased(queue: LocalQueue, count: int) -> list[LeasedMessage]:
    await queue.send(f"job {number}" for number in range(count))
    pages = [await queue.receive(32, LEASE_SECONDS) for _ in range(0, count, 32)]
    return [message for page in pages for message in page]


async def test_a_lost_lease_among_others_is_that_messages_alone(
    queue: LocalQueue,
):
    messages = await leased(queue, 8)
    await queue.renew(messages[3], LEASE_SECONDS)
    ended = await asyncio.gather(*map(queue.delete, messages), return_exceptions=True)
    assert [isinstance(each, errors.LeaseLost) for each in ended] == [
        n == 3 for n in range(8)
    ]
    assert (await queue.depth()).messages == 1


async def test_changes_that_do_not_fit_on_the_disk_are_undone(
    file: QueueFile, queue: LocalQueue
):
    messages = await leased(queue, 8)
    await file.run(
        lambda connection: connection.execute("PRAGMA max_page_count = 20").fetchall()
    )
    renewals = [queue.renew(each, LEASE_SECONDS, "x" * 60_000) for each in messages]
    renewed = await asyncio.gather(*renewals, return_exceptions=True)
    assert errors.StorageFullError in {type(each) for each in renewed}
    now = [
        message if isinstance(each, Exception) else each
        for message, each in zip(messages, renewed, strict=True)
    ]
    assert all(isinstance(each, LeasedMessage) for each in now)
    await asyncio.gather(*map(queue.delete, now))
    assert (await queue.depth()).messages == 0


async def test_the_file_does_not_grow_while_jobs_come_and_go(
    file: QueueFile, queue: LocalQueue
):
    pages = []
    for _ in range(30):
        await asyncio.gather(*map(queue.delete, await leased(queue, 64)))
        pages.append(
            await file.run(lambda each: each.execute("PRAGMA page_count").fetchone()[0])
        )
    assert pages[-1] <= pages[9]
    assert (
        sqlite_file.log_of(file.path).stat().st_size
        < 2 * 4096 * sqlite_file.CHECKPOINT_PAGES
    )


async def test_a_full_disk_is_a_transient_error_and_sends_nothing_of_the_batch(
    file: QueueFile, queue: LocalQueue
):
    await queue.send(["a job"])
    await file.run(
        lambda connection: connection.execute("PRAGMA max_page_count = 20").fetchall()
    )
    with pytest.raises(errors.TransientError, match="disk is full"):
        await queue.send(["x" * 10_000] * 20)
    assert (await queue.depth()).messages == 1
    await queue.delete((await queue.receive(1, LEASE_SECONDS))[0])


async def test_a_send_does_not_create_a_queue(file: QueueFile):
    with pytest.raises(errors.SetupError, match="there is no queue 'other'"):
        await LocalQueue(file, "other", Operations()).send(["a job"])


async def test_check_does_not_create_a_storage(tmp_path):
    folder = tmp_path / "typo"
    async with open_storage(StorageSettings(storage=f"local:{folder}")) as storage:
        with pytest.raises(errors.SetupError, match="there is no queue"):
            await storage.check()
    assert not folder.exists()
