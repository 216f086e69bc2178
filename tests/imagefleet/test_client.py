"""The client on both storages, with the real pipeline around the stand-in engine."""

import asyncio
import dataclasses
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import imagefleet
import polling
from browsing import visible
from imagefleet import Job, aio, cancelled, errors
from imagefleet.job.message import read_job
from imagefleet.storage.settings import StorageSettings
from storages import local_only

ROOT = Path(__file__).parents[2]


async def collect(batch: aio.Batch, seconds: float = 20) -> dict[str, aio.Result]:
    results = [result async for result in batch.results(seconds)]
    assert len({result.id for result in results}) == len(results)
    return {result.id: result for result in results}


async def test_results_come_with_their_images(fleet: aio.Fleet, work):
    jobs = [
        Job(prompt="a house", id="house", metadata={"order": 7}),
        Job(prompt="a tree", seed=5),
    ]
    batch = await fleet.submit(jobs, campaign="spring")
    working = asyncio.create_task(work())
    results = await collect(batch)
    await working

    house, tree = (results[job_id] for job_id in batch.ids)
    assert (house.id, house.status, house.campaign) == ("house", "completed", "spring")
    assert (house.blobs, house.metadata) == (("spring/house.png",), {"order": 7})
    assert (await house.image()).size == (16, 16)
    assert (await house.image()).text["parameters"].startswith("a house\n")  # type: ignore[attr-defined]
    assert (await tree.data()).startswith(b"\x89PNG")
    assert tree.seed == 5
    assert await collect(batch) == results, "a batch can be asked again"


async def test_a_job_is_replayed_with_other_values(fleet: aio.Fleet, work):
    batch = await fleet.submit(
        [Job(prompt="broken", id="a", steps=30, model="stand-in")]
    )
    await work()
    for wrong, complaint in [
        ({"stepz": 20}, "set stepz: a job has no such field; did you mean 'steps'?"),
        ({"id": "b"}, "set id: a replay keeps it"),
    ]:
        with pytest.raises(errors.SetupError, match=f"^{re.escape(complaint)}"):
            await fleet.replay(set=wrong)
    changes = {"prompt": "a house", "steps": 20, "model": None}
    changes["output"] = imagefleet.Output(quality=50)
    assert (await fleet.replay(set=changes)).done == 1
    (message,) = [message async for message in visible(fleet.storage.queue)]
    sent = read_job(message.body, message.id)
    assert (sent.id, sent.steps, sent.model, sent.output.quality) == ("a", 20, None, 50)
    await work()
    assert (await collect(batch))["a"].records[0].prompt == "a house"


async def test_the_same_jobs_without_ids_are_different_images(fleet: aio.Fleet):
    batches = [await fleet.submit([Job(prompt="a house")] * 2) for _ in range(2)]

    ids = [job_id for batch in batches for job_id in batch.ids]
    assert len(set(ids)) == 4
    bodies = [message.body async for message in visible(fleet.storage.queue)]
    assert {read_job(body, "message").id for body in bodies} == set(ids)
    assert len({json.loads(body)["seed"] for body in bodies}) == 4


async def test_an_unknown_job_is_unknown_and_not_waited_for(fleet: aio.Fleet):
    await fleet.submit([])

    assert await fleet.job("nobody").status() == "unknown"
    with pytest.raises(errors.FleetError, match="there is no job spring/nobody in "):
        await fleet.job("spring/nobody").result()


async def test_a_job_that_fails_while_it_is_waited_for(fleet: aio.Fleet, work):
    await fleet.submit([Job(prompt="broken", id="a")])
    job = fleet.job("a")
    assert await job.status() == "pending"
    with pytest.raises(TimeoutError, match="the job is not done"):
        await job.result(timeout=0.05)
    waiting = asyncio.create_task(job.result(timeout=20))
    await work()

    assert ((await waiting).status, (await waiting).reason) == (
        "failed",
        "the prompt is broken",
    )


