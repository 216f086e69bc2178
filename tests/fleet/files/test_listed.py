"""The manifests of folders, which `imagefleet files` keeps and signs."""

import asyncio
import hashlib
import json

import pytest

from fleet.files.stored import Listing
from header_files import file_of, lora_of
from imagefleet import errors
from imagefleet.signing import NO_KEYS, Keys, SigningKey, TrustedKeys
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import BlobStore
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet, assert_refused
from worker.files import manifest

LORAS = "loras/manifest.json"


def keys_of(signing: SigningKey, *others: SigningKey) -> Keys:
    names = [each.public for each in (signing, *others)]
    return Keys(signing, TrustedKeys.read(",".join(names)))


async def contents(storage: Storage, name: str = LORAS) -> manifest.Contents:
    content = await storage.files.read(name)
    assert content is not None
    return manifest.parse(name, content)


async def test_a_manifest_that_others_change_meanwhile_keeps_their_hashes(
    storage: Storage, monkeypatch
):
    blobs = storage.files
    assert await Listing(storage, "loras", NO_KEYS, create=True).change({"a": "1"})
    read_part = type(blobs).read_part
    others = iter(["b", "c"])

    async def read_late(self: BlobStore, name: str, offset: int, most: int) -> object:
        part = await read_part(self, name, offset, most)  # type: ignore[arg-type]
        if other := next(others, None):
            content = json.loads(await blobs.read(name) or b"") | {other: "2"}
            assert part is not None
            assert await blobs.replace(
                name, json.dumps(content).encode(), "text/plain", part.version
            )
        return part

    monkeypatch.setattr(type(blobs), "read_part", read_late)
    assert await Listing(storage, "loras", NO_KEYS).change({"z": "3"})
    content = await blobs.read("loras/manifest.json")
    assert json.loads(content or b"") == {"a": "1", "b": "2", "c": "2", "z": "3"}


async def test_a_plain_list_is_signed_only_when_told_to(
    storage: Storage, key: SigningKey
):
    await Listing(storage, "loras", NO_KEYS, create=True).change({"planted": "1"})
    keys = keys_of(key)
    with pytest.raises(
        errors.SetupError, match=r"not signed, and lists 1 file: look through it"
    ):
        await Listing(storage, "loras", keys).check()
    assert await Listing(storage, "loras", keys, create=True).change({"planted": "1"})
    assert (await contents(storage)).is_signed_by(keys.trusted, "loras")


async def test_a_signed_list_is_not_changed_without_its_key(
    storage: Storage, key: SigningKey, tmp_path
):
    await Listing(storage, "loras", keys_of(key)).change({"a": "1"})
    other = SigningKey.create(tmp_path / "other.pem")
    for keys in (NO_KEYS, keys_of(other), Keys(None, TrustedKeys.read(key.public))):
        for create in (False, True):
            with pytest.raises(errors.SetupError, match="is signed"):
                await Listing(storage, "loras", keys, create=create).change({"b": "2"})
    assert await Listing(storage, "loras", keys_of(other, key)).change({"b": "2"})
    found = await contents(storage)
    assert found.files == {"a": "1", "b": "2"}
    assert found.is_signed_by(keys_of(other).trusted, "loras"), "with the new key alone"


async def test_a_list_does_not_grow_beyond_what_workers_read(
    storage: Storage, key: SigningKey, monkeypatch
):
    monkeypatch.setattr(manifest, "MAX_FILES", 1)
    await Listing(storage, "loras", keys_of(key)).change({"a": "1"})
    with pytest.raises(errors.SetupError, match="too large"):
        await Listing(storage, "loras", keys_of(key)).change({"b": "2"})
    assert (await contents(storage)).files == {"a": "1"}


def test_add_lists_loras_and_models_and_signs_the_lists(
    in_process: Imagefleet,
    tmp_path,
    key: SigningKey,
    local_settings: StorageSettings,
    monkeypatch,
):
    monkeypatch.setenv("IMAGEFLEET_SIGNING_KEY", str(tmp_path / "key.pem"))
    monkeypatch.setenv("IMAGEFLEET_STORAGE", local_settings.storage)
    (tmp_path / "rocket.safetensors").write_bytes(lora_of())
    (tmp_path / "dreams.safetensors").write_bytes(file_of())

    added = in_process("files", "add", "lora", "rocket.safetensors")
    assert "listed and signed in loras/manifest.json" in added.stderr
    added = in_process("files", "add", "model", "dreams.safetensors", "--json")
    assert json.loads(added.stdout)["files"][0]["in_manifest"] is True

    async def read() -> list[manifest.Contents]:
        async with open_storage(local_settings) as storage:
            return [
                await contents(storage, name)
                for name in (LORAS, "models/manifest.json")
            ]

    loras, models = asyncio.run(read())
    assert loras.files == {"rocket": hashlib.sha256(lora_of()).hexdigest()}
    assert models.files == {"dreams.safetensors": hashlib.sha256(file_of()).hexdigest()}
    assert models.is_signed_by(TrustedKeys.read(key.public), "models")

    monkeypatch.delenv("IMAGEFLEET_SIGNING_KEY")
    (tmp_path / "other.safetensors").write_bytes(lora_of("x"))
    assert_refused(
        in_process("files", "add", "lora", "other.safetensors"),
        "set IMAGEFLEET_SIGNING_KEY",
    )
    rows = json.loads(in_process("files", "list", "lora", "--json").stdout)["files"]
    assert len(rows) == 1, "nothing was uploaded"
