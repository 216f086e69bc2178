"""Which words name an embedding, where its file comes from, and what becomes of the job."""

import asyncio
import hashlib
import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from imagefleet import errors
from imagefleet.signing import SigningKey, TrustedKeys
from imagefleet.storage.open import Storage
from messages import message, records
from worker.files import addresses, manifest
from worker.files.library import EmbeddingLibrary, Source

Library = Callable[..., EmbeddingLibrary]
FileBytes = Callable[
    [str], bytes
]  # the fixture lora_bytes of conftest.py: any safetensors file


@pytest.fixture
def library(storage: Storage, tmp_path) -> Library:
    def make(
        directory: Path | None = None, trusted: TrustedKeys | None = None
    ) -> EmbeddingLibrary:
        source = Source(storage.files, tmp_path / "cache", 2**20, trusted)
        return EmbeddingLibrary(source, directory)

    return make


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def put(storage: Storage, **files: bytes) -> None:
    """As `imagefleet files add` does: the files and the manifest of all of them."""
    for name, data in files.items():
        await replace(storage, f"embeddings/{name}.safetensors", data)
    known = await storage.files.read("embeddings/manifest.json")
    listed = json.loads(known or b"{}") | {
        name: sha256(data) for name, data in files.items()
    }
    await replace(storage, "embeddings/manifest.json", json.dumps(listed).encode())


async def replace(storage: Storage, name: str, data: bytes) -> None:
    part = await storage.files.read_part(name, 0, 1)
    assert await storage.files.replace(name, data, "text/plain", part and part.version)


async def test_the_names_are_those_of_the_manifest_and_the_files_are_found(
    storage: Storage, library: Library, lora_bytes: FileBytes
):
    await put(storage, mist=lora_bytes("a"), Ash=lora_bytes("b"))
    found = library()
    assert await found.names() == ("Ash", "mist")
    for name, text in (("mist", "a"), ("Ash", "b")):
        path, digest = await found.resolve_hashed(name)
        assert path.read_bytes() == lora_bytes(text)
        assert digest == sha256(lora_bytes(text))


async def test_a_folders_files_need_no_manifest_and_come_first(
    storage: Storage, library: Library, lora_bytes: FileBytes, tmp_path
):
    await put(storage, mist=lora_bytes("stored"))
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("mist", "ash", ".hidden", "a|b", "sub/deep/fog", "sub/mist"):
        path = mine / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lora_bytes(f"mine {name}"))
    (mine / "readme.txt").write_text("none")
    found = library(directory=mine)
    assert await found.names() == ("ash", "fog", "mist")
    path, _ = await found.resolve_hashed("mist")
    assert path == mine / "mist.safetensors"
    path, _ = await found.resolve_hashed("fog")
    assert path == mine / "sub" / "deep" / "fog.safetensors"
    with pytest.raises(
        errors.SetupError, match=r"--embedding-directory .* it does not exist"
    ):
        await library(directory=tmp_path / "none").names()


async def test_a_file_put_into_a_local_storage_by_hand_is_used_and_its_replacement_at_once(
    storage: Storage, library: Library, lora_bytes: FileBytes
):
    await replace(storage, "embeddings/mist.safetensors", lora_bytes("old"))
    found = library()
    if not storage.settings.is_local:
        assert await found.names() == (), "a worker's token cannot list them"
        return
    assert await found.names() == ("mist",)
    assert (await found.resolve_hashed("mist"))[1] == sha256(lora_bytes("old"))
    await replace(storage, "embeddings/mist.safetensors", lora_bytes("new"))
    assert (await found.resolve_hashed("mist"))[1] == sha256(lora_bytes("new"))


async def test_the_list_is_read_once_in_a_while_and_a_new_or_replaced_file_is_then_used(
    storage: Storage,
    library: Library,
    lora_bytes: FileBytes,
    monkeypatch,
):
    await put(storage, mist=lora_bytes("old"))
    found = library()
    names = await found.names()
    await found.resolve_hashed("mist")
    reads = storage.operations.blob_reads
    for _ in range(100):
        assert await found.names() is names
        await found.resolve_hashed("mist")
    assert storage.operations.blob_reads == reads, "no job costs a request"
    await put(storage, mist=lora_bytes("new"), ash=lora_bytes("x"))
    monkeypatch.setattr("worker.files.library.LIST_SECONDS", -1.0)
    assert await found.names() == ("ash", "mist")
    assert (await found.resolve_hashed("mist"))[1] == sha256(lora_bytes("new"))


async def test_a_list_that_cannot_be_read_leaves_the_last_one_in_force(
    storage: Storage,
    library: Library,
    lora_bytes: FileBytes,
    monkeypatch,
):
    await put(storage, mist=lora_bytes("a"))
    monkeypatch.setattr("worker.files.library.LIST_SECONDS", -1.0)
    found = library()
    names = await found.names()
    await replace(storage, "embeddings/manifest.json", b"{")
    assert await found.names() is names
    with monkeypatch.context() as hanging:
        hanging.setattr("worker.files.library.READ_SECONDS", 0.01)
        hanging.setattr(storage.files, "read", lambda *_: asyncio.Event().wait())
        assert await found.names() is names
    # A worker that starts then would draw names as words, or fail every job.
    with pytest.raises(
        errors.SetupError, match=r"embeddings/manifest\.json .* is not a JSON"
    ):
        await library().names()


