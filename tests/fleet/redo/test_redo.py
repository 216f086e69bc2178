"""`imagefleet redo`: what is replaced, by what, and that a kill at any step loses nothing."""

import asyncio
import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import pytest

import polling
import sent_jobs
import signers
from cli import console, target
from fleet.redo import command, replace
from fleet.verify import pairs
from imagefleet.job.message import CHECKS, read_job
from imagefleet.job.names import ASIDE
from imagefleet.records import reader
from imagefleet.signing import JobSigner, SigningKey
from imagefleet.storage import open as opening
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import SignerSettings, StorageSettings
from imagefleet.validation import JSONDict
from in_process import assert_refused
from stored_images import member, pack_name, store_pack
from worker.engine import contract

Draw = Callable[..., contract.Pixels]


class Killed(BaseException):
    """As SIGKILL: nothing catches it."""


class Dying:
    """A storage, or a part of one, whose user is killed right after the call number *left*."""

    def __init__(self, part: Any, left: list[int]) -> None:
        self._part = part
        self._left = left

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if name in {"queue", "poison", "blobs", "files"}:
            return Dying(found, self._left)
        if name not in {"create", "append", "delete", "send", "read", "metadata"}:
            return found

        async def call(*arguments: Any, **options: Any) -> Any:
            result = await found(*arguments, **options)
            self._left[0] -= 1
            if self._left[0] <= 0:
                raise Killed
            return result

        return call

    async def __aenter__(self) -> Self:
        await self._part.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._part.__aexit__(None, None, None)


def messages(count: int, **fields: object) -> list[str]:
    return [
        json.dumps(
            {"prompt": "a cat", "id": f"j{number}", "seed": 100 * number, **fields}
        )
        for number in range(count)
    ]


async def workers(storage: Storage) -> dict[str, str]:
    """The worker of each image."""
    return {
        record.name: record.metadata.get("worker", "")
        async for record in storage.blobs.records()
        if record.name.startswith(CHECKS) or not record.name.startswith(ASIDE)
    }


async def recorded(storage: Storage, campaign: str = "default") -> dict[str, str]:
    """The worker of each image, by its records."""
    found = [
        (str(each.blob), each.worker) async for each in reader.images(storage, campaign)
    ]
    counts = await reader.counts(storage, campaign)
    assert len(found) == len(dict(found)) == counts.images, "each image has one record"
    return dict(found)


async def compared(storage: Storage) -> list[pairs.Pair]:
    found = [each async for each in pairs.listed(storage, target.Target(), None)]
    await pairs.compare(storage, found, lambda: None)
    return found


async def differing(storage: Storage) -> list[str]:
    found = await compared(storage)
    return [pair.image for pair in found if pair.result == "different"]


async def sent_prompt(storage: Storage, key: SigningKey) -> object:
    """The prompt of the one job that waits, signed with the key."""
    (message,) = await storage.queue.receive(1, 30)
    return read_job(message.body, "", signers.trusted(key, storage.scope)).prompt


async def copy_image(storage: Storage, name: str, worker: str) -> None:
    """Stores the image of the job j0 under another name, as of another worker."""
    data = await storage.blobs.read("default/j0.png")
    assert data is not None
    await storage.blobs.create(name, data, "image/png", {"worker": worker})


async def redo(
    settings: StorageSettings, *, given: dict[str, str] | None = None, **wanted: Any
) -> JSONDict:
    which = command.ImageChoice(**wanted)
    return await command._run(
        settings, which, given or {}, dry_run=False, yes=True, quiet=True
    )


