import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

import polling
from benchmarks.stand_in import StandInEngine, StandInPrepared, draw_noise
from imagefleet import errors
from worker import gpu_thread
from worker.engine import contract
from worker.gpu_thread import EngineThread


def prepared(seed: int) -> StandInPrepared:
    return StandInPrepared(
        contract.ImageRequest("a", "", (), "euler_ancestral", 1, 1.0, seed, 16, 16)
    )


async def submit(engine_thread: EngineThread, seed: int, **how: bool) -> bool:
    return await engine_thread.submit(seed, prepared(seed), **how)


def held_engine(
    capacity: int = 1,
) -> tuple[StandInEngine, threading.Event, threading.Event]:
    """An engine, whether it has begun to draw, and whether it may go on."""
    drawing = threading.Event()
    may_end = threading.Event()

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        drawing.set()
        may_end.wait()
        return draw_noise(request)

    return StandInEngine(capacity=capacity, draw=draw), drawing, may_end


@asynccontextmanager
async def engine_thread_with(
    engine: contract.Engine | Callable[[], contract.Engine], backlog: int = 64
) -> AsyncIterator[EngineThread]:
    load = engine if callable(engine) else lambda: engine
    engine_thread = EngineThread(backlog=backlog)
    await engine_thread.start(load)
    try:
        yield engine_thread
    finally:
        await engine_thread.stop()


async def test_every_ticket_gets_its_own_pixels_back():
    async with engine_thread_with(StandInEngine(capacity=3)) as engine_thread:
        for ticket in range(20):
            submitting = asyncio.create_task(submit(engine_thread, ticket))
            if ticket < 3:
                await submitting
        outcomes = {}
        for _ in range(20):
            delivery = await engine_thread.finished()
            outcomes[delivery.finished.ticket] = delivery.finished.outcome
    assert sorted(outcomes) == list(range(20))
    for ticket, pixels in outcomes.items():
        assert (pixels == draw_noise(prepared(ticket).request)).all()  # type: ignore[union-attr]


async def test_the_engine_is_loaded_and_used_on_one_thread_that_is_not_the_loops():
    threads = set()

    def load() -> StandInEngine:
        threads.add(threading.get_ident())

        def draw(request: contract.ImageRequest) -> contract.Pixels:
            threads.add(threading.get_ident())
            return draw_noise(request)

        return StandInEngine(draw=draw)

    async with engine_thread_with(load) as engine_thread:
        await submit(engine_thread, 0)
        await engine_thread.finished()
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_an_error_while_loading_the_model_is_raised_by_start():
    def load() -> contract.Engine:
        raise errors.SetupError("there is no model")

    engine_thread = EngineThread(backlog=1)
    with pytest.raises(errors.SetupError, match="there is no model"):
        await engine_thread.start(load)
    await engine_thread.stop()


async def test_a_tick_does_not_hold_up_the_event_loop():
    engine, drawing, may_end = held_engine()
    async with engine_thread_with(engine) as engine_thread:
        await submit(engine_thread, 0)
        await polling.until(drawing.is_set)
        await polling.turn(100)
        may_end.set()  # by the loop, which would never come to it
        await engine_thread.finished()


async def test_an_urgent_request_goes_before_all_that_wait():
    engine, drawing, may_end = held_engine()
    async with engine_thread_with(engine) as engine_thread:
        await submit(engine_thread, 0)
        await polling.until(drawing.is_set)
        others = [
            asyncio.create_task(submit(engine_thread, ticket)) for ticket in (1, 2, 3)
        ]
        await polling.turn(10)
        assert await submit(engine_thread, 4, is_urgent=True)
        may_end.set()
        deliveries = [await engine_thread.finished() for _ in range(5)]
        await asyncio.gather(*others)
    assert [each.finished.ticket for each in deliveries] == [0, 4, 1, 2, 3]


async def test_urgent_requests_without_end_leave_the_others_every_eighth_turn():
    engine, drawing, may_end = held_engine(capacity=20)
    async with engine_thread_with(engine) as engine_thread:
        await submit(engine_thread, 0)
        await polling.until(drawing.is_set)
        for ticket in range(1, 11):
            await submit(engine_thread, ticket)
        for ticket in range(100, 120):
            await submit(engine_thread, ticket, is_urgent=True)
        may_end.set()
        deliveries = [await engine_thread.finished() for _ in range(31)]
    drawn = [each.finished.ticket for each in deliveries]
    assert drawn[1:9] == [100, 101, 102, 103, 104, 105, 106, 1]
    assert drawn[9:17] == [107, 108, 109, 110, 111, 112, 113, 2]


