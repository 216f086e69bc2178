"""The contract of storage, which every implementation must fulfil.

The fixture `storage` runs each test on the local storage and on Azurite. What only one of them
promises is tested in `local/` and `azure/`.
"""

import asyncio
import dataclasses
import time
from datetime import UTC, datetime, timedelta

import pytest

import polling
from browsing import visible
from imagefleet import errors
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import LeasedMessage
from imagefleet.storage.settings import StorageSettings

LEASE_SECONDS = 30
SHORTEST_LEASE_SECONDS = 1

BODIES = [
    "{}",
    " leading and trailing space ",
    "both \"quotes\" and 'quotes' & <angles> ]]> &amp;",
    "emoji 🦊👩‍🚀, umlauts äöü, 漢字, العربية, a\u0301 combining",
    "tab\tand\nnewline",
    "eyJwcm9tcHQiOiAiYSBmb3gifQ==",
    "\U0010fffd \u2028 \ufffd",
]


async def until_expired(storage: Storage) -> None:
    """Until the shortest leases that began before are over; the job queue is not asked."""
    await polling.until_leases_end(storage.poison, SHORTEST_LEASE_SECONDS)


async def receive_one(
    storage: Storage, lease_seconds: float = LEASE_SECONDS
) -> LeasedMessage:
    (message,) = await storage.queue.receive(1, lease_seconds)
    return message


# Sending and receiving


async def test_a_message_has_a_body_an_id_a_delivery_count_and_a_time(
    storage: Storage,
):
    await storage.queue.send(["a job"])
    message = await receive_one(storage)
    assert message.body == "a job"
    assert message.delivery_count == 1
    assert message.id
    assert abs(message.enqueued_at - datetime.now(UTC)) < timedelta(seconds=10)


async def test_what_was_sent_can_be_taken_back_until_somebody_receives_it(
    storage: Storage,
):
    first, second = await storage.queue.send(["one", "two"])
    assert (first.body, second.body) == ("one", "two")
    assert abs(first.enqueued_at - datetime.now(UTC)) < timedelta(seconds=10)

    await storage.queue.delete(first)

    received = await receive_one(storage)
    assert (received.id, received.body) == (second.id, "two")
    with pytest.raises(errors.LeaseLost):
        await storage.queue.delete(second)
    await storage.queue.delete(received)


async def test_receive_does_not_wait_for_a_message(storage: Storage):
    assert await storage.queue.receive(32, LEASE_SECONDS) == []


async def test_messages_of_one_sender_are_received_in_order(storage: Storage):
    for body in "abcdef":
        await storage.queue.send([body])
    received = [await receive_one(storage) for _ in range(6)]
    assert [message.body for message in received] == list("abcdef")


async def test_receive_returns_at_most_max_messages(storage: Storage):
    await storage.queue.send(["a", "b", "c", "d"])
    assert len(await storage.queue.receive(3, LEASE_SECONDS)) == 3
    assert len(await storage.queue.receive(32, LEASE_SECONDS)) == 1


async def test_a_body_is_received_unchanged(storage: Storage):
    await storage.queue.send(BODIES)
    received = await storage.queue.receive(32, LEASE_SECONDS)
    assert sorted(message.body for message in received) == sorted(BODIES)


async def test_a_character_that_xml_cannot_carry_is_refused_before_anything_is_sent(
    storage: Storage,
):
    for character in ("\x00", "\x1b", "\ud83d", "\uffff"):
        with pytest.raises(errors.JobError, match=r"U\+"):
            await storage.queue.send(["fine", f"odd {character}"])
    assert (await storage.queue.depth()).messages == 0


async def test_a_message_holds_64_kib_after_escaping_and_not_a_byte_more(
    storage: Storage,
):
    for text in ("x" * 65_536, "ä" * 32_768, "&" * 13_107):
        await storage.queue.send([text])
        assert (await receive_one(storage)).body == text
        too_large = text + "&" if text[0] == "&" else text + "x"
        with pytest.raises(errors.JobError, match="65,536"):
            await storage.queue.send(["fine", too_large])
    assert (await storage.queue.depth()).messages == 3


async def test_the_poison_queue_is_separate(storage: Storage):
    await storage.poison.send(["failed"])
    assert storage.poison.name == f"{storage.queue.name}-poison"
    assert await storage.queue.receive(1, LEASE_SECONDS) == []
    (message,) = await storage.poison.receive(1, LEASE_SECONDS)
    await storage.poison.delete(message)


# Leases and receipts