async def test_a_bad_workers_images_since_a_moment_are_replaced_and_no_others(
    storage: Storage,
    storage_settings: StorageSettings,
    run_worker,
    bad_picture: Draw,
):
    await storage.queue.send(messages(1, campaign="before"))
    await run_worker("bad")
    ended_at = datetime.now(UTC)
    since = await polling.until(  # Azure knows the seconds
        lambda: datetime.now(UTC).replace(microsecond=0),
        lambda second: second > ended_at,
    )
    await storage.queue.send(messages(3, output={"format": "webp"}))
    await run_worker("bad", bad_picture)
    await storage.queue.send(messages(3, campaign="b", batch_size=2))
    await run_worker("good")
    await storage.queue.send(messages(3, verify=True, output={"format": "webp"}))
    await run_worker("good")
    await storage.queue.send(messages(3, campaign="b", batch_size=2, verify=True))
    await run_worker("bad", bad_picture)
    assert len(await differing(storage)) == 6

    result = await redo(storage_settings, worker="bad", since=since)
    assert (result["images"], result["replaced"], result["jobs"]) == (6, 6, 6)
    assert result["not_redone"] == []
    await run_worker("third")

    found = await workers(storage)
    assert found.pop("before/j0.png") == "bad"
    assert {name for name, worker in found.items() if worker == "third"} == {
        *(f"default/j{number}.webp" for number in range(3)),
        *(f"-checks/b/j{number}.png" for number in range(3)),
    }
    assert set(found.values()) == {"good", "third"}
    assert len(found) == 3 + 6 + 6
    for campaign, images in (("before", 1), ("default", 3), ("b", 6)):
        listed = await recorded(storage, campaign)
        assert len(listed) == images
        assert listed.items() <= {"before/j0.png": "bad", **found}.items()
    assert await differing(storage) == []
    copies = [each async for each in storage.blobs.records("-replaced/")]
    assert len(copies) == 6
    assert {each.metadata["worker"] for each in copies} == {"bad"}
    assert [name async for name in storage.files.names(replace.MARKS)] == []


@pytest.mark.parametrize(
    ("fields", "image"),
    [
        ({"id": "a", "then": [{"steps": 12}]}, "default/a~s2.png"),
        ({"id": "a" * 128, "batch_size": 2}, f"default/{'a' * 128}~1.png"),
    ],
)
async def test_an_image_whose_name_is_no_jobs_id_counts_once_when_it_is_replaced(
    storage: Storage,
    storage_settings: StorageSettings,
    run_worker,
    fields: JSONDict,
    image: str,
):
    await storage.queue.send([json.dumps({"prompt": "a cat", **fields})])
    await run_worker("bad")
    assert (await redo(storage_settings, job=image))["replaced"] == 1
    await run_worker("third")
    found = await recorded(storage)
    assert found == await workers(storage)
    assert sorted(found.values()) == ["bad", "third"]


async def test_a_third_drawing_decides_a_pair_that_two_workers_leave_undecided(
    storage: Storage,
    storage_settings: StorageSettings,
    run_worker,
    bad_picture: Draw,
):
    await storage.queue.send(messages(1))
    await run_worker("a", bad_picture)
    await storage.queue.send(messages(1, verify=True))
    await run_worker("b")
    found = await compared(storage)
    assert pairs.undecided(found, pairs.judge(found)) == found != []

    await redo(storage_settings, job="default/j0.png")
    await run_worker("c")

    assert await differing(storage) == []


async def test_a_thiefs_garbage_is_replaced_by_the_job_that_failed_for_it(
    storage: Storage, storage_settings: StorageSettings, run_worker
):
    await storage.blobs.create("default/j0.png", b"garbage", "image/png", {})
    await storage.queue.send(messages(1))
    await run_worker("good")
    (failed,) = [each async for each in reader.ended(storage)]
    assert failed.error == "NameTakenError"
    assert (await redo(storage_settings, job="default/j0.png"))["not_redone"]

    given = {"default/j0": messages(1)[0]}
    result = await redo(storage_settings, job="default/j0.png", given=given)
    await run_worker("other")

    assert (result["replaced"], result["jobs"]) == (1, 1)
    assert await workers(storage) == {"default/j0.png": "other"}