async def test_as_many_may_wait_as_the_engine_holds_though_that_changes():
    engine = StandInEngine(capacity=1)
    async with engine_thread_with(engine) as engine_thread:

        async def most_waiting() -> int:
            """Submits until one has to wait, while the thread is busy; draws all of them."""
            may_go_on = threading.Event()
            held = asyncio.create_task(engine_thread.call(may_go_on.wait))
            await polling.until(lambda: engine_thread.tick_began_at is not None)
            tickets = itertools.count()
            blocked = None
            while blocked is None:
                ticket = next(tickets)
                submitting = asyncio.create_task(submit(engine_thread, ticket))
                await polling.turn(10)  # far more than one that may be queued takes
                blocked = None if submitting.done() else submitting
            may_go_on.set()
            await held
            await blocked
            for _ in range(ticket + 1):
                await engine_thread.finished()
            return ticket

        for capacity in (1, 6, 2):
            engine.capacity = capacity
            while engine_thread.capacity != capacity:
                await engine_thread.call(lambda: None)  # wakes it
            if capacity == 2:
                await most_waiting()  # a lower one counts once the others are admitted
            assert await most_waiting() == capacity


async def test_an_engine_whose_images_are_not_taken_blocks_and_counts_it_as_backpressure(
    monkeypatch,
):
    waits = threading.Event()
    wait_for_room = EngineThread._wait_for_room

    def wait(self: EngineThread, engine: contract.Engine) -> None:
        waits.set()
        wait_for_room(self, engine)

    monkeypatch.setattr(EngineThread, "_wait_for_room", wait)
    async with engine_thread_with(
        StandInEngine(capacity=1), backlog=2
    ) as engine_thread:
        for ticket in range(4):
            await submit(engine_thread, ticket)
        await polling.until(waits.is_set)
        assert engine_thread.clock.images == 3
        for _ in range(4):
            await engine_thread.finished()
        assert engine_thread.clock.idle_seconds["backpressure"] > 0


async def test_after_stop_accepting_only_what_has_begun_is_finished():
    engine, _, may_end = held_engine()
    async with engine_thread_with(engine) as engine_thread:
        await submit(engine_thread, 0)
        await polling.until(lambda: engine_thread.in_engine)
        assert await submit(engine_thread, 1)
        waiting = [
            asyncio.create_task(engine_thread.submit(2 + n, prepared(2)))
            for n in range(3)
        ]
        await polling.turn()
        assert engine_thread.stop_accepting() == [1]
        assert await asyncio.gather(*waiting) == [False, False, False]
        assert not await submit(engine_thread, 5)
        may_end.set()
        assert (await engine_thread.finished()).finished.ticket == 0
        await engine_thread.call(
            lambda: None
        )  # before it, the engine would begin another
        assert engine_thread.clock.images == 1
        assert not engine_thread.in_engine


@pytest.mark.parametrize(
    "error", [errors.NodeError("CUDA error"), ZeroDivisionError("CUDA error")]
)
async def test_a_broken_engine_is_a_node_error_and_a_bug_too(error: Exception):
    def draw(_: contract.ImageRequest) -> contract.Pixels:
        raise error

    async with engine_thread_with(StandInEngine(draw=draw)) as engine_thread:
        watching = asyncio.create_task(engine_thread.watch())
        await submit(engine_thread, 0)
        with pytest.raises(errors.NodeError, match="CUDA error"):
            await watching


async def test_an_engine_that_hangs_is_a_node_error(
    monkeypatch,
):
    monkeypatch.setattr("worker.gpu_thread.STALL_SECONDS", 0.1)
    engine, _, may_end = held_engine()
    async with engine_thread_with(engine) as engine_thread:
        await submit(engine_thread, 0)
        with pytest.raises(errors.NodeError, match="it hangs"):
            await engine_thread.watch()
        may_end.set()
        await engine_thread.finished()


