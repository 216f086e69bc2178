"""What both storages promise to `imagefleet cancel`."""

from datetime import timedelta

from imagefleet.cancelled import BLUR_SECONDS
from imagefleet.storage.open import Storage


async def test_clear_deletes_what_waits_and_what_is_in_flight_of_one_queue(
    storage: Storage,
):
    await storage.queue.send(str(number) for number in range(40))
    await storage.poison.send(["a failed job"])
    await storage.queue.receive(3, 30)
    await storage.queue.clear()
    assert (await storage.queue.depth()).messages == 0
    assert (await storage.poison.depth()).messages == 1
    await storage.queue.clear()


async def test_a_message_is_stamped_within_what_the_clock_says(
    storage: Storage,
):
    clock = storage.blobs.clock
    await storage.queue.depth()  # the clock's first answer
    blur = timedelta(seconds=BLUR_SECONDS)
    for _ in range(10):
        before = clock.now() - blur
        await storage.queue.send(["{}"])
        after = clock.now() + blur
        (message,) = await storage.queue.receive(1, 30)
        assert before <= message.enqueued_at <= after
        await storage.queue.delete(message)