async def test_a_leased_message_is_hidden_until_its_lease_expires(
    storage: Storage,
):
    await storage.queue.send(["a job"])
    first = await receive_one(storage)
    await until_expired(storage)
    assert await storage.queue.receive(1, LEASE_SECONDS) == []
    await storage.queue.release(first)
    first = await receive_one(storage, SHORTEST_LEASE_SECONDS)
    (second,) = await polling.until(lambda: storage.queue.receive(1, LEASE_SECONDS))
    assert (second.id, second.delivery_count) == (first.id, 3)
    assert second.enqueued_at == first.enqueued_at


async def test_a_renewal_extends_the_lease_and_keeps_the_body(storage: Storage):
    await storage.queue.send([BODIES[3]])
    message = await receive_one(storage, SHORTEST_LEASE_SECONDS)
    renewed = await storage.queue.renew(message, LEASE_SECONDS)
    assert (renewed.id, renewed.body, renewed.delivery_count) == (
        message.id,
        message.body,
        1,
    )
    await until_expired(storage)
    assert await storage.queue.receive(1, LEASE_SECONDS) == []
    await storage.queue.release(renewed)
    assert (await receive_one(storage)).body == BODIES[3]


async def test_a_renewal_invalidates_the_previous_receipt(storage: Storage):
    await storage.queue.send(["a job"])
    stale = await receive_one(storage)
    renewed = await storage.queue.renew(stale, LEASE_SECONDS)
    assert renewed.receipt != stale.receipt
    with pytest.raises(errors.LeaseLost):
        await storage.queue.renew(stale, LEASE_SECONDS)
    with pytest.raises(errors.LeaseLost):
        await storage.queue.release(stale)
    with pytest.raises(errors.LeaseLost):
        await storage.queue.delete(stale)
    await storage.queue.delete(renewed)
    assert (await storage.queue.depth()).messages == 0


async def test_a_lease_lost_to_another_receiver_neither_renews_nor_deletes(
    storage: Storage,
):
    await storage.queue.send(["a job"])
    slow = await receive_one(storage, SHORTEST_LEASE_SECONDS)
    (quick,) = await polling.until(lambda: storage.queue.receive(1, LEASE_SECONDS))
    with pytest.raises(errors.LeaseLost):
        await storage.queue.renew(slow, LEASE_SECONDS)
    with pytest.raises(errors.LeaseLost):
        await storage.queue.delete(slow)
    await storage.queue.delete(quick)


async def test_an_expired_lease_remains_usable_until_another_receives_the_message(
    storage: Storage,
):
    await storage.queue.send(["a job", "another"])
    one, two = await storage.queue.receive(2, SHORTEST_LEASE_SECONDS)
    await until_expired(storage)
    await storage.queue.depth()  # must not end the leases
    await storage.queue.delete(one)
    await storage.queue.delete(await storage.queue.renew(two, LEASE_SECONDS))
    assert await storage.queue.receive(1, LEASE_SECONDS) == []


async def test_a_released_message_is_visible_at_once_and_its_receipt_stale(
    storage: Storage,
):
    await storage.queue.send(["a job"])
    message = await receive_one(storage)
    await storage.queue.release(message)
    with pytest.raises(errors.LeaseLost):
        await storage.queue.release(message)
    assert (await receive_one(storage)).delivery_count == 2


async def test_a_message_released_with_a_delay_is_hidden_until_it_is_over(
    storage: Storage,
):
    await storage.queue.send(["a job", "another"])
    hidden = await receive_one(storage)
    shown = await receive_one(storage)
    await storage.queue.release(hidden, delay_seconds=LEASE_SECONDS)
    await storage.queue.release(shown, delay_seconds=1)
    (message,) = await polling.until(lambda: storage.queue.receive(2, LEASE_SECONDS))
    assert message.body == shown.body


async def test_a_renewal_and_a_release_can_replace_the_text(storage: Storage):
    await storage.queue.send(["a job"])
    renewed = await storage.queue.renew(
        await receive_one(storage), LEASE_SECONDS, '{"a": "<ä>"}'
    )
    assert renewed.body == '{"a": "<ä>"}'
    await storage.queue.release(renewed)
    again = await receive_one(storage)
    assert again.body == '{"a": "<ä>"}'
    await storage.queue.release(again, body="a third text")
    assert (await receive_one(storage)).body == "a third text"