class Clock:
    """A clock that goes on by 1 second with each image, and by 3 with each wait for work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.waits = 0
        self.waits_before_images: list[int] = []
        monkeypatch.setattr(
            gpu_thread, "time", SimpleNamespace(monotonic=lambda: self.now)
        )
        real = EngineThread._wait_for_work

        def wait(thread: EngineThread) -> None:
            with monkeypatch.context() as during:
                during.setattr(thread._wake, "wait", self._waited)
                real(thread)
            thread._wake.wait(0.001)  # for the one who wakes it
            self.waits += 1

        monkeypatch.setattr(EngineThread, "_wait_for_work", wait)

    def _waited(self, _seconds: float) -> None:
        self.now += 3

    def draw(self, request: contract.ImageRequest) -> contract.Pixels:
        self.waits_before_images.append(self.waits)
        self.now += 1
        return draw_noise(request)


async def test_idle_time_counts_only_from_the_first_image_on(
    monkeypatch,
):
    clock = Clock(monkeypatch)
    async with engine_thread_with(StandInEngine(draw=clock.draw)) as engine_thread:
        counted = engine_thread.clock
        await polling.until(lambda: clock.waits >= 2)
        assert not counted.idle_seconds
        await submit(engine_thread, 0)
        await engine_thread.finished()
        first = clock.waits_before_images[0]
        await polling.until(lambda: clock.waits >= first + 2)
        await submit(engine_thread, 1)
        await engine_thread.finished()
    idle = 3 * (clock.waits_before_images[1] - first)
    assert counted.busy_seconds == 2
    assert counted.idle_seconds["starved"] >= idle >= 6
    assert counted.idle_fraction == pytest.approx(idle / (idle + 2))


async def test_taking_up_what_is_compiled_is_no_first_image(
    monkeypatch,
):
    class Compiling(StandInEngine):
        is_compiling = True
        due = 3

        @property
        def busy(self) -> bool:
            return self.due > 0 or super().busy

        def tick(self) -> list[contract.Finished]:
            self.due -= 1
            return super().tick()

    engine = Compiling(draw=Clock(monkeypatch).draw)
    async with engine_thread_with(engine) as engine_thread:
        await polling.until(lambda: not engine.due)
        clock = engine_thread.clock
        assert (clock.busy_seconds, clock.first_at, clock.first_image_at) == (
            0,
            None,
            None,
        )
        assert engine_thread.engine is engine
        await submit(engine_thread, 0)
        await engine_thread.finished()
        assert clock.busy_seconds == 1
        assert clock.first_image_at is not None
        assert clock.full_speed_at is None, "something is compiled"
        engine.is_compiling = False
        await submit(engine_thread, 1)
        await engine_thread.finished()
        assert clock.full_speed_at is not None
        assert clock.full_speed_at > clock.first_image_at


async def test_a_worker_that_only_checked_itself_or_failed_has_no_first_image_and_no_full_speed():
    def draw(request: contract.ImageRequest) -> contract.Pixels:
        if request.seed == 1:
            raise errors.TransientError("out of memory")
        return draw_noise(request)

    async with engine_thread_with(StandInEngine(draw=draw)) as engine_thread:
        assert await engine_thread.draw(prepared(0)) is not None
        await submit(engine_thread, 1)
        await engine_thread.finished()
        clock = engine_thread.clock
        assert clock.images == 2
        assert (clock.first_image_at, clock.full_speed_at) == (None, None)
        await submit(engine_thread, 2)
        await engine_thread.finished()
        assert clock.first_image_at == clock.full_speed_at
        assert clock.first_image_at is not None


class WarmingUp(StandInEngine):
    """Takes 5 s for an image of 16x16 at full speed, and twice as long while it compiles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capacity: int = 2) -> None:
        super().__init__(capacity=capacity)
        self.is_compiling = True
        self.unet_row_pixels = 0
        self._now = 0.0
        monkeypatch.setattr(
            gpu_thread, "time", SimpleNamespace(monotonic=lambda: self._now)
        )

    def tick(self) -> list[contract.Finished]:
        pixels = sum(each.width * each.height for _, each in self._admitted)
        self.unet_row_pixels += pixels
        self._now += 5 * pixels / 16**2 * (2 if self.is_compiling else 1)
        return super().tick()


async def draw_in_turn(
    engine_thread: EngineThread, images: int, width: int = 16
) -> None:
    for ticket in range(images):
        request = replace(prepared(ticket).request, width=width)
        await engine_thread.submit(ticket, StandInPrepared(request))
        await engine_thread.finished()


