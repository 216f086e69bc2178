"""`imagefleet verify` on what real workers stored, good ones and bad."""

import asyncio
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from benchmarks.stand_in import StandInEngine
from cli import console, target
from fleet.verify import pairs
from imagefleet import errors
from imagefleet.files import picture
from imagefleet.job.message import read_job
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from storages import flags
from stored_images import member, store_pack
from worker.engine import contract
from worker.node import quarantine

Imagefleet = Callable[..., Any]

DIGEST = "d" * 64


def jobs(numbers: range, **fields: object) -> list[str]:
    return [
        json.dumps(
            {"prompt": "a cat", "id": f"j{number}", "seed": 100 * number, **fields}
        )
        for number in numbers
    ]


async def compared(storage: Storage) -> list[pairs.Pair]:
    found = [each async for each in pairs.listed(storage, target.Target(), None)]
    await pairs.compare(storage, found, lambda: None)
    return found


@pytest.fixture
async def drawn_by_three(
    storage: Storage, run_worker, bad_picture: Callable[..., contract.Pixels]
) -> Storage:
    """Images of a bad worker and a good one, and second drawings by two others."""
    await storage.queue.send(jobs(range(4)))
    await run_worker("bad", bad_picture)
    await storage.queue.send(jobs(range(4, 12)))
    await run_worker("good")
    for name, numbers in (("second", range(0, 12, 2)), ("third", range(1, 12, 2))):
        await storage.queue.send(jobs(numbers, verify=True))
        await run_worker(name)
    return storage


def verify(
    in_process: Imagefleet, settings: StorageSettings, *arguments: str
) -> tuple[int, JSONDict]:
    ended = in_process("verify", *flags(settings), *arguments, "--json")
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


async def test_a_worker_that_draws_wrong_is_named_and_no_good_one(
    drawn_by_three: Storage,
    storage_settings: StorageSettings,
    in_process,
):
    code, found = await asyncio.to_thread(verify, in_process, storage_settings)

    assert code == console.EXIT_IMAGES_WRONG
    assert (found["pairs"], found["alike"], found["different"]) == (12, 8, 4)
    assert [each["worker"] for each in found["workers"] if each["draws_wrong"]] == [
        "bad"
    ]
    assert found["workers"][0] == {
        "worker": "bad",
        "compared": 4,
        "different": 4,
        "witnesses": 2,
        "draws_wrong": True,
    }
    assert found["undecided"] == []

    command = ["verify", *flags(storage_settings), "--quarantine", "--yes"]
    ended = await asyncio.to_thread(in_process, *command)
    assert "draws wrong" in ended.stdout
    assert "1 worker added to the quarantine" in ended.stderr
    nodes = (await quarantine.read(drawn_by_three.files)).nodes
    assert [node.name for node in nodes] == ["bad"]


async def test_garbage_under_a_jobs_name_is_found_by_the_duplicate_kept_aside(
    storage: Storage, run_worker
):
    sent = jobs(range(2))
    digest = read_job(sent[0], "none").stage_digest
    await storage.blobs.create(
        "default/j0.png", b"garbage", "image/png", {"digest": digest}
    )
    await storage.queue.send(sent)
    await run_worker("good")

    (pair,) = await compared(storage)
    assert (pair.image, pair.result) == ("default/j0.png", "different")
    assert pair.workers == (pairs.NO_RECORD, "good")


async def test_pairs_that_prove_nothing_are_counted_apart(storage: Storage):
    async def put(name: str, worker: str, data: bytes = b"no image") -> None:
        told = {"worker": worker, "digest": DIGEST}
        await storage.blobs.create(name, data, "image/png", told)

    await put("-checks/default/none.png", "a")
    await put("default/same.png", "a")
    await put("-checks/default/same.png", "a")
    await put("default/unreadable.png", "a")
    await put("-duplicates/default/unreadable.png/b.png", "b")
    results = {pair.image: pair.result for pair in await compared(storage)}
    assert results == {
        "default/none.png": "not_there",
        "default/same.png": "same_worker",
        "default/unreadable.png": "unreadable",
    }


async def test_drawings_of_unlike_jobs_that_share_an_id_are_not_held_against_a_worker(
    drawn_by_three: Storage,
    storage_settings: StorageSettings,
    run_worker,
    in_process,
):
    """`monday` and `tuesday` of the same ids, each drawn right."""
    honest = drawn_by_three
    await honest.queue.send(jobs(range(4, 12), verify=True, steps=30, cfg_scale=2))
    for check in [name async for name in honest.blobs.names("-checks/")]:
        await honest.blobs.delete(check)
    await run_worker("tuesday", _other)

    code, found = await asyncio.to_thread(
        verify, in_process, storage_settings, "--quarantine"
    )

    assert (code, found["other_job"], found["different"]) == (0, 8, 0)
    assert found["quarantined"] == []


