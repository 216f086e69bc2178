"""The contract of blobs, which every storage must fulfil; `test_contract.py` has that of queues."""

import asyncio
import os
import re
from datetime import UTC, datetime, timedelta

import pytest

from imagefleet import errors
from imagefleet.job import sizes
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage


async def test_a_blob_is_written_once(storage: Storage):
    assert await storage.blobs.create("a/fox.png", b"first", "image/png", {"seed": "1"})
    assert not await storage.blobs.create(
        "a/fox.png", b"second", "image/png", {"seed": "2"}
    )
    assert await storage.blobs.read("a/fox.png") == b"first"


async def test_one_of_many_concurrent_writers_of_a_name_succeeds(
    storage: Storage,
):
    data = [bytes([number]) * 1000 for number in range(8)]
    outcomes = await asyncio.gather(
        *(storage.blobs.create("fox.png", each, "image/png", {}) for each in data)
    )
    assert outcomes.count(True) == 1
    assert await storage.blobs.read("fox.png") == data[outcomes.index(True)]


async def test_each_part_of_a_blob_has_the_total_size_and_the_version(
    storage: Storage,
):
    await storage.blobs.create(
        "models/a.bin", b"0123456789", "application/octet-stream", {}
    )
    first = await storage.blobs.read_part("models/a.bin", 0, 6)
    rest = await storage.blobs.read_part("models/a.bin", 6, 6)
    past = await storage.blobs.read_part("models/a.bin", 12, 6)
    assert first is not None
    assert rest is not None
    assert past is not None
    assert (first.data, rest.data, past.data) == (b"012345", b"6789", b"")
    assert {first.total_bytes, rest.total_bytes, past.total_bytes} == {10}
    assert first.version == rest.version == past.version
    assert await storage.blobs.read_part("models/b.bin", 0, 6) is None


async def test_a_file_is_uploaded_whole_once_and_with_its_progress(
    storage: Storage, tmp_path, monkeypatch
):
    for module in ("azure.blobs.BLOCK_BYTES", "local.blobs._COPIED_BYTES"):
        monkeypatch.setattr(f"imagefleet.storage.{module}", 1000)
    # The same block occurs twice, and the last is shorter.
    content = os.urandom(1000) + bytes(1000) * 2 + os.urandom(6500)
    file = tmp_path / "model"
    file.write_bytes(content)
    stored: list[int] = []
    what = {"sha256": "1f"}

    assert await storage.blobs.upload(
        "models/a.tar", file, "text/plain", what, stored.append
    )

    assert await storage.blobs.read("models/a.tar") == content
    assert stored == sorted(stored)
    assert (len(stored), stored[-1]) == (10, 9500)
    (record,) = [record async for record in storage.blobs.records("models/")]
    assert (record.size_bytes, dict(record.metadata)) == (9500, what)
    file.write_bytes(b"another")
    assert not await storage.blobs.upload("models/a.tar", file, "text/plain", {})
    assert await storage.blobs.read("models/a.tar") == content


async def test_an_empty_file_is_uploaded_too(storage: Storage, tmp_path):
    (tmp_path / "empty").touch()
    assert await storage.blobs.upload(
        "models/empty", tmp_path / "empty", "text/plain", {}
    )
    assert await storage.blobs.read("models/empty") == b""


async def test_a_blob_is_replaced_only_in_the_version_that_was_read(
    storage: Storage,
):
    blobs = storage.blobs
    name = "loras/manifest.json"
    assert await blobs.replace(name, b"1", "application/json", None)
    assert not await blobs.replace(name, b"2", "application/json", None)
    first = await blobs.read_part(name, 0, 10)
    assert first is not None
    assert await blobs.replace(name, b"2", "application/json", first.version)
    assert not await blobs.replace(name, b"3", "application/json", first.version)
    assert await blobs.read(name) == b"2"
    assert not await blobs.replace(
        "loras/none.json", b"3", "application/json", first.version
    )
    assert await blobs.read("loras/none.json") is None


async def test_a_missing_blob_reads_as_none(storage: Storage):
    await storage.blobs.create("a/b.png", b"x", "image/png", {})
    assert await storage.blobs.read("a/none.png") is None
    assert await storage.blobs.read("a") is None
    assert await storage.blobs.read("a/b.png/c") is None