@pytest.mark.parametrize(
    ("storage_settings", "stride"),
    [
        ("local", 4),
        pytest.param("local", 1, marks=pytest.mark.slow),
        pytest.param("azurite", 3, marks=pytest.mark.slow),
    ],
    indirect=["storage_settings"],
)
async def test_a_killed_redo_loses_nothing_at_any_step_and_the_next_one_finishes_it(
    stride: int,
    storage: Storage,
    storage_settings: StorageSettings,
    run_worker,
    monkeypatch,
):
    monkeypatch.setattr(replace, "BATCH", 2)
    names = {f"default/j{number}.png" for number in range(3)}
    kills = 0
    step = 1
    while True:
        await storage.queue.send(messages(3))
        await run_worker("bad")
        left = [step]
        monkeypatch.setattr(
            opening,
            "open_storage",
            lambda *_, left=left: Dying(open_storage(storage_settings), left),
        )
        try:
            await redo(storage_settings, worker="bad")
        except Killed:
            kills += 1
        else:
            break
        finally:
            monkeypatch.undo()
            monkeypatch.setattr(replace, "BATCH", 2)
        copies = {
            each.split("/", 1)[1].rpartition("/")[0]
            for each in await below(storage, "-rep")
        }
        assert names - set(await workers(storage)) <= copies

        await redo(storage_settings, worker="bad")
        await run_worker("good")
        assert await workers(storage) == dict.fromkeys(names, "good")
        assert await recorded(storage) == dict.fromkeys(names, "good")
        assert [name async for name in storage.files.names(replace.MARKS)] == []
        for name in [*names, *await below(storage, "-")]:
            await storage.blobs.delete(name)
        step += stride
    assert kills >= 20 // stride


async def test_a_job_of_several_images_is_sent_once_all_of_them_are_put_aside(
    storage: Storage,
    storage_settings: StorageSettings,
    run_worker,
    monkeypatch,
):
    """However many images are replaced at a time: else it would find names that are taken."""
    monkeypatch.setattr(replace, "BATCH", 2)
    await storage.queue.send(messages(2, batch_size=3))
    await run_worker("bad")

    result = await redo(storage_settings, worker="bad")
    await run_worker("good")

    assert (result["replaced"], result["jobs"]) == (6, 2)
    assert set((await workers(storage)).values()) == {"good"}


async def below(storage: Storage, prefix: str) -> list[str]:
    return [name async for name in storage.blobs.names(prefix)]


async def test_images_without_their_job_stay_unless_it_is_given(
    storage: Storage, storage_settings: StorageSettings
):
    record = {"worker": "bad", "job": "j0"}
    for name in ("default/j0.png", "default/j1~1.png", "default/j2.png"):
        await storage.blobs.create(name, b"garbage", "image/png", record)
    batch = json.dumps({"prompt": "b", "id": "j1", "batch_size": 2})
    given = {"default/j0": messages(1)[0], "default/j1": batch}

    result = await redo(storage_settings, worker="bad", given=given)

    assert result["not_redone"] == [
        {
            "image": "default/j2.png",
            "reason": "it has no job in it: give its job with --jobs",
        }
    ]
    assert (result["replaced"], result["jobs"]) == (2, 2)
    assert set(await workers(storage)) == {"default/j2.png"}


async def test_an_image_that_names_another_image_as_its_jobs_is_not_believed(
    storage: Storage, storage_settings: StorageSettings, run_worker
):
    await storage.queue.send(messages(1))
    await run_worker("good")
    await copy_image(storage, "default/victim.png", "bad")

    result = await redo(storage_settings, worker="bad")

    assert [each["image"] for each in result["not_redone"]] == ["default/victim.png"]
    assert (await storage.queue.depth()).messages == 0