async def test_the_speed_while_it_warmed_up_is_known_after_a_minute_at_full_speed(
    monkeypatch, caplog
):
    engine = WarmingUp(monkeypatch)
    caplog.set_level(logging.INFO)
    async with engine_thread_with(engine) as engine_thread:
        clock = engine_thread.clock
        await draw_in_turn(engine_thread, 4)
        assert (clock.first_image_at, clock.full_speed_at) == (10, None)
        engine.is_compiling = False
        await draw_in_turn(engine_thread, 1)
        assert clock.full_speed_at == 45
        # Images of another size, and of one that is compiled only now.
        await draw_in_turn(engine_thread, 2, width=32)
        engine.is_compiling = True
        await draw_in_turn(engine_thread, 20)
        engine.is_compiling = False
        await draw_in_turn(engine_thread, 3, width=32)
        assert clock.warm_up_speed is None, "it may end here, and is no guess then"
        await draw_in_turn(engine_thread, 2)
        # Three images of 10 s, and one that began when the last had been compiled.
        assert clock.warm_up_speed == pytest.approx(4 / 35 * 5)
    said = [getattr(each, "warm_up_speed", None) for each in caplog.records]
    assert clock.warm_up_speed in said


@pytest.mark.parametrize(("capacity", "images"), [(8, 10), (2, 1)])
async def test_a_starved_worker_and_one_that_hardly_warmed_up_have_no_such_speed(
    monkeypatch, capacity: int, images: int
):
    engine = WarmingUp(monkeypatch, capacity)
    monkeypatch.setattr("worker.gpu_clock.LEAST_WARM_UP_SECONDS", 6.0)
    async with engine_thread_with(engine) as engine_thread:
        await draw_in_turn(engine_thread, images)
        engine.is_compiling = False
        await draw_in_turn(engine_thread, 20)
        assert engine_thread.clock.full_speed_at == 10 * images + 5
        assert engine_thread.clock.warm_up_speed is None


async def test_a_worker_that_starts_again_has_figures_of_its_own_and_another_model_no_speed(
    monkeypatch,
):
    first = WarmingUp(monkeypatch)
    second = WarmingUp(monkeypatch)
    async with engine_thread_with(first) as engine_thread:
        await draw_in_turn(engine_thread, 4)
        await engine_thread.replace(lambda: second)
        second.is_compiling = False
        await draw_in_turn(engine_thread, 20)
        assert engine_thread.clock.full_speed_at is not None
        assert engine_thread.clock.warm_up_speed is None
    async with engine_thread_with(StandInEngine()) as engine_thread:
        clock = engine_thread.clock
        assert (clock.first_image_at, clock.full_speed_at) == (None, None)


async def test_what_is_drawn_beside_jobs_is_not_among_their_images_and_ends_with_a_drain():
    engine, drawing, may_end = held_engine()
    async with engine_thread_with(engine) as engine_thread:
        await submit(engine_thread, 1)
        await asyncio.to_thread(drawing.wait)
        waiting = asyncio.create_task(engine_thread.draw(prepared(2)))
        await polling.turn()
        assert engine_thread.stop_accepting() == []
        assert await waiting is None
        assert await engine_thread.draw(prepared(3)) is None
        may_end.set()
    async with engine_thread_with(StandInEngine()) as engine_thread:
        await submit(engine_thread, 1)
        assert await engine_thread.draw(prepared(2)) is not None
        assert (await engine_thread.finished()).finished.ticket == 1


async def test_a_call_runs_on_the_engines_thread_between_ticks_and_raises_its_error():
    engine = StandInEngine()
    async with engine_thread_with(engine) as engine_thread:
        assert (
            await engine_thread.call(threading.get_ident) == engine_thread._thread.ident
        )
        with pytest.raises(ZeroDivisionError):
            await engine_thread.call(lambda: 1 / 0)
        await submit(engine_thread, 0)
        assert (await engine_thread.finished()).finished.ticket == 0


async def test_an_estimate_that_comes_behind_its_image_is_left_out():
    class Late(StandInEngine):
        def tick(self) -> list[contract.Finished]:
            found = super().tick()
            return [*found, *(replace(each, is_estimate=True) for each in found)]

    async with engine_thread_with(Late()) as engine_thread:
        for ticket in range(2):
            await submit(engine_thread, ticket)
            finished = (await engine_thread.finished()).finished
            assert (finished.ticket, finished.is_estimate) == (ticket, False)


async def test_a_call_is_answered_while_finished_images_wait_for_whoever_calls():
    """A judge that asks for the GPU takes no images meanwhile: both would wait for good."""
    async with engine_thread_with(StandInEngine(), backlog=1) as engine_thread:
        for ticket in range(3):
            await submit(engine_thread, ticket)
        # The first is delivered, the second waits for room.
        await polling.until(lambda: engine_thread.in_engine == 1)
        assert await engine_thread.call(lambda: 5) == 5
        for _ in range(3):
            await engine_thread.finished()
