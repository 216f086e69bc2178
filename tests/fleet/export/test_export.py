"""`imagefleet export`: shards that are complete or absent, verified, and the same each time."""

import hashlib
import json
import shutil
import tarfile
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import exported
import sent_jobs
from cli import files
from fleet.export import formats, plan, shards
from imagefleet.job.message import SUFFIXES, image_stem, job_key
from imagefleet.job.names import duplicate_name
from imagefleet.records.catalog import image_name
from imagefleet.records.log import Totals, shard_part
from imagefleet.records.record import Record
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from in_process import AsyncImagefleet

Add = Callable[..., Awaitable[Any]]


def content(folder: Path) -> dict[str, str]:
    """The hash of each file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def rows(folder: Path) -> list[JSONDict]:
    return [sample.row for sample in exported.samples(folder)]


async def test_a_webdataset_has_each_image_with_its_caption_and_its_parameters(
    stored: list[Any], export: AsyncImagefleet, tmp_path
):
    result = await export()

    out = tmp_path / "out"
    assert sorted(content(out)) == [
        *(f"0000{n}.tar" for n in range(3)),
        "manifest.json",
    ]
    with tarfile.open(out / "00001.tar") as tar:
        names = tar.getnames()
    assert names == [
        *(
            f"0000{key}.{end}"
            for key in ("10000", "10001")
            for end in ("png", "txt", "json")
        ),
        "__records__",
    ]
    meta, text, data = exported.samples(out)[2]
    assert text == "a house 3", "without the LoRA's tag"
    assert meta["caption"] == "a house 3"
    assert (meta["id"], meta["key"]) == ("3", "000010000")
    assert meta["prompt"] == "a house 3, <lora:outline-style:0.8>"
    assert meta["metadata"] == {"order": 7}
    assert meta["sha256"] == hashlib.sha256(data).hexdigest()
    assert "5 images" in result.stdout
    assert "in 3 shards: out" in result.stdout


async def test_the_manifest_has_the_hashes_of_all_files_and_the_counts(
    stored: list[Any], export: AsyncImagefleet, tmp_path
):
    result = await export("out", "--json")

    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    found = content(tmp_path / "out")
    for shard in manifest["shards"]:
        assert found[shard["file"]] == shard["sha256"]
    assert [shard["images"] for shard in manifest["shards"]] == [2, 2, 1]
    told = {name: manifest[name] for name in ("campaign", "images")}
    assert told == {"campaign": "spring", "images": 5}
    assert manifest["bytes"] == sum(record.size_bytes for record in stored)
    assert json.loads(result.stdout)["images"] == 5
    assert not (tmp_path / "out" / plan.WORK_FOLDER).exists()


class Killed(BaseException):
    """The process ends here, without any clean-up of ours."""


def moments(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Ends the export at one step after the other."""
    steps = {
        "planning": (plan.PlanDatabase, "_list"),
        "planned": (shards.Exporter, "_make"),
        "reading": (shards.Exporter, "_fetch"),
        "written": (shards.Exporter, "_complete"),
        "synced": (shards, "sync"),
        "hashing": (shards.safetensors, "sha256_of"),
        "done": (shards.Exporter, "_finished"),
    }
    for name, (owner, attribute) in steps.items():
        for call in (1, 2):
            calls = iter(range(1, 1_000))
            real = getattr(owner, attribute)

            def kill(
                *arguments: Any, real: Any = real, at: int = call, calls: Any = calls
            ) -> Any:
                if next(calls) == at:
                    raise Killed
                return real(*arguments)

            with monkeypatch.context() as patched:
                patched.setattr(owner, attribute, kill)
                yield f"{name} {call}"