async def test_a_given_job_takes_the_place_of_another_one_of_its_name(
    storage: Storage, storage_settings: StorageSettings, run_worker
):
    await storage.queue.send([json.dumps({"prompt": "another", "id": "j0"})])
    await run_worker("thief")
    given = {"default/j0": messages(1)[0]}

    assert (await redo(storage_settings, job="default/j0", given=given))["jobs"] == 1
    await run_worker("good")

    assert await workers(storage) == {"default/j0.png": "good"}
    (record,) = [each async for each in reader.images(storage, "default")]
    assert record.prompt == "a cat"


async def test_a_forged_job_is_not_drawn_where_jobs_are_signed(
    storage: Storage,
    storage_settings: StorageSettings,
    run_worker,
    tmp_path,
):
    key = SigningKey.create(tmp_path / "key.pem")
    signed = read_job(messages(1)[0], "").to_message(JobSigner(key, storage.scope))
    for name, body in (
        ("thief", '{"prompt": "another", "id": "j0"}'),
        ("good", signed),
    ):
        await storage.queue.send([body])
        await run_worker(name)

    settings = SignerSettings(**dict(storage_settings), trusted_key=key.public)
    (refused,) = (await redo(settings, worker="thief"))["not_redone"]
    assert (
        "no job in it whose signature with a trusted key still holds"
        in refused["reason"]
    )

    result = await redo(settings, worker="thief", given={"default/j0": signed})

    assert (result["not_redone"], result["images"], result["jobs"]) == ([], 1, 1)
    assert await sent_prompt(storage, key) == "a cat"


async def test_an_image_of_long_ago_is_drawn_again_with_a_new_signature(
    storage: Storage,
    storage_settings: StorageSettings,
    run_worker,
    tmp_path,
):
    key = SigningKey.create(tmp_path / "key.pem")
    then = dataclasses.replace(storage.scope, now=signers.ahead(-31))
    await storage.queue.send(
        [read_job(messages(1)[0], "").to_message(JobSigner(key, then))]
    )
    await run_worker("bad")
    settings = SignerSettings(**dict(storage_settings), trusted_key=key.public)
    (refused,) = (await redo(settings, worker="bad"))["not_redone"]
    assert "whose signature with a trusted key still holds" in refused["reason"]

    settings = SignerSettings(
        **dict(storage_settings), signing_key=tmp_path / "key.pem"
    )
    assert (await redo(settings, worker="bad"))["jobs"] == 1

    assert await sent_prompt(storage, key) == "a cat"


async def test_suspect_images_are_those_that_the_worker_stored_in_the_time_of_its_records(
    storage: Storage, storage_settings: StorageSettings, run_worker
):
    await storage.queue.send(messages(2))
    await run_worker("bad")
    await storage.queue.send(messages(1, campaign="good"))
    await run_worker("good")
    now = storage.blobs.clock.now()
    hour = timedelta(hours=1)
    records = [
        {
            "worker": "bad",
            "since": f"{now - hour:%FT%TZ}",
            "until": f"{now + hour:%FT%TZ}",
        },
        {
            "worker": "good",
            "since": f"{now - 2 * hour:%FT%TZ}",
            "until": f"{now - hour:%FT%TZ}",
        },
        {"worker": "good", "since": f"{now + hour:%FT%TZ}"},
    ]
    contents = [*map(json.dumps, records), "{}", "[" * 10_000]
    for number, content in enumerate(contents):
        blob = f"-suspect/bad/20261201T00000{number}Z.json"
        await storage.blobs.create(blob, content.encode(), "application/json", {})

    result = await redo(storage_settings, suspect=True)
    await run_worker("third")

    found = (result["images"], result["replaced"], result["damaged_records"])
    assert found == (2, 2, 2)
    assert await workers(storage) == {
        "default/j0.png": "third",
        "default/j1.png": "third",
        "good/j0.png": "good",
    }
    assert (await redo(storage_settings, suspect=True))["images"] == 0


async def test_a_copy_that_a_worker_forges_has_no_job_drawn_since_no_file_marks_it(
    storage: Storage, storage_settings: StorageSettings, run_worker
):
    await storage.queue.send(messages(1))
    await run_worker("good")
    await copy_image(storage, "-replaced/default/j0.png/00.png", "good")

    result = await redo(storage_settings, worker="nobody")

    assert result["images"] == 0
    assert "default/j0.png" in await workers(storage)