async def test_closing_ends_pending_calls(connect_options: dict[str, Any]):
    async with aio.connect(**connect_options) as fleet:
        batch = await fleet.submit([Job(prompt="a house", id="a")])
        waiting = [
            asyncio.create_task(collect(batch)),
            asyncio.create_task(fleet.job("a").result()),
        ]
        before = dataclasses.replace(fleet.storage.operations)
        await polling.until(lambda: fleet.storage.operations != before)
    for task in waiting:
        with pytest.raises(errors.FleetError, match="closed"):
            await task
    with pytest.raises(errors.FleetError, match="closed"):
        await fleet.depth()
    assert len(asyncio.all_tasks()) == 1


@local_only
async def test_an_error_in_the_callers_iterable_comes_back_to_the_caller(
    fleet: aio.Fleet,
):
    def jobs() -> Iterator[Job]:
        yield from [Job(prompt="a house")] * 150
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fleet.submit(jobs())
    assert (await fleet.depth()).queue.messages == 0, (
        "nothing is sent before all is checked"
    )
    assert len(asyncio.all_tasks()) == 1


@local_only
@pytest.mark.parametrize("campaign", ["../up", "a b", "-x", "x" * 129, "a/b"])
async def test_an_unsafe_campaign_is_refused(fleet: aio.Fleet, campaign: str):
    with pytest.raises(errors.JobError, match="campaign '"):
        await fleet.submit([Job(prompt="a house")], campaign=campaign)
    with pytest.raises(errors.JobError, match="campaign '"):
        fleet.job("a", campaign=campaign)


@local_only
async def test_a_jobs_own_campaign_has_precedence(fleet: aio.Fleet, work):
    jobs = [
        Job(prompt="a house", id="a", campaign="autumn"),
        Job(prompt="a house", id="a"),
    ]
    batch = await fleet.submit(jobs, campaign="spring")
    await work()
    blobs = [result.blobs async for result in batch.results(0)]
    assert sorted(blobs) == [("autumn/a.png",), ("spring/a.png",)]


@local_only
async def test_a_job_that_no_message_can_hold_is_refused_by_its_id(
    fleet: aio.Fleet,
):
    long = Job(prompt="x" * 60_000, negative_prompt="y" * 60_000, id="long")
    with pytest.raises(errors.JobError, match="job default/long: the message has 120"):
        await fleet.submit([Job(prompt="a house", id="a"), long])
    assert (await fleet.depth()).queue.messages == 0, (
        "nothing is sent before all is checked"
    )


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"storage": "ftp://x"}, "address is not understood"),
        ({"storage": "local:"}, "lacks a folder"),
        ({"storage": "local:x", "queue": "No_Name"}, "queue: should be 3 to 56"),
        (
            {"storage": "local:x", "que": "jobs"},
            "que: unknown key; did you mean 'queue'",
        ),
        ({"storage": "https://a123.blob.core.windows.net"}, "SAS"),
    ],
)
def test_an_invalid_address_or_setting_is_one_clear_sentence(
    options: dict[str, Any], complaint: str
):
    for connect in (imagefleet.connect, aio.connect):
        with pytest.raises(errors.SetupError, match=complaint) as caught:
            connect(**options)
        assert "\n" not in caught.value.message


def test_settings_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("IMAGEFLEET_STORAGE", f"local:{tmp_path / 'data'}")
    monkeypatch.setenv("IMAGEFLEET_QUEUE", "others")
    with imagefleet.connect(queue="mine") as fleet:
        fleet.submit([Job(prompt="a house")])
        assert fleet.depth().queue.messages == 1
    with imagefleet.connect() as fleet:
        fleet.submit([])  # which creates the queue
        assert fleet.depth().queue.messages == 0