async def test_names_that_lead_out_of_the_folder_are_left_out(
    storage: Storage,
    library: Library,
    caplog,
):
    bad = ["../../etc/x", "a/b", "..", ".hidden", "", "a\\b", "x" * 201, "a\0b"]
    listed = dict.fromkeys([*bad, "mist"], sha256(b""))
    await replace(storage, "embeddings/manifest.json", json.dumps(listed).encode())
    assert await library().names() == ("mist",)
    assert "'../../etc/x' is no name of an embedding" in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        {
            "string_to_token": {"*": 265},
            "string_to_param": {"*": torch.ones(2, 768)},
            "step": 1,
        },
        {"<mist>": torch.ones(768)},
    ],
)
async def test_a_pickle_is_refused_by_name_and_the_advice_converts_it(
    library: Library,
    lora_bytes: FileBytes,
    tmp_path,
    content,
):
    mine = tmp_path / "mine"
    mine.mkdir()
    torch.save(content, mine / "mist.pt")
    torch.save(content, mine / "ash.pt")
    (mine / "ash.safetensors").write_bytes(lora_bytes("a"))
    found = library(directory=mine)
    assert await found.names() == ("ash", "mist")
    assert (await found.resolve_hashed("ash"))[0].suffix == ".safetensors"
    with pytest.raises(
        errors.UnusableFileError, match=r"'mist'.* is mist\.pt, a pickle"
    ) as raised:
        await found.resolve_hashed("mist")
    program = shlex.split(raised.value.message.partition("python ")[2])[-1]
    exec(program, {})
    converted = load_file(mine / "mist.safetensors")
    assert converted["emb_params"].shape[-1] == 768


def test_the_advice_is_one_command_for_a_shell(tmp_path):
    path = tmp_path / "it's; $(touch x).pt"
    advice = addresses.pickle_advice(str(path), is_embedding=True)
    command = advice[advice.index("python -c") :].replace("python -c", "printf %s")
    told = subprocess.run(
        command, shell=True, capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    assert json.dumps(str(path)) in told
    assert list(tmp_path.iterdir()) == []


async def test_with_a_trusted_key_the_signed_list_alone_counts(
    storage: Storage, library: Library, lora_bytes: FileBytes, tmp_path
):
    key = SigningKey.create(tmp_path / "key.pem")
    trusted = TrustedKeys.read(key.public)
    assert await library(trusted=trusted).names() == (), (
        "a fleet need not have embeddings"
    )
    await replace(storage, "embeddings/mist.safetensors", lora_bytes("a"))
    await replace(storage, "embeddings/thiefs.safetensors", lora_bytes("b"))
    files = {"mist": sha256(lora_bytes("a"))}
    signed = manifest.encode("embeddings", files, key)
    await replace(storage, "embeddings/manifest.json", signed)
    found = library(trusted=trusted)
    assert await found.names() == ("mist",)
    assert (await found.resolve_hashed("mist"))[1] == files["mist"]
    for content in (
        manifest.encode("embeddings", files, None),
        signed.replace(b"mist", b"fist"),
    ):
        await replace(storage, "embeddings/manifest.json", content)
        with pytest.raises(
            errors.SetupError, match="must be signed with the trusted key"
        ):
            await library(trusted=trusted).names()


async def test_an_image_and_its_record_tell_the_embeddings_of_their_prompts(
    storage: Storage,
    run_pipeline,
    lora_bytes: FileBytes,
    tmp_path,
):
    await put(storage, mist=lora_bytes("a"), ash=lora_bytes("b"), fog=lora_bytes("c"))
    pipeline = await run_pipeline(
        sent=[
            message(id="two", prompt="a Mist", negative_prompt="(ash:1.2)"),
            message(id="none", prompt="a house"),
        ]
    )
    assert pipeline.metrics.outcomes == {"completed": 2}
    texts = {}
    for name in ("two", "none"):
        path = tmp_path / f"{name}.png"
        path.write_bytes(await storage.blobs.read(f"default/{name}.png") or b"")
        with Image.open(path) as image:
            texts[name] = image.text["parameters"]  # type: ignore[attr-defined]
    mist = sha256(lora_bytes("a"))
    ash = sha256(lora_bytes("b"))
    assert f'TI hashes: "mist: {mist[:12]}, ash: {ash[:12]}", Version: ' in texts["two"]
    assert "TI hashes" not in texts["none"]
    assert {each.id: each.embeddings for each in await records(storage)} == {
        "two": (("mist", mist), ("ash", ash)),
        "none": (),
    }