async def test_one_blob_is_looked_up_as_a_listing_has_it(storage: Storage):
    assert await storage.blobs.record("a/fox.png") is None
    assert await storage.blobs.metadata("a/fox.png") is None
    assert await storage.blobs.record("a") is None
    await storage.blobs.create(
        "a/fox.png", b"pixels", "image/png", {"seed": "7", "job": "fox"}
    )
    await storage.blobs.create("a/fox.png.jpg", b"others", "image/jpeg", {})
    listed = {each.name: each async for each in storage.blobs.records("a/")}
    assert await storage.blobs.record("a/fox.png") == listed["a/fox.png"]
    assert await storage.blobs.record("a") is None, "a folder"
    assert await storage.blobs.metadata("a/fox.png") == {"seed": "7", "job": "fox"}
    assert await storage.blobs.metadata("a/fox.png.jpg") == {}


async def test_a_deleted_blob_can_be_created_again(storage: Storage):
    await storage.blobs.create("a/fox.png", b"first", "image/png", {"seed": "1"})
    assert await storage.blobs.delete("a/fox.png")
    assert await storage.blobs.delete("a/fox.png"), "also if it does not exist"
    assert await storage.blobs.read("a/fox.png") is None
    assert await storage.blobs.create("a/fox.png", b"second", "image/png", {})


async def test_names_are_listed_by_prefix(storage: Storage):
    names = {"a/1.png", "a/2.png", "a/b/3.png", "ab/4.png", "5.png"}
    for name in names:
        await storage.blobs.create(name, b"x", "image/png", {"job": name[0]})
    for prefix in ("", "a", "a/", "a/b", "a/b/3", "ab/4.png", "nothing"):
        listed = {name async for name in storage.blobs.names(prefix)}
        assert listed == {name for name in names if name.startswith(prefix)}


async def test_a_jobs_metadata_of_any_script_come_back_from_a_blob(
    storage: Storage,
):
    """4 KiB of any script fit the header, beside what else a worker says."""
    for number, letter in enumerate("a\u0436\u4e00"):
        count = (sizes.MAX_METADATA_BYTES - len('{"a": ""}')) // len(letter.encode())
        metadata = {"a": letter * count}
        facts = {"worker": "w" * 200, "metadata": sizes.metadata_header(metadata)}
        name = f"s{number}/1.png"

        await storage.blobs.create(name, b"x", "image/png", facts)

        (found,) = [each async for each in storage.blobs.records(f"s{number}/")]
        known = {"outcome": "completed", "id": "1", "at": datetime.now(UTC)}
        assert Record.of_blob(known, found.metadata).metadata == metadata
        assert await storage.blobs.metadata(name) == facts


async def test_records_have_size_metadata_and_time_of_each_blob(
    storage: Storage,
):
    await storage.blobs.create(
        "a/1.png", b"fox", "image/png", {"job": "1", "seconds": "0.5"}
    )
    await storage.blobs.create("a/2.png", b"", "image/png", {})
    await storage.blobs.create("b/3.png", b"x", "image/png", {"job": "3"})
    records = {record.name: record async for record in storage.blobs.records("a/")}
    assert set(records) == {"a/1.png", "a/2.png"}
    assert records["a/1.png"].size_bytes == 3
    assert records["a/1.png"].metadata == {"job": "1", "seconds": "0.5"}
    assert records["a/2.png"].metadata == {}
    assert abs(records["a/1.png"].created_at - datetime.now(UTC)) < timedelta(
        seconds=10
    )


async def test_a_name_must_be_a_plain_relative_path(storage: Storage):
    for name in (
        "",
        "/etc/x",
        "../x",
        "a/../../x",
        "a//b",
        "a/",
        ".metadata/x",
        "a\\b",
        "C:x",
        "a\0b",
    ):
        with pytest.raises(errors.JobError):
            await storage.blobs.create(name, b"x", "image/png", {})
        with pytest.raises(errors.JobError):
            await storage.blobs.read(name)


async def test_metadata_must_fit_http_headers(storage: Storage):
    for metadata in ({"a-b": "x"}, {"a": "ä"}, {"a": "x\r\nX-Other: y"}):
        with pytest.raises(errors.JobError, match="metadata"):
            await storage.blobs.create("a.png", b"x", "image/png", metadata)


def test_a_blobs_address_names_it_and_holds_no_secret(storage: Storage):
    address = storage.blobs.address("spring/a b.png")

    assert re.fullmatch(r"(file|http)://[^?]+/spring/a%20b\.png", address)
