"""Lists of what workers have, who may tell anything."""

import json

import pytest

from imagefleet.storage.held_files import HeldFiles
from imagefleet.storage.open import Storage


async def test_hashes_and_loras_are_those_that_workers_and_the_storage_tell(
    storage: Storage,
):
    await storage.models.note_held("a", {"hash": "0123456789", "loras": ["one", "two"]})
    listed = json.dumps({"b.safetensors": "a" * 64}).encode()
    await storage.files.create("models/manifest.json", listed, "application/json", {})
    held = HeldFiles(storage)

    await held.refresh(["a", "another"])

    assert held.hashes == {"a": "0123456789", "b": "a" * 64}
    assert held.loras == {"one", "two"}


async def test_a_signed_list_has_hashes_as_well(storage: Storage):
    listed = {"folder": "models", "files": {"b.safetensors": "a" * 64}}
    data = json.dumps(listed).encode()
    await storage.files.create("models/manifest.json", data, "application/json", {})
    held = HeldFiles(storage)

    await held.refresh([])

    assert held.hashes == {"b": "a" * 64}


@pytest.mark.parametrize(
    "told",
    [
        {"hash": "<script>", "loras": ["../../etc", "a:b", "", 1, None]},
        {"hash": 1, "loras": "one"},
        {"hash": None, "loras": {"one": 1}},
        {},
    ],
)
async def test_what_a_stranger_tells_is_left_out(storage: Storage, told: dict):
    await storage.models.note_held("a", told)
    listed = json.dumps({"b.safetensors": "short", "files": []}).encode()
    await storage.files.create("models/manifest.json", listed, "application/json", {})
    held = HeldFiles(storage)

    await held.refresh(["a"])

    assert (held.hashes, held.loras) == ({}, set())


async def test_what_is_of_no_use_hides_nothing_beside_it(storage: Storage):
    told = {"hash": "0123456789", "loras": ["one", "caf\udce9"]}  # a name in Latin-1
    await storage.models.note_held("a", told)
    listed = json.dumps({"b.safetensors": "B" * 64, "c.safetensors": "c" * 64}).encode()
    await storage.files.create("models/manifest.json", listed, "application/json", {})
    held = HeldFiles(storage)

    await held.refresh(["a"])

    assert held.hashes == {"a": "0123456789", "c": "c" * 64}
    assert held.loras == {"one"}