@pytest.fixture
async def drawn(local_settings: StorageSettings, tmp_path) -> StorageSettings:
    """Two images of one worker, a second apart, in the folder that commands use by default."""
    settings = StorageSettings(storage=f"local:{tmp_path / 'imagefleet-data'}")
    async with open_storage(settings) as storage:
        await storage.create()
        record = {"worker": "bad\x1b[31m", "price_per_hour": "3.6"}
        for number in range(2):
            await storage.blobs.create(
                f"default/j{number}.png", b"x", "image/png", {**record, "worker": "bad"}
            )
    return settings


async def test_a_dry_run_counts_and_changes_nothing_and_without_yes_nothing_is_done(
    drawn: StorageSettings, in_process
):
    ended = await asyncio.to_thread(in_process, "redo", "--worker", "bad", "--dry-run")
    assert (ended.returncode, "2 images would be drawn again" in ended.stdout) == (
        0,
        True,
    )
    asked = await asyncio.to_thread(in_process, "redo", "--worker", "bad")
    assert_refused(asked, "add --yes")
    async with open_storage(drawn) as storage:
        assert len(await workers(storage)) == 2
    done = await asyncio.to_thread(
        in_process, "redo", "--worker", "bad", "--yes", "--json"
    )
    assert done.returncode == console.EXIT_IMAGES_WRONG
    assert len(json.loads(done.stdout)["not_redone"]) == 2
    assert "bad is not in the quarantine" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--suspect", "--worker", "a"),
        ("--suspect", "--since", "2026-12-01"),
        ("spring/nobody",),
    ],
)
async def test_a_choice_that_is_none_is_refused(
    drawn: StorageSettings, in_process, arguments: tuple[str, ...]
):
    ended = await asyncio.to_thread(in_process, "redo", "--yes", *arguments)
    assert ended.returncode == console.EXIT_OPERATOR_MUST_ACT


async def test_a_machine_is_all_its_workers_and_no_other(storage: Storage):
    machine = "0d8f5c1e-77a2-4c1b-9a3e-5b2f0e7d9c11"
    names = [machine, f"{machine}-7", f"{machine}-17", f"{machine[:-1]}0-7", "a-7", "a"]
    for number, worker in enumerate(names):
        metadata = {"worker": worker}
        await storage.blobs.create(f"default/{number}.png", b"x", "image/png", metadata)

    async def selected(worker: str) -> list[str]:
        which = command.ImageChoice(worker=worker)
        found = await command.select(storage, which, lambda: None)
        return sorted(found.by_worker)

    assert await selected(machine) == sorted(names[:3])
    assert await selected("a") == ["a"]
    assert await selected("a-7") == ["a-7"]


@pytest.mark.parametrize("wanted", [{"job": "spring/a"}, {"worker": "bad"}])
async def test_an_image_in_a_pack_is_replaced_by_a_single_one_and_its_pack_stays(
    storage: Storage,
    storage_settings: StorageSettings,
    run_worker,
    wanted: dict[str, str],
):
    held = [member("a", worker="bad"), member("b")]
    await store_pack(storage, held)
    await sent_jobs.note(storage, "spring", 0)
    before = await storage.packs.read(pack_name())

    result = await redo(storage_settings, **wanted)
    again = await redo(storage_settings, worker="bad")
    await run_worker("third")

    assert (result["replaced"], result["jobs"], again["images"]) == (1, 1, 0)
    assert await recorded(storage, "spring") == {
        "spring/a.png": "third",
        "spring/b.png": "w1",
    }
    assert await storage.packs.read(pack_name()) == before
    (copy,) = [name async for name in storage.blobs.names("-replaced/")]
    assert await storage.blobs.read(copy) == held[0].data
