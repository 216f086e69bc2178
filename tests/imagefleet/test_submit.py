import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

import polling
from browsing import visible
from imagefleet import errors
from imagefleet.records import reader
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.submit import BATCH, BulkSender, Progress
from simulation import clock


def numbers(start: int, end: int) -> Iterator[str | None]:
    """Numbered messages; every tenth position has none."""
    for number in range(start, end):
        yield None if number % 10 == 9 else json.dumps(number)


def wanted(start: int, end: int) -> list[int]:
    return [number for number in range(start, end) if number % 10 != 9]


async def numbers_in(storage: Storage) -> list[int]:
    return sorted([int(message.body) async for message in visible(storage.queue)])


async def test_every_job_is_sent_once(storage: Storage):
    progress = await BulkSender(storage.queue.send, numbers(0, 150)).run()

    assert progress == Progress(confirmed=150, sent=135, finished=True)
    assert await numbers_in(storage) == wanted(0, 150)


async def test_confirmations_stop_at_the_first_gap(storage: Storage):
    send = storage.queue.send
    confirmed: list[int] = []
    first_may_go = asyncio.Event()
    others_are_stored = asyncio.Event()

    async def slow_first(bodies: Iterable[str]) -> None:
        messages = list(bodies)
        if messages[0] == "0":
            await first_may_go.wait()
        await send(messages)
        if (await storage.queue.depth()).messages == len(wanted(BATCH, 3 * BATCH)):
            others_are_stored.set()

    storage.queue.send = slow_first  # type: ignore[method-assign]
    sender = BulkSender(storage.queue.send, numbers(0, 3 * BATCH))
    running = asyncio.create_task(
        sender.run(lambda done: confirmed.append(done.confirmed))
    )
    await others_are_stored.wait()
    assert confirmed == []

    first_may_go.set()
    await running
    assert confirmed == [BATCH, 2 * BATCH, 3 * BATCH]


async def test_a_send_that_fails_for_good_leaves_a_correct_count(
    storage: Storage,
):
    send = storage.queue.send

    async def fail_third(bodies: Iterable[str]) -> None:
        messages = list(bodies)
        if int(messages[0]) == 2 * BATCH:
            raise errors.SetupError("the key was revoked")
        await send(messages)

    storage.queue.send = fail_third  # type: ignore[method-assign]
    sender = BulkSender(storage.queue.send, numbers(0, 5 * BATCH), concurrency=3)
    with pytest.raises(errors.SetupError, match="revoked"):
        await sender.run()

    assert sender.progress.confirmed == 2 * BATCH
    assert set(wanted(0, 2 * BATCH)) <= set(await numbers_in(storage))
    assert len(asyncio.all_tasks()) == 1


async def test_no_more_sends_are_in_flight_than_allowed(storage: Storage):
    send = storage.queue.send
    in_flight = 0
    most = 0
    together = asyncio.Event()

    async def counted(bodies: Iterable[str]) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        if in_flight == 3:
            together.set()
        await together.wait()
        await polling.turn()
        await send(bodies)
        in_flight -= 1

    storage.queue.send = counted  # type: ignore[method-assign]
    await BulkSender(storage.queue.send, numbers(0, 5 * BATCH), concurrency=3).run()

    assert most == 3


async def test_a_stop_ends_where_the_next_run_can_resume(storage: Storage):
    sender = BulkSender(storage.queue.send, numbers(0, 100_000))
    progress = await sender.run(
        lambda done: sender.stop() if done.confirmed >= 2 * BATCH else None
    )

    assert not progress.finished
    assert await numbers_in(storage) == wanted(0, progress.confirmed)


class NotingQueue:
    """Takes messages at once; *sent* has how many came at which second."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, int]] = []

    async def send(self, bodies: Iterable[str]) -> None:
        self.sent.append((time.monotonic(), len(list(bodies))))


def test_a_rate_is_kept_and_a_stop_does_not_wait_for_it():
    queue = NotingQueue()
    with clock.simulated_time() as loop:
        progress = clock.run(
            loop, BulkSender(queue.send, map(str, range(1_000)), rate=200).run()
        )
        assert progress.confirmed == 1_000
        # The first batch is sent at once, and the last is not waited for.
        assert loop.now == pytest.approx(1_000 / 200, abs=0.11)
        in_each_second = Counter[int]()
        for second, jobs in queue.sent:
            in_each_second[int(second)] += jobs
        assert max(in_each_second.values()) <= 220

    with clock.simulated_time() as loop:
        sender = BulkSender(NotingQueue().send, map(str, range(100)), rate=0.01)
        loop.call_later(50, sender.stop)
        stopped = clock.run(loop, sender.run())
        assert (stopped.confirmed, stopped.finished) == (1, False)
        assert loop.now == 50


async def test_a_cancelled_run_leaves_no_send_behind(storage: Storage):
    begun = asyncio.Event()
    sender = BulkSender(storage.queue.send, numbers(0, 10_000_000))
    running = asyncio.create_task(sender.run(lambda _: begun.set()))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert set(wanted(0, sender.progress.confirmed)) <= set(await numbers_in(storage))
    assert len(asyncio.all_tasks()) == 1


async def test_a_submit_that_is_killed_leaves_the_count_of_a_moment_before(
    storage: Storage, storage_settings: StorageSettings
):
    settings = storage_settings.model_dump(
        include={"storage", "queue", "container", "files_container"}
    )
    program = f"""
import asyncio, imagefleet
from imagefleet.storage.enqueue import JobSender

send, begun = JobSender.send, []

async def send_some(*arguments):
    begun.append(arguments)
    print("a batch", flush=True)
    await (send(*arguments) if len(begun) <= 8 else asyncio.Event().wait())

JobSender.send = send_some
with imagefleet.connect(**{settings!r}) as fleet:
    jobs = [imagefleet.Job(prompt="a house")] * {20 * BATCH}
    fleet.submit(jobs, campaign="spring")
"""
    submitting = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    assert submitting.stdout is not None
    try:
        await submitting.stdout.readline()
        counts = await polling.until(
            lambda: reader.counts(storage, "spring"), lambda counts: counts.sent
        )
    finally:
        submitting.kill()
        await submitting.wait()
    assert counts.pending == counts.sent
    assert 0 < (counts.sent or 0) <= (await storage.queue.depth()).messages