async def test_false_drawings_bring_no_worker_whose_drawings_are_alike_into_quarantine(
    drawn_by_three: Storage, storage_settings: StorageSettings, in_process
):
    """Whoever stores a drawing writes the worker's name beside it, and any digest."""
    honest = drawn_by_three
    for number in range(4, 12):
        image = f"default/j{number}.png"
        told = {"digest": (await honest.blobs.metadata(image) or {})["digest"]}
        for name in ("a", "b", "c", "good", "second"):
            aside = f"-duplicates/{image}/{name}.png"
            data = str(name).encode()
            await honest.blobs.create(aside, data, "image/png", told | {"worker": name})

    _, found = await asyncio.to_thread(
        verify, in_process, storage_settings, "--quarantine", "--yes"
    )

    assert not {"good", "second"} & {*found["quarantined"]}


async def test_a_campaigns_pairs_since_a_moment(storage: Storage):
    for name in ("a/x.png", "ab/x.png"):
        await storage.blobs.create(
            f"-checks/{name}", b"x", "image/png", {"worker": "a"}
        )
    listed = [each async for each in pairs.listed(storage, target.read("a"), None)]
    assert [each.image for each in listed] == ["a/x.png"]
    newest = listed[0].drawn_at
    assert (
        len([each async for each in pairs.listed(storage, target.Target(), newest)])
        == 2
    )
    assert [
        each
        async for each in pairs.listed(
            storage, target.Target(), newest.replace(year=2999)
        )
    ] == []


@pytest.mark.parametrize(("family", "fields"), [("sd1", {"steps": 4}), ("klein", {})])
async def test_images_of_few_steps_differ_rightly_whether_the_job_or_the_model_says_so(
    storage: Storage, run_worker, monkeypatch, family: str, fields: dict[str, int]
):
    monkeypatch.setattr(StandInEngine, "family", family)
    await storage.queue.send(jobs(range(2), **fields))
    await run_worker("a")
    await storage.queue.send(jobs(range(2), verify=True, **fields))
    await run_worker("b", _other)
    assert {pair.result for pair in await compared(storage)} == {"few_steps"}


def _other(request: contract.ImageRequest) -> contract.Pixels:
    import numpy as np

    return np.random.default_rng(9).integers(
        0, 256, (request.height, request.width, 3), np.uint8
    )


@pytest.mark.parametrize("size", [(2048, 2056), (60_000, 60_000)])
def test_a_file_of_more_pixels_than_any_job_is_not_decoded(
    size: tuple[int, int],
):
    file = io.BytesIO()
    Image.new("1", (8, 8)).save(file, "PNG")
    width, height = (side.to_bytes(4) for side in size)
    data = file.getvalue()
    assert picture.read(data) is not None
    enlarged = data[:16] + width + height + data[24:]
    assert picture.read(enlarged) is None


async def test_the_quarantine_keeps_what_others_wrote_and_has_each_node_once(
    storage: Storage,
):
    machine = "0d8f5c1e-77a2-4c1b-9a3e-5b2f0e7d9c11"
    assert await quarantine.add(storage.files, ["a"], "why") == ["a"]
    assert await quarantine.add(
        storage.files, ["a", f"{machine}-17", f"{machine}-18"], ""
    ) == [machine]
    written = json.loads(await storage.files.read("quarantine.json") or b"")
    assert [(node["name"], node["reason"]) for node in written["nodes"]] == [
        ("a", "why"),
        (machine, ""),
    ]
    assert all(node["at"].endswith("Z") for node in written["nodes"])


async def test_a_quarantine_list_that_is_none_is_never_overwritten(
    storage: Storage,
):
    await storage.files.create("quarantine.json", b"[]", "application/json", {})
    with pytest.raises(errors.SetupError, match="not a list of nodes"):
        await quarantine.add(storage.files, ["a"], "")


def test_nothing_to_compare_is_said_and_is_no_error(in_process, tmp_path):
    (tmp_path / "j.jsonl").write_text('{"prompt": "a"}\n')
    in_process("load", "j.jsonl")
    ended = in_process("verify")
    assert (ended.returncode, "no second drawings" in ended.stdout) == (0, True)
    assert in_process("verify", "--since", "yesterday").returncode == 2


async def test_an_image_in_a_pack_is_compared_with_its_second_drawing(storage: Storage):
    await store_pack(storage, [member("a"), member("b", shade=1)])
    for second in (member("a", worker="w2"), member("b", worker="w2")):
        told = {"job": second.record.id, "worker": "w2"}
        told["digest"] = str(second.record.digest)
        name = f"-checks/{second.record.blob}"
        await storage.blobs.create(name, second.data, "image/png", told)

    found = {pair.image: pair for pair in await compared(storage)}

    assert found["spring/a.png"].result == "alike"
    assert found["spring/b.png"].result == "few_steps" or (
        found["spring/b.png"].result == "different"
    )
    assert found["spring/a.png"].workers == ("w1", "w2")
