import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

import polling
from imagefleet import errors
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import LeasedMessage
from messages import failing
from worker.leases import Lease, LeaseKeeper

LEASE_SECONDS = 1


async def take(storage: Storage, keeper: LeaseKeeper, body: str = "a") -> Lease:
    await storage.queue.send([body])
    leased_at = time.monotonic()
    (message,) = await storage.queue.receive(1, LEASE_SECONDS)
    return keeper.hold(message, leased_at)


def counted(storage: Storage) -> tuple[LeaseKeeper, list[str]]:
    """A keeper, and what has come of its renewals."""
    results: list[str] = []
    return LeaseKeeper(storage.queue, LEASE_SECONDS, on_renewal=results.append), results


@contextlib.asynccontextmanager
async def running(keeper: LeaseKeeper) -> AsyncIterator[None]:
    task = asyncio.create_task(keeper.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_renewed_lease_outlives_its_time_and_no_other_worker_gets_the_message(
    storage: Storage,
):
    keeper, results = counted(storage)
    async with running(keeper):
        lease = await take(storage, keeper)
        await polling.until(lambda: results.count("renewed") >= 3)
        await polling.until_leases_end(storage.poison, LEASE_SECONDS)
        assert await storage.queue.receive(1, LEASE_SECONDS) == []
        await keeper.acknowledge(lease)
    assert set(results) == {"renewed"}
    assert (await storage.queue.depth()).messages == 0


async def test_an_acknowledgement_during_renewals_never_uses_a_stale_receipt(
    storage: Storage,
):
    keeper = LeaseKeeper(storage.queue, LEASE_SECONDS)
    leases = [await take(storage, keeper, f"m{number}") for number in range(8)]
    for lease in leases:
        lease.expires_at = 0  # every one of them is due at once
    async with running(keeper):
        await asyncio.gather(*(keeper.acknowledge(lease) for lease in leases))
    assert not any(lease.is_lost for lease in leases)
    assert (await storage.queue.depth()).messages == 0


async def test_a_lease_that_another_worker_took_over_is_lost_and_not_acknowledged(
    storage: Storage,
):
    keeper, results = counted(storage)
    lease = await take(storage, keeper)
    # No keeper runs: the lease expires.
    (taken_over,) = await polling.until(lambda: storage.queue.receive(1, 30))
    async with running(keeper):
        await polling.until(lambda: lease.is_lost)
        with pytest.raises(errors.LeaseLost):
            await keeper.acknowledge(lease)
    assert results == ["lost"]
    await storage.queue.delete(taken_over)  # still the other worker's to end


async def test_a_lease_handed_back_is_available_at_once(storage: Storage):
    keeper = LeaseKeeper(storage.queue, 60)
    lease = await take(storage, keeper)
    await keeper.release(lease)
    (again,) = await storage.queue.receive(1, LEASE_SECONDS)
    assert again.delivery_count == 2


LOST_REPLY = errors.TransientError("the connection was dropped")


async def test_a_lease_is_unknown_after_a_renewal_without_a_reply_until_the_next(
    storage: Storage, caplog, monkeypatch
):
    keeper, results = counted(storage)
    monkeypatch.setattr(
        storage.queue, "renew", failing(storage.queue.renew, LOST_REPLY, 1)
    )
    lease = await take(storage, keeper)
    async with running(keeper):
        await polling.until(lambda: results[:1] == ["unknown"])
        lease.check()  # not lost
        await polling.until(lambda: "renewed" in results)
        await keeper.acknowledge(lease)
    assert results[:2] == ["unknown", "renewed"]
    assert "leases cannot be renewed" in caplog.text


async def test_an_outage_with_many_leases_is_one_warning(
    storage: Storage, caplog, monkeypatch
):
    keeper, results = counted(storage)
    monkeypatch.setattr(
        storage.queue, "renew", failing(storage.queue.renew, LOST_REPLY, 30)
    )
    for number in range(10):
        await take(storage, keeper, f"m{number}")
    async with running(keeper):
        await polling.until(lambda: "renewed" in results)
    assert results.count("unknown") == 30
    assert caplog.text.count("leases cannot be renewed") == 1


async def test_a_permanently_refused_renewal_ends_the_keeper(
    storage: Storage, monkeypatch
):
    closed = failing(storage.queue.renew, errors.SetupError("the token has expired"), 1)
    monkeypatch.setattr(storage.queue, "renew", closed)
    keeper = LeaseKeeper(storage.queue, LEASE_SECONDS)
    await take(storage, keeper)
    with pytest.raises(errors.SetupError, match="the token has expired"):
        await keeper.run()


async def test_a_dropped_lease_is_no_longer_renewed(storage: Storage):
    keeper, results = counted(storage)
    lease = await take(storage, keeper)
    await take(storage, keeper, "b")  # whose turn comes after it
    keeper.drop(lease)
    receipt = lease.message.receipt
    async with running(keeper):
        await polling.until(lambda: "renewed" in results)
    assert lease.message.receipt == receipt


async def test_leases_that_end_first_are_renewed_first(storage: Storage, monkeypatch):
    renewed: list[str] = []
    renew = storage.queue.renew

    async def noting(message: LeasedMessage, *given: Any) -> LeasedMessage:
        renewed.append(message.body)
        return await renew(message, *given)

    monkeypatch.setattr(storage.queue, "renew", noting)
    keeper = LeaseKeeper(storage.queue, LEASE_SECONDS)
    now = time.monotonic()
    for body, seconds in (("last", 0.3), ("first", 0.1), ("second", 0.2)):
        (await take(storage, keeper, body)).expires_at = now + seconds
    async with running(keeper):
        await polling.until(lambda: len(renewed) >= 3)
    assert renewed[:3] == ["first", "second", "last"]