async def test_an_export_that_is_killed_at_any_step_goes_on_and_comes_out_the_same(
    stored: list[Any],
    local_settings: StorageSettings,
    tmp_path,
    monkeypatch,
):
    from fleet.export import command

    monkeypatch.setattr(shards, "_BATCH", 1)
    wanted = plan.ExportPlan(campaign="spring", shard_size=2)

    async def run(name: str) -> None:
        await command._export(local_settings, tmp_path / name, wanted, quiet=True)

    await run("undisturbed")
    expected = content(tmp_path / "undisturbed")
    killed = 0
    for number, _ in enumerate(moments(monkeypatch)):
        try:
            await run(f"{number}")
        except Killed:
            killed += 1
            left = content(tmp_path / f"{number}")
            seen = {
                name: left[name]
                for name in left
                if not name.startswith(plan.WORK_FOLDER)
            }
            assert seen.items() <= expected.items(), "no file is half there"
        monkeypatch.undo()
        monkeypatch.setattr(shards, "_BATCH", 1)
        await run(f"{number}")
        assert content(tmp_path / f"{number}") == expected
        shutil.rmtree(tmp_path / f"{number}")
    assert killed >= 12


async def test_missing_and_changed_images_are_named_and_left_out(
    stored: list[Any],
    export: AsyncImagefleet,
    local_settings: StorageSettings,
    tmp_path,
):
    async with open_storage(local_settings) as storage:
        for name in ("2", "4"):
            await storage.blobs.delete(f"spring/{name}.png")
        await storage.blobs.create("spring/4.png", b"another", "image/png", {})

    result = await export(code=4)
    again = await export(code=4)

    assert "error: 1 image missing: spring/2.png" in result.stderr
    assert "error: 1 image not as recorded or damaged: spring/4.png" in result.stderr
    assert "out has the whole export already" in again.stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["images"], manifest["missing"], manifest["changed"]) == (3, 1, 1)
    assert manifest["first_missing"] == ["spring/2.png"]


async def test_an_image_drawn_again_is_exported_with_its_latest_record(
    stored: list[Any],
    export: AsyncImagefleet,
    local_settings: StorageSettings,
    tmp_path,
    store_images: Add,
):
    async with open_storage(local_settings) as storage:
        await storage.blobs.delete("spring/3.png")
        await store_images(
            storage, "3", prompt="a later house", at="2026-11-02T12:00:00Z"
        )

    await export(size=10)

    found = rows(tmp_path / "out")
    assert [row["id"] for row in found] == ["1", "2", "3", "4", "5"]
    assert found[2]["caption"] == "a later house"


async def test_one_forged_record_neither_refuses_a_campaign_nor_takes_an_honest_images_place(
    stored: list[Any],
    export: AsyncImagefleet,
    local_settings: StorageSettings,
    tmp_path,
):
    honest = stored[0]
    forged = {
        "sha256": "0" * 64,
        "prompt": "forged",
        "at": honest.at + timedelta(days=1),
    }
    line = honest.model_copy(update=forged).line()
    size = f'"size_bytes":{honest.size_bytes}'.encode()
    huge = line.replace(size, b'"size_bytes":9007199254740991')
    async with open_storage(local_settings) as storage:
        name = "-records/spring/20261101T120000Z-thief-00000000.images.jsonl.gz"
        await storage.blobs.append(
            name, shard_part([line] * 20 + [huge], Totals(21, 21)), 0
        )

    result = await export(size=10)

    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["images"], manifest["changed"]) == (5, 0)
    assert manifest["misfits"] >= 2
    assert "do not match their image" in result.stderr
    prompts = [row["prompt"] for row in rows(tmp_path / "out")]
    assert len(prompts) == 5
    assert "forged" not in prompts


async def test_a_squatted_name_exports_the_drawing_that_was_kept_aside(
    stored: list[Any],
    export: AsyncImagefleet,
    local_settings: StorageSettings,
    tmp_path,
):
    async with open_storage(local_settings) as storage:
        drawing = await storage.blobs.read("spring/1.png") or b""
        for name in ("1", "2"):
            await storage.blobs.delete(f"spring/{name}.png")
            await storage.blobs.create(
                f"spring/{name}.png", b"garbage", "image/png", {}
            )
        await storage.blobs.create(
            duplicate_name("spring/1.png", "w1"), drawing, "image/png", {}
        )

    result = await export(code=4, size=10)

    assert exported.samples(tmp_path / "out")[0].data == drawing
    assert "1 image not as recorded or damaged: spring/2.png" in result.stderr


