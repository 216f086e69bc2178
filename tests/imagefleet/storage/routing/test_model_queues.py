"""Queues by model: their names, and that each job gets into its own, on both storages."""

import json
import logging
import re
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browsing import visible
from imagefleet import errors
from imagefleet.job.prompt import SAFE_NAME
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.enqueue import JobSender
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import JobQueue
from imagefleet.storage.routing.models import SERVED_FOLDER, named
from imagefleet.storage.settings import PRIORITIES, StorageSettings, job_queue
from tokens import by_tokens

AZURE_RULE = re.compile(r"(?=.{3,63}$)[a-z0-9](-?[a-z0-9])*")

A = "Dreamshaper 8"
B = "sd_xl+base (1.0)"


def job(model: str | None = None, **fields: object) -> str:
    named = {} if model is None else {"model": model}
    return json.dumps({"prompt": "a cat", **named, **fields})


async def ids(queue: JobQueue) -> list[str]:
    return sorted([json.loads(each.body)["id"] async for each in visible(queue)])


# Names


@settings(max_examples=40)
@given(
    st.from_regex(SAFE_NAME, fullmatch=True),
    st.integers(3, 40),
    st.sampled_from(PRIORITIES),
)
def test_every_model_has_a_queue_name_that_azure_accepts(
    model: str, length: int, priority: str
):
    assert AZURE_RULE.fullmatch(job_queue("j" * length, model, priority))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Foo", "foo"),
        ("a_b", "a-b"),
        ("a" * 60 + "1", "a" * 60 + "2"),
        ("x.y", "x y"),
        ("_", "__"),
    ],
)
def test_models_whose_names_differ_share_no_queue(one: str, other: str):
    assert job_queue("jobs", one) != job_queue("jobs", other)


def test_the_names_stay_what_they_are():
    """Another version's jobs would not be found."""
    assert job_queue("jobs") == "jobs"
    assert job_queue("jobs", None, "high") == "jobs-high"
    assert job_queue("jobs", A, "low") == "jobs-dreamshaper-8-rhhjxt4rma-low"


def test_a_queue_name_without_room_for_models_is_refused():
    StorageSettings(queue="j" * 56).queues_of(None)
    with pytest.raises(errors.SetupError, match="40 characters at most"):
        StorageSettings(queue="j" * 41).queues_of(A)


# Sending


@pytest.mark.parametrize("priority", PRIORITIES)
async def test_each_job_gets_into_the_queue_of_its_model(
    storage: Storage, priority: str
):
    await storage.models.send(
        [job(A, id="a"), job(id="none"), job(B, id="b"), job(A, id="a2")], priority
    )
    assert await ids(storage.models.of(A)[priority]) == ["a", "a2"]
    assert await ids(storage.models.of(B)[priority]) == ["b"]
    assert await ids(storage.queues[priority]) == ["none"]


async def test_what_is_no_valid_job_is_left_to_the_worker_to_refuse(
    storage: Storage,
):
    bodies = [
        'no JSON, but "model"',
        job("../etc", id="x"),
        '{"model": 5}',
        '["model"]',
    ]
    await storage.models.send(bodies)
    found = [each.body async for each in visible(storage.queues["normal"])]
    assert sorted(found) == sorted(bodies)


async def test_a_job_in_base64_gets_into_the_queue_of_its_model(
    storage: Storage,
):
    import base64

    await storage.models.send([base64.b64encode(job(A, id="a").encode()).decode()])
    assert (await storage.models.of(A)["normal"].depth()).messages == 1


async def test_a_job_too_large_keeps_all_from_being_sent(storage: Storage):
    with pytest.raises(errors.JobError, match="a queue message holds"):
        await storage.models.send([job(A), job(B, negative_prompt="x" * 70_000)])
    assert (await storage.queue.depth()).messages == 0


async def test_depth_find_and_clear_know_the_queues_of_every_model(
    storage: Storage, storage_settings: StorageSettings
):
    await storage.models.send([job(A, id="a"), job(id="none")])
    await storage.models.send([job(B, id="b")], "high")
    async with open_storage(storage_settings) as other:  # which has sent nothing
        depth = await other.queue.depth()
        by_model: Counter[str | None] = Counter()
        for each in depth.by_queue.values():
            by_model[each.model] += each.messages
        assert by_model == {A: 1, B: 1, None: 1}
        assert depth.messages == 3
        assert await ids(other.queue) == ["a", "b", "none"]
        assert [each.id async for each, _ in other.queue.find('"b"')]
        await other.queue.clear()
        assert (await other.queue.depth()).messages == 0


async def test_the_depth_says_nothing_of_queues_that_only_another_fleet_has(
    storage: Storage,
    storage_settings: StorageSettings,
    caplog,
):
    """Fleets that share a container of images see each other's models."""
    await storage.models.send([job(A, id="a")])
    another = storage_settings.model_copy(
        update={"queue": f"{storage_settings.queue}-b"}
    )
    caplog.set_level(logging.INFO)
    async with open_storage(another) as other:
        await other.create()
        await other.queue.send([job(id="b")])
        assert (await other.queue.depth()).messages == 1
    assert not [each for each in caplog.records if "no jobs are taken" in each.message]