async def test_a_deleted_message_can_neither_be_deleted_nor_renewed(
    storage: Storage,
):
    await storage.queue.send(["a job"])
    message = await receive_one(storage)
    await storage.queue.delete(message)
    with pytest.raises(errors.LeaseLost):
        await storage.queue.delete(message)
    with pytest.raises(errors.LeaseLost):
        await storage.queue.renew(message, LEASE_SECONDS)


async def test_concurrent_receivers_never_get_the_same_message(
    storage_settings: StorageSettings,
):
    received: list[str] = []

    async def drain(storage: Storage) -> None:
        while page := await storage.queue.receive(5, LEASE_SECONDS):
            received.extend(message.body for message in page)
            for message in page:
                await storage.queue.delete(message)

    async with (
        open_storage(storage_settings) as one,
        open_storage(storage_settings) as two,
    ):
        await one.create()
        await one.queue.send(str(number) for number in range(60))
        await asyncio.gather(*(drain(storage) for storage in (one, two, one, two)))
    assert sorted(received, key=int) == [str(number) for number in range(60)]


# Depth


async def test_depth_reports_the_messages_and_the_oldest_age(storage: Storage):
    empty = await storage.queue.depth()
    assert (empty.messages, empty.oldest_age_seconds) == (0, None)
    sent_at = time.time()
    await storage.queue.send(["a", "b"])
    await receive_one(storage)
    depth = await storage.queue.depth()
    assert depth.messages == 2
    assert depth.leased in {1, None}
    assert depth.oldest_age_seconds is not None
    most = time.time() - sent_at + 1  # Azure's times are whole seconds
    assert 0 <= depth.oldest_age_seconds <= most


# Operations


async def test_operations_are_counted_as_azure_bills_them(storage: Storage):
    before = dataclasses.replace(storage.operations)
    await storage.queue.send(["a job", "another"])
    first, second = await storage.queue.receive(2, LEASE_SECONDS)
    await storage.queue.delete(await storage.queue.renew(first, LEASE_SECONDS))
    await storage.queue.release(second)
    await storage.queue.depth()
    await storage.poison.send(["failed"])
    assert [message.body async for message in visible(storage.poison)] == ["failed"]
    assert storage.operations.queue - before.queue == 2 + 2 + 2 + 1 + 4 + 1 + 1

    assert await storage.blobs.create("a.png", b"x", "image/png", {})
    assert not await storage.blobs.create("a.png", b"x", "image/png", {})
    assert [name async for name in storage.blobs.names()] == ["a.png"]
    assert [record.name async for record in storage.blobs.records()] == ["a.png"]
    of_depth = 1  # a listing: which models have queues
    assert storage.operations.blob_writes - before.blob_writes == of_depth + 2 + 2

    assert await storage.blobs.read("a.png") == b"x"
    assert await storage.blobs.read_part("a.png", 0, 1) is not None
    assert await storage.blobs.delete("a.png")
    assert storage.operations.blob_reads - before.blob_reads == 2
    assert storage.operations.blob_writes - before.blob_writes == 5, "deletes are free"


# The storage as a whole


async def test_a_storage_that_was_not_created_is_a_setup_error(
    storage_settings: StorageSettings,
):
    async with open_storage(storage_settings) as storage:
        with pytest.raises(errors.SetupError, match="imagefleet load"):
            await storage.check()
        with pytest.raises(errors.SetupError):
            await storage.queue.send(["a job"])
        with pytest.raises(errors.SetupError):
            await storage.queue.receive(1, LEASE_SECONDS)
        for blobs in (storage.blobs, storage.files):
            with pytest.raises(errors.SetupError, match="imagefleet load"):
                await blobs.check()
            with pytest.raises(errors.SetupError):
                await blobs.create("a.png", b"x", "image/png", {})


async def test_images_and_files_are_apart(storage: Storage):
    assert storage.blobs.name != storage.files.name
    for number, blobs in enumerate((storage.blobs, storage.files)):
        await blobs.check()
        assert await blobs.create(
            "loras/fox.safetensors", str(number).encode(), "text/plain", {}
        )
    assert await storage.files.read("loras/fox.safetensors") == b"1"
    assert [name async for name in storage.blobs.names("loras/")] == [
        "loras/fox.safetensors"
    ]
    assert await storage.blobs.delete("loras/fox.safetensors")
    assert [name async for name in storage.files.names()] == ["loras/fox.safetensors"]


async def test_create_keeps_the_contents_of_an_existing_storage(
    storage: Storage,
):
    await storage.queue.send(["a job"])
    await storage.create()
    await storage.check()
    assert (await receive_one(storage)).body == "a job"
