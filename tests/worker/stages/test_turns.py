"""The order in which jobs begin and go on."""

import asyncio
from typing import Any

import polling
from worker.stages.prepare import Turns


async def test_every_other_turn_is_of_a_job_that_is_not_begun():
    turns, entries, begun = (
        Turns(10),
        [object() for _ in range(3)],
        [object() for _ in range(2)],
    )
    for job in begun:
        turns.go_on(job)  # type: ignore[arg-type]
    for entry in entries:
        await turns.put(entry)  # type: ignore[arg-type]
    found: list[Any] = []
    for _ in range(7):
        found.append(await turns.next())
        if found[-1] in begun:
            turns.go_on(found[-1])
    assert found == [
        entries[0],
        begun[0],
        entries[1],
        begun[1],
        entries[2],
        begun[0],
        begun[1],
    ]


async def test_whoever_waits_for_a_turn_gets_the_next_job_of_either_kind():
    turns = Turns(1)
    waiting = [asyncio.ensure_future(turns.next()) for _ in range(2)]
    await polling.turn()
    first, second = object(), object()
    turns.go_on(first)  # type: ignore[arg-type]
    await turns.put(second)  # type: ignore[arg-type]
    assert set(await asyncio.gather(*waiting)) == {first, second}


async def test_no_more_jobs_wait_than_there_is_room_for():
    turns = Turns(1)
    await turns.put(object())  # type: ignore[arg-type]
    putting = asyncio.ensure_future(turns.put(object()))  # type: ignore[arg-type]
    await polling.turn(5)
    assert not putting.done()
    await turns.next()
    await putting
