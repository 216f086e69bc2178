"""`imagefleet files` with upscalers and ControlNets: what is stored is what workers use."""

import asyncio
import json
from pathlib import Path

import pytest

from cli import console
from imagefleet.files.kinds import KINDS
from imagefleet.signing import SigningKey, TrustedKeys
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet
from storages import flags
from worker.files.library import FileLibrary, Source

TENSORS = {
    "controlnet": ("control_model.input_hint_block.0.weight", [16, 3, 3, 3]),
    "upscaler": ("model.0.weight", [64, 3, 3, 3]),
    "vae": ("decoder.conv_in.weight", [8, 4, 3, 3]),
    "lora": ("lora_unet_x.lora_down.weight", [4, 768]),
}


def network(path: Path, kind: str) -> Path:
    name, shape = TENSORS[kind]
    size = 2
    for side in shape:
        size *= side
    header = json.dumps(
        {name: {"dtype": "F16", "shape": shape, "data_offsets": [0, size]}}
    )
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(size))
    return path


@pytest.mark.parametrize("kind", ["upscaler", "controlnet", "vae"])
def test_a_file_is_stored_signed_listed_and_found_by_workers(
    in_process: Imagefleet,
    tmp_path,
    local_settings: StorageSettings,
    monkeypatch,
    kind: str,
):
    key = SigningKey.create(tmp_path / "key.pem")
    monkeypatch.setenv("IMAGEFLEET_SIGNING_KEY", str(tmp_path / "key.pem"))
    path = network(tmp_path / "4x (a).safetensors", kind)
    added = in_process(
        "files", "add", kind, str(path), "--manifest", *flags(local_settings)
    )
    assert added.returncode == console.EXIT_DONE, added.stderr
    assert added.stdout == "4x (a)\n"
    listed = in_process("files", "list", kind, "--json", *flags(local_settings))
    (row,) = json.loads(listed.stdout)["files"]
    assert row["name"] == "4x (a).safetensors"

    async def resolved(trusted: TrustedKeys) -> bytes:
        async with open_storage(local_settings) as storage:
            source = Source(storage.files, tmp_path / "cache", 2**20, trusted)
            library = FileLibrary(source, KINDS[kind])
            return (await library.resolve("4x (a)")).read_bytes()

    trusted = TrustedKeys.read(key.public)
    assert asyncio.run(resolved(trusted)) == path.read_bytes()
