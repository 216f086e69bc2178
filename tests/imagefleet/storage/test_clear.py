"""What both storages promise to `imagefleet cancel`."""

from __future__ import annotations

from imagefleet.storage.open import Storage


async def test_clear_deletes_what_waits_and_what_is_in_flight_of_one_queue(
    storage: Storage,
) -> None:
    await storage.queue.send(str(number) for number in range(40))
    await storage.poison.send(["a failed job"])
    await storage.queue.receive(3, 30)
    await storage.queue.clear()
    assert (await storage.queue.depth()).messages == 0
    assert (await storage.poison.depth()).messages == 1
    await storage.queue.clear()


async def test_a_message_is_stamped_within_what_the_queue_says_of_its_clock(
    storage: Storage,
) -> None:
    for _ in range(10):
        before = await storage.queue.stamps()
        await storage.queue.send(["{}"])
        after = await storage.queue.stamps()
        (message,) = await storage.queue.receive(1, 30)
        assert before.earliest <= message.enqueued_at <= after.latest
        await storage.queue.delete(message)
