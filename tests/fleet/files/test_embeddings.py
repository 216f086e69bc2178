"""`imagefleet files` with embeddings: what it stores is what workers use, and what it refuses."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from cli import console
from header_files import LORA, file_of, shaped
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet, assert_refused
from worker.files.library import EmbeddingLibrary, Source


def used(settings: StorageSettings, cache: Path) -> dict[str, str]:
    """The embeddings that a worker finds, and their hashes."""

    async def read() -> dict[str, str]:
        async with open_storage(settings) as storage:
            library = EmbeddingLibrary(Source(storage.files, cache, 2**20, None))
            names = await library.names()
            return {name: (await library.resolve_hashed(name))[1] for name in names}

    return asyncio.run(read())


def test_workers_use_what_was_added(
    in_process: Imagefleet,
    flags: list[str],
    storage_settings: StorageSettings,
    tmp_path,
):
    files = {
        "EasyNegative": shaped(emb_params=[8, 768]),
        "bad-hands-5": shaped(clip_l=[3, 768], clip_g=[3, 1280]),
        "mist": shaped(mist=[1024]),
    }
    for name, data in files.items():
        (tmp_path / f"{name}.safetensors").write_bytes(data)
    result = in_process("files", "add", "embedding", "EasyNegative.safetensors", *flags)
    assert result.returncode == console.EXIT_DONE, result.stderr
    assert result.stdout == "EasyNegative\n"
    assert "SD 1.x embedding, 8 vectors" in result.stderr
    sdxl = in_process(
        "files", "add", "embedding", "bad-hands-5.safetensors", "--json", *flags
    )
    (row,) = json.loads(sdxl.stdout)["files"]
    assert (row["name"], row["content"]) == ("bad-hands-5", "SDXL embedding, 3 vectors")
    in_process("files", "add", "embedding", "mist.safetensors", "--name", "fog", *flags)

    hashes = [hashlib.sha256(data).hexdigest() for data in files.values()]
    expected = dict(zip(("EasyNegative", "bad-hands-5", "fog"), hashes, strict=True))
    assert used(storage_settings, tmp_path / "cache") == expected
    listed = json.loads(
        in_process("files", "list", "embedding", "--json", *flags).stdout
    )["files"]
    assert [(each["name"], each["content"]) for each in listed] == [
        ("EasyNegative.safetensors", "SD 1.x embedding, 8 vectors"),
        ("bad-hands-5.safetensors", "SDXL embedding, 3 vectors"),
        ("fog.safetensors", "SD 2.x embedding, 1 vector"),
    ]


REFUSED: dict[str, tuple[Any, str]] = {
    "a LoRA": (
        file_of(*LORA),
        "is a LoRA for Stable Diffusion 1.x; `imagefleet files add lora`",
    ),
    "a page": (b"<html></html>", "is a web page"),
    "cut off": (shaped(emb_params=[2, 768])[:-1], "is cut off"),
    "too many vectors": (
        shaped(emb_params=[76, 768]),
        "has 76 vectors; a prompt's chunk",
    ),
    "no vector": (shaped(emb_params=[0, 768]), "has 0 vectors"),
    "another width": (
        shaped(emb_params=[2, 4096]),
        "vectors of 4,096 numbers: those of SD 1.x",
    ),
    "half of SDXL's": (shaped(clip_g=[2, 1280]), "SDXL's embeddings have two"),
    "unequal halves": (
        shaped(clip_g=[2, 1280], clip_l=[3, 768]),
        "different numbers of vectors",
    ),
    "three dimensions": (shaped(emb_params=[1, 2, 768]), "of the shape [1, 2, 768]"),
}


@pytest.mark.parametrize("content", REFUSED)
def test_what_is_no_usable_embedding_never_reaches_the_storage(
    in_process: Imagefleet, tmp_path, content: str
):
    data, reason = REFUSED[content]
    (tmp_path / "mist.safetensors").write_bytes(data)
    result = in_process("files", "add", "embedding", "mist.safetensors")
    assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert reason in " ".join(result.stderr.split())
    assert not (tmp_path / "imagefleet-data").exists()


def test_a_pickle_and_an_unsafe_name_are_refused(in_process: Imagefleet, tmp_path):
    (tmp_path / "mist.pt").write_bytes(b"PK\x03\x04")
    pickle = in_process("files", "add", "embedding", "mist.pt")
    assert_refused(pickle, "a pickle, which may run any program")
    assert "string_to_param" in pickle.stderr, "how to convert it"
    (tmp_path / "mist.safetensors").write_bytes(shaped(v=[768]))
    named = in_process(
        "files", "add", "embedding", "mist.safetensors", "--name", "../mist"
    )
    assert "the name '../mist' is refused" in named.stderr
    gone = in_process("files", "add", "embedding", "gone.safetensors")
    assert "'gone.safetensors' does not exist" in gone.stderr
    assert not (tmp_path / "imagefleet-data").exists()