def test_the_sync_client_does_all_that_the_async_one_does(
    connect_options: dict[str, Any], work, monkeypatch
):
    monkeypatch.setattr(cancelled, "LOAD_SECONDS", 0)
    with imagefleet.connect(**connect_options) as fleet:
        jobs = (Job(prompt=prompt, id=prompt) for prompt in ("good", "broken"))
        batch = fleet.submit(jobs, campaign="spring")
        assert (len(batch), batch.ids) == (2, ["good", "broken"])
        assert fleet.job("spring/good").status == "pending"
        worker = threading.Thread(target=lambda: asyncio.run(work()))
        worker.start()
        results = {result.id: result for result in batch.results()}
        worker.join()

        assert results["good"].image().size == (16, 16)
        assert results["good"] == fleet.job("good", campaign="spring").result()
        assert (results["broken"].status, results["broken"].reason) == (
            "failed",
            "the prompt is broken",
        )
        assert [failed.id for failed in fleet.failed(error="broken")] == ["broken"]
        assert not list(fleet.failed(error="lora"))
        assert {result.id: result.status for result in fleet.results("spring")} == {
            "good": "completed",
            "broken": "failed",
        }
        counts = fleet.campaigns()["spring"]
        assert (counts.sent, counts.completed, counts.failed, counts.pending) == (
            2,
            1,
            1,
            0,
        )
        assert fleet.depth().failed.messages == 1
        assert fleet.replay(id="broken", set={"steps": 5}).done == 1
        asyncio.run(work())
        assert next(fleet.failed()).records[0].steps == 5
        assert fleet.discard(campaign="spring").done == 1
        assert fleet.job("spring/broken").status == "unknown"
        fleet.submit([Job(prompt="a house", id="late")], campaign="autumn")
        fleet.cancel("autumn")
        asyncio.run(work())
        assert fleet.job("autumn/late").status == "cancelled"


@local_only
def test_closing_in_another_thread_ends_the_wait(
    connect_options: dict[str, Any],
):
    fleet = imagefleet.connect(**connect_options)
    batch = fleet.submit([Job(prompt="a house")])
    operations = fleet._inner.storage.operations
    before = dataclasses.replace(operations)

    def close_what_waits() -> None:
        polling.until_in_thread(lambda: operations != before)
        fleet.close()

    threading.Thread(target=close_what_waits).start()
    with pytest.raises(errors.FleetError, match="closed"):
        list(batch.results())
    fleet.close()
    with pytest.raises(errors.FleetError, match="closed"):
        fleet.depth()


@local_only
def test_a_loop_over_results_may_end_early(connect_options: dict[str, Any], work):
    with imagefleet.connect(**connect_options) as fleet:
        batch = fleet.submit([Job(prompt="a house") for _ in range(3)])
        asyncio.run(work())
        for result in batch.results():
            assert result.status == "completed"
            break
        assert len(list(batch.results(0))) == 3


def test_importing_the_package_loads_nothing_heavy():
    program = """
import sys, imagefleet
heavy = {"azure", "aiohttp", "torch", "typer", "PIL", "numpy"}
print(sorted({"pydantic", "asyncio", *heavy} & set(sys.modules)))
imagefleet.connect("local:x").close()
imagefleet.aio, imagefleet.errors.JobError, imagefleet.Output
print(sorted(heavy & set(sys.modules)))
"""
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed == "[]\n[]\n"


@local_only
def test_the_example_runs(storage_settings: StorageSettings, tmp_path, work):
    with subprocess.Popen(
        [sys.executable, ROOT / "examples" / "client.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "IMAGEFLEET_STORAGE": storage_settings.storage},
        stdout=subprocess.PIPE,
        text=True,
    ) as example:
        images = Path(storage_settings.storage.removeprefix("local:")) / "images"

        def work_until_it_ends() -> bool:
            if images.exists():  # created last
                asyncio.run(work())
            return example.poll() is not None

        try:
            polling.until_in_thread(work_until_it_ends)
        finally:
            example.kill()
        assert example.stdout is not None
        printed = example.stdout.read()
    assert example.returncode == 0
    assert printed.count("completed") == 3
    assert len(list(tmp_path.glob("*.png"))) == 3


async def test_jobs_are_submitted_with_a_priority(fleet: aio.Fleet):
    jobs = [Job(prompt="a house")]
    await fleet.submit(jobs)
    await fleet.submit(jobs, priority="high")
    await fleet.submit([*jobs, Job(prompt="a tree")], priority="low")
    depth = (await fleet.depth()).queue
    assert [each.messages for each in depth.by_queue.values()] == [1, 1, 2]
    assert depth.messages == 4
    with pytest.raises(
        errors.SetupError, match="'urgent' is not one of high, normal, low"
    ):
        await fleet.submit(jobs, priority="urgent")  # type: ignore[arg-type]