async def test_a_worker_takes_jobs_of_its_models_only_and_each_of_them_in_turn(
    storage: Storage,
):
    for model in (None, A, B):
        await storage.models.send([job(model, id=str(n)) for n in range(6)])
    served = storage.models.served([A])
    models = []
    while found := await served.receive(2, 60):
        models += [json.loads(each.body).get("model") for each in found]
        for each in found:
            await served.delete(each)
    assert Counter(models) == {None: 6, A: 6}
    assert models[:4].count(A) == 2, "the queues of one priority take turns"
    assert (await storage.models.of(B)["normal"].depth()).messages == 6


async def test_a_worker_with_several_models_takes_those_of_the_one_that_it_has_loaded(
    storage: Storage,
):
    await storage.models.send([job(A), job(B), job()])
    served = storage.models.served([A, B])
    served.receive_only({B})
    (message,) = await served.receive(32, 60)
    assert json.loads(message.body)["model"] == B
    await served.delete(message)
    served.receive_only({A, None})
    assert len(await served.receive(32, 60)) == 2
    assert (await served.depth_of({B})).messages == 0


# What is refused


async def test_a_job_whose_model_no_worker_can_have_is_refused_before_it_is_sent(
    storage: Storage,
):
    await storage.files.create("models/Dreamshaper 8.safetensors", b"", "x/y", {})
    await JobSender(storage).send([job(A)])
    with pytest.raises(
        errors.JobError, match=r"no worker can have the model 'Dreamshaper 9'.*8"
    ):
        await JobSender(storage).send([job(A), job("Dreamshaper 9")])
    await JobSender(storage, elsewhere=["/models/Dreamshaper 9.safetensors"]).send(
        [job("Dreamshaper 9")]
    )
    assert (await storage.queue.depth()).messages == 2


async def test_a_model_that_a_worker_serves_from_elsewhere_is_no_reason_to_refuse(
    storage: Storage,
):
    await storage.files.create("models/other.safetensors", b"", "x/y", {})
    await storage.models.note_served(A)
    await JobSender(storage).send([job(A)])


async def test_without_a_model_in_the_storage_no_job_is_refused(
    storage: Storage,
):
    await JobSender(storage).send([job(A)])
    assert (await storage.models.of(A)["normal"].depth()).messages == 1


async def test_a_model_that_no_job_can_name_fails_no_worker(storage: Storage):
    """Its folder's name may be no blob's; it draws jobs without a model."""
    for name in ("a\\b", "x" * 220, "v1: final", ".hidden", "m\u00f6del"):
        await storage.models.make(name)
        await storage.models.note_served(name)
        queue = storage.models.served([name])
        await storage.queue.send([job(None)])
        assert len(await queue.receive(5, 60)) == 1
        assert await storage.models.names() == []


async def test_which_models_are_served_is_known_for_five_to_ten_minutes(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
):
    def go_to(minutes: int) -> None:
        now = datetime(2026, 11, 22, 14, 9, 59, tzinfo=UTC) + timedelta(minutes=minutes)
        monkeypatch.setattr(storage.blobs.clock, "now", lambda: now)

    go_to(0)
    await storage.models.note_served(A)
    assert not await storage.models.is_served(B)
    for minutes, known in ((0, True), (5, True), (6, False), (60, False)):
        go_to(minutes)
        assert await storage.models.is_served(A) == known
        assert await storage.models.served_now() == ({A} if known else set())
    await storage.models.note_served(A)
    notes = [name async for name in storage.blobs.names(SERVED_FOLDER)]
    assert len(notes) == 1, "old ones are deleted"
    go_to(120)
    assert await storage.models.served_now() == set()
    await storage.models.note_served(B)
    assert await storage.models.served_now() == {B}


async def test_who_sends_to_queues_that_are_there_leaves_the_sorting_to_workers(
    storage: Storage,
):
    await storage.models.make(A)
    sent = await storage.models.send([job(B), job(A)], with_queues=[A])

    assert [message.body for message in sent] == [job(B), job(A)]
    assert (await storage.models.of(None)["normal"].depth()).messages == 1
    assert (await storage.models.of(A)["normal"].depth()).messages == 1
    assert await storage.models.names() == [A]


def test_a_job_that_moves_keeps_the_id_that_its_message_gave_it():
    assert json.loads(named(job(A), "m1"))["id"] == "m1"
    assert named(job(A, id="own"), "m1") == job(A, id="own")


# Tokens


async def test_tokens_of_a_model_serve_its_queues_and_no_other_models(
    azurite_settings: StorageSettings,
):
    tokens = by_tokens(azurite_settings, ROLES["worker"], [A])
    async with open_storage(azurite_settings) as owner, open_storage(tokens) as worker:
        await owner.create()
        await owner.models.send([job(A, id="a"), job(B, id="b")])
        served = worker.models.served([A, B])
        (message,) = await served.receive(32, 60)
        assert json.loads(message.body)["id"] == "a"
        renewed = await served.renew(message, 60)
        await worker.models.send([job(A, id="moved")])
        await served.delete(renewed)
        assert await ids(owner.models.of(A)["normal"]) == ["moved"]
        with pytest.raises(errors.SetupError, match="no SAS token for the queue"):
            await worker.models.send([job(B)])
        with pytest.raises(errors.SetupError, match="may not add"):
            await worker.models.send([job()])
