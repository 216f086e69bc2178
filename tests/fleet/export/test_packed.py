"""`imagefleet export` of campaigns with packs: they are copied, but for what does not count."""

import asyncio
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.export import command
from fleet.export.plan import ExportPlan, Manifest
from imagefleet.files import pack
from imagefleet.records.log import RecordLog
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from stored_images import member, pack_name, store_alone, store_pack

os.environ["HF_HUB_OFFLINE"] = "1"

Export = Callable[[], Any]


@pytest.fixture
def export(storage_settings: StorageSettings, tmp_path: Path) -> Export:
    async def run() -> Manifest:
        plan = ExportPlan(campaign="spring", shard_size=2)
        return await command._export(
            storage_settings, tmp_path / "out", plan, quiet=True
        )

    return run


class Killed(BaseException):
    """As SIGKILL: nothing catches it."""


def base(name: str) -> str:
    return name.rpartition("/")[2]


async def test_packs_are_copied_byte_for_byte(
    storage: Storage, export: Export, tmp_path: Path
):
    names = [pack_name(number) for number in range(3)]
    for number, name in enumerate(names):
        held = [member(f"{number}-a"), member(f"{number}-b")]
        await store_pack(storage, held, name=name)

    made = await export()

    assert [shard.file for shard in made.shards] == [base(name) for name in names]
    assert (made.images, made.packed, made.packs, made.missing) == (6, 6, 3, 0)
    for name in names:
        copied = (tmp_path / "out" / base(name)).read_bytes()
        assert copied == await storage.packs.read(name)


async def test_what_a_redo_has_replaced_is_left_out_of_the_copy(
    storage: Storage, export: Export, tmp_path: Path
):
    records = await store_pack(storage, [member("a"), member("b")])
    note = {"outcome": "replaced", "source": "redo", "pack": None, "offset": None}
    await RecordLog(storage.files, "redo").add([records[0].model_copy(update=note)])
    await store_alone(storage, member("a", shade=1, worker="w3"))

    made = await export()

    assert (made.images, made.packed) == (2, 1)
    copied = (tmp_path / "out" / base(pack_name())).read_bytes()
    (kept,) = pack.read(pack_name(), copied).records
    assert kept.id == "b"
    with tarfile.open(tmp_path / "out" / "00000.tar") as single:
        names = single.getnames()
        text = single.extractfile(names[1])
        assert text is not None
        assert json.load(text)["id"] == "a"
    assert names == ["000000000.png", "000000000.json", "__records__"]


@pytest.mark.parametrize("how", ["cut", "gone"])
async def test_a_pack_that_is_none_is_named_and_the_others_are_copied(
    storage: Storage, export: Export, tmp_path: Path, how: str
):
    await store_pack(storage, [member("good")], name=pack_name(1))
    made = pack.write(pack_name(), [member("a"), member("b")])
    await RecordLog(storage.blobs, "w1").add(made.records)
    if how == "cut":
        cut = made.data[:1_000]
        await storage.packs.create(pack_name(), cut, "application/x-tar", {})

    found = await export()

    assert (found.images, found.missing + found.changed) == (1, 2)
    assert {*found.first_missing, *found.first_changed} == {
        "spring/a.png",
        "spring/b.png",
    }
    copied = (tmp_path / "out" / base(pack_name(1))).read_bytes()
    assert copied == await storage.packs.read(pack_name(1))


async def test_an_export_that_was_killed_goes_on_with_the_packs_that_are_left(
    storage: Storage, export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from fleet.export.shards import Exporter

    for number in range(4):
        held = [member(f"{number}-a"), member(f"{number}-b")]
        await store_pack(storage, held, name=pack_name(number))
    copied: list[str] = []
    copy = Exporter._copy

    async def dying(self: Exporter, records: list[Any]) -> Any:
        copied.append(str(records[0].pack))
        if len(copied) > 2:
            raise Killed
        return await copy(self, records)

    monkeypatch.setattr(Exporter, "_copy", dying)
    monkeypatch.setattr("fleet.results.download.CONCURRENT_PACKS", 1)
    with pytest.raises(Killed):
        await export()
    monkeypatch.setattr(Exporter, "_copy", copy)

    made = await export()

    assert (made.images, len(made.shards)) == (8, 4)
    for shard in made.shards:
        found = (tmp_path / "out" / shard.file).read_bytes()
        assert len(pack.read(f"spring/{shard.file}", found).records) == 2


async def test_datasets_reads_an_export_of_packs_and_of_single_images(
    local_settings: StorageSettings, tmp_path: Path
):
    datasets = pytest.importorskip("datasets")
    async with open_storage(local_settings) as storage:
        await store_pack(storage, [member("b"), member("c")])
        await store_alone(storage, member("a", steps=4, metadata={"order": 7}))
    plan = ExportPlan(campaign="spring", shard_size=2)
    await command._export(local_settings, tmp_path / "out", plan, quiet=True)

    def load() -> Any:
        return datasets.load_dataset(
            "webdataset",
            data_files=f"{tmp_path}/out/*.tar",
            cache_dir=str(tmp_path / "cache"),
            split="train",
        )

    rows = list(await asyncio.to_thread(load))

    assert sorted(row["json"]["id"] for row in rows) == ["a", "b", "c"]
    assert [row["png"].size for row in rows] == [(32, 32)] * 3
