"""Jobs whose workers died: generated alone, so that the job or the chance is found out."""

import asyncio

import pytest

import polling
from benchmarks.stand_in import StandInEngine
from imagefleet import errors
from imagefleet.storage.deliveries import CONDEMNED_AFTER, Deliveries
from imagefleet.storage.open import Storage
from messages import Drawing, failed_jobs, message, redelivered
from worker.engine import contract
from worker.stages.prepare import Isolation


async def vanish(storage: Storage, times: int, *, alone: bool = False) -> None:
    """Takes the next message as workers do that die with it, *alone* while nothing else runs."""
    for _ in range(times):
        (leased,) = await storage.queue.receive(1, 30)
        body = (
            Deliveries.of(leased).marked_alone().write_to(leased.body)
            if alone
            else None
        )
        await storage.queue.release(leased, body=body)


async def test_a_job_that_killed_the_workers_that_had_it_alone_goes_to_the_poison_queue_untried(
    storage: Storage, run_pipeline
):
    await storage.queue.send([message(id="killer", campaign="c")])
    await vanish(storage, 2)
    await vanish(storage, CONDEMNED_AFTER, alone=True)
    pipeline = await run_pipeline()
    (record,) = await failed_jobs(storage)
    assert (
        "lost their leases 7 times, 5 of them while they generated nothing else"
        in record.reason
    )
    assert (record.id, record.campaign) == ("killer", "c")
    assert pipeline.engine_thread.clock.images == 0


async def test_a_job_that_was_only_held_by_workers_that_vanished_is_generated_alone(
    storage: Storage, run_pipeline
):
    company: dict[int, int] = {}
    engine = StandInEngine(capacity=4, tick_seconds=0.05)
    tick = engine.tick

    def counted_tick() -> list[contract.Finished]:
        for _, request in engine._admitted:
            company[request.seed] = len(engine._admitted)
        return tick()

    engine.tick = counted_tick  # type: ignore[method-assign]
    await storage.queue.send([message(id="innocent", seed=100)])
    await vanish(storage, 9)
    pipeline = await run_pipeline(
        engine,
        sent=(message(id=f"j{seed}", seed=seed) for seed in range(12)),
        max_attempts=2,
    )
    assert pipeline.metrics.outcomes == {"completed": 13}
    assert company.pop(100) == 1
    assert max(company.values()) > 1
    assert (await storage.queue.depth()).messages == 0


async def test_a_job_handed_back_by_many_workers_is_no_suspect(
    storage: Storage, run_pipeline
):
    await storage.queue.send([message(id="j")])
    for _ in range(4):
        (leased,) = await storage.queue.receive(1, 30)
        body = Deliveries.of(leased).ended(failed=False).write_to(leased.body)
        await storage.queue.release(leased, body=body)
    (leased,) = await storage.queue.receive(1, 30)
    assert Deliveries.of(leased) == Deliveries(known=4)
    await storage.queue.release(leased)
    pipeline = await run_pipeline(max_attempts=1)
    assert pipeline.metrics.outcomes == {"completed": 1}


async def test_a_suspect_that_fails_leaves_the_way_free_for_the_others(
    storage: Storage, run_pipeline
):
    bad = [message(id=f"bad{number}", seed=100) for number in range(3)]
    await redelivered(storage, *bad)
    for _ in range(2):
        for leased in await storage.queue.receive(3, 30):
            await storage.queue.release(leased)
    pipeline = await run_pipeline(
        Drawing(lambda each: errors.JobError("x") if each.seed == 100 else None),
        sent=(message(id=f"j{seed}", seed=seed) for seed in range(5)),
    )
    assert pipeline.metrics.outcomes == {"failed": 3, "completed": 5}


async def test_nothing_shares_the_time_of_a_suspect():
    isolation = Isolation()
    running: list[str] = []
    together: set[tuple[str, ...]] = set()

    async def work(name: str) -> None:
        async with (
            isolation.alone() if name.startswith("suspect") else isolation.shared
        ):
            running.append(name)
            for _ in range(3):
                together.add(tuple(sorted(running)))
                await polling.turn()
            running.remove(name)

    names = ["a", "b", "suspect 1", "c", "suspect 2", "d"]
    await asyncio.gather(*(work(name) for name in names))
    assert [each for each in together if len(each) > 1 and "suspect" in str(each)] == []
    assert max(map(len, together)) > 1


@pytest.mark.parametrize("stage", ["waiting", "inside"])
async def test_a_cancelled_suspect_lets_the_others_go_on(stage: str):
    isolation = Isolation()
    release = asyncio.Event()

    async def share() -> None:
        async with isolation.shared:
            await release.wait()

    inside = asyncio.Event()

    async def be_alone() -> None:
        async with isolation.alone():
            inside.set()
            await asyncio.Event().wait()

    sharing = asyncio.create_task(share())
    await polling.turn()
    suspect = asyncio.create_task(be_alone())
    await polling.turn(5)
    assert not inside.is_set()
    if stage == "inside":
        release.set()
        await inside.wait()
    suspect.cancel()
    await asyncio.gather(suspect, return_exceptions=True)
    release.set()
    await asyncio.gather(sharing, share())