async def test_a_dry_run_writes_nothing_and_tells_the_size(
    stored: list[Any], export: AsyncImagefleet, tmp_path
):
    figures = json.loads((await export("out", "--dry-run", "--json")).stdout)
    shown = (await export("out", "--dry-run")).stdout

    assert (figures["images"], figures["shards"], figures["reads"]) == (5, 3, 5)
    assert figures["bytes"] == sum(record.size_bytes for record in stored)
    assert figures["bytes_needed"] > figures["bytes"]
    assert "3 of 2 images" in shown
    assert not (tmp_path / "out").exists()


async def test_an_export_takes_no_more_than_the_disk_has(
    stored: list[Any], export: AsyncImagefleet, monkeypatch
):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1_000)
    )  # type: ignore[attr-defined]

    result = await export(code=2)

    assert "out has 1.0 kB of free space, and the export takes about" in result.stderr


async def test_jobs_still_to_do_are_said(
    stored: list[Any], export: AsyncImagefleet, local_settings: StorageSettings
):

    async with open_storage(local_settings) as storage:
        await sent_jobs.note(storage, "spring", 7, ids={each.id for each in stored})

    result = await export()

    assert "warning: 2 jobs of spring still to do" in result.stderr


async def test_a_campaign_without_images_is_no_export_that_stays_empty(
    export: AsyncImagefleet, local_settings: StorageSettings, tmp_path
):

    async with open_storage(local_settings) as storage:
        await storage.create()
        await sent_jobs.note(storage, "spring", 7)

    assert "campaign spring has no images yet" in (await export(code=2)).stderr
    assert not (tmp_path / "out").exists()


async def test_a_storage_is_the_same_by_its_relative_name(
    stored: list[Any], export: AsyncImagefleet, local_settings: StorageSettings
):
    await export()
    name = Path(local_settings.storage.removeprefix("local:")).name

    again = await export("out", "--storage", f"local:{name}")

    assert "out has the whole export already" in again.stderr


async def test_a_folder_of_something_else_is_refused(
    stored: list[Any], export: AsyncImagefleet, tmp_path
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    await export("out")

    assert "mine is not empty" in (await export("mine", code=2)).stderr
    other = await export(size=3, code=2)
    assert "out has an export with the shard size 2, not 3" in other.stderr
    (tmp_path / "out" / "00001.tar").unlink()
    assert (
        "00001.tar is not as manifest.json says" in (await export("out", code=2)).stderr
    )


#: Ids that are alike: other characters than letters, and what looks like a number or a format.
_IDS = st.from_regex(r"[aA0][aA0._-]{0,3}", fullmatch=True)


_IMAGES = st.tuples(
    _IDS, st.sampled_from([(0, 1), (1, 1), (2, 1), (12, 1), (0, 2), (0, 9)]),
    st.sampled_from(["png", "jpeg", "webp"]),
)  # fmt: skip


@given(st.lists(st.tuples(_IDS, _IMAGES), min_size=2, max_size=30, unique=True))
def test_no_two_images_have_one_name_in_the_storage_a_download_or_an_export(
    places: list[tuple[str, tuple[str, tuple[int, int], str]]],
):
    """Of ids, indices, stages, formats and campaigns; keys of WebDataset end at the first dot."""
    blobs = set()
    keys = set()
    folders = set()
    for number, (campaign, (job_id, (index, stage), form)) in enumerate(places):
        blob = f"{image_stem(job_key(campaign, job_id), index, stage)}.{SUFFIXES[form]}"
        assert image_name(blob, campaign) is not None
        record = Record(
            outcome="completed", id=job_id, blob=blob, at="2026-11-01T12:00:00Z"
        )
        sample = formats.Sample(f"00000{number:04}", record, b"")
        blobs.add(blob)
        keys.add(f"{sample.key}.{form}".partition(".")[0])
        folders.add((campaign, files.without_case(sample.name).lower()))
        assert duplicate_name(blob, "a/b") != duplicate_name(blob, "a.b")
    assert len(blobs) == len(keys) == len(folders) == len(places)
