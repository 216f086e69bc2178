"""`imagefleet files` with models and LoRAs: on their way into the storage, and in lists."""

import asyncio
import hashlib
import json
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

import tiny_model
from cli import console
from fleet.files import add, stored
from header_files import SD1, file_of, lora_of
from imagefleet.files import kinds
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet, assert_refused, told
from worker.files import check


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    path = tmp_path / "dreams.safetensors"
    path.write_bytes(file_of())
    return path


@pytest.fixture
def lora(tmp_path) -> Path:
    path = tmp_path / "rocket.safetensors"
    path.write_bytes(lora_of())
    return path


def blobs_in(settings: StorageSettings, *names: str) -> list[bytes | None]:
    async def read() -> list[bytes | None]:
        async with open_storage(settings) as storage:
            return [await storage.files.read(name) for name in names]

    return asyncio.run(read())


# A checkpoint


def test_a_checkpoint_is_stored_under_its_name_with_the_workers_flags(
    in_process: Imagefleet,
    checkpoint: Path,
    flags: list[str],
    storage_settings: StorageSettings,
):
    result = in_process("files", "add", "model", checkpoint.name, *flags)

    assert result.returncode == console.EXIT_DONE, result.stderr
    content = checkpoint.read_bytes()
    assert result.stdout == (
        f"--model store:dreams.safetensors --model-sha256 {sha256(content)}\n"
    )
    assert blobs_in(storage_settings, "models/dreams.safetensors") == [content]

    again = in_process("files", "add", "model", checkpoint.name, "--json", *flags)
    assert json.loads(again.stdout)["files"][0]["change"] == "was there"
    listed = json.loads(in_process("files", "list", "model", "--json", *flags).stdout)[
        "files"
    ]
    assert [(each["name"], each["content"], each["sha256"]) for each in listed] == [
        ("dreams.safetensors", "SD 1.x", sha256(content))
    ]
    assert (
        "dreams.safetensors  0.0  SD 1.x"
        in in_process("files", "list", "model", *flags).stdout
    )

    checkpoint.write_bytes(file_of(*SD1, "another"))
    refused = in_process("files", "add", "model", checkpoint.name, *flags)
    assert_refused(refused, "exists and is another file")
    assert blobs_in(storage_settings, "models/dreams.safetensors") == [content]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["gone.safetensors"], "does not exist"),
        (
            ["rocket.safetensors"],
            "is a LoRA for Stable Diffusion 1.x; `imagefleet files add lora`",
        ),
        (["old.ckpt"], "is a pickle"),
        (["dreams.safetensors", "--name", "../x"], "the name '../x' is refused"),
        (["dreams.safetensors", "--sha256", "0" * 64], "another SHA-256"),
        (["http://127.0.0.1:1/a.safetensors"], "set --model-sha256 or use https"),
        (["https://civitai.com/models/1"], "is a web page"),
    ],
)
def test_what_is_no_checkpoint_never_reaches_the_storage(
    arguments: list[str],
    reason: str,
    in_process: Imagefleet,
    checkpoint: Path,
    lora: Path,
    tmp_path,
):
    (tmp_path / "old.ckpt").touch()
    assert_refused(in_process("files", "add", "model", *arguments), reason)
    assert not (tmp_path / "imagefleet-data").exists()


def test_v_prediction_that_only_a_yaml_tells_is_not_lost(
    in_process: Imagefleet, checkpoint: Path
):
    checkpoint.with_suffix(".yaml").write_text("model: {params: {parameterization: v}}")
    assert (
        "write it into the file first"
        in in_process("files", "add", "model", checkpoint.name).stderr
    )
    checkpoint.write_bytes(file_of(modelspec__prediction_type="v"))
    result = in_process("files", "add", "model", checkpoint.name)
    assert result.returncode == console.EXIT_DONE, result.stderr


def test_a_folder_is_packed_and_loads_where_it_is_unpacked(
    in_process: Imagefleet, tmp_path
):
    model = tiny_model.build_tiny_checkpoint(tmp_path / "tiny")
    (model / "safety_checker").mkdir()
    (model / "safety_checker" / "pytorch_model.bin").write_bytes(b"a pickle")
    (model / "model_index.json").unlink()

    result = in_process("files", "add", "model", "tiny", "--json", "--cache", "cache")

    (added,) = told(result)["files"]
    assert added["blob"] == "models/tiny.tar"
    stored = tmp_path / "imagefleet-data" / "files" / "models" / "tiny.tar"
    assert sha256(stored.read_bytes()) == added["sha256"]
    with tarfile.open(stored) as tar:
        names = set(tar.getnames())
        tar.extractall(tmp_path / "unpacked", filter="data")
    assert "model_index.json" in names
    assert not any("safety" in name for name in names)
    check.check_path(tmp_path / "unpacked")
    assert list((tmp_path / "cache" / "added").iterdir()) == []


def test_the_same_folder_gives_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "unet").mkdir(parents=True)
        (tmp_path / name / "unet" / "config.json").write_text("{}")
        (tmp_path / name / "model_index.json").write_text("{}")
        progress: dict[int, int | None] = {}
        add.pack(tmp_path / name, tmp_path / f"{name}.tar", progress.__setitem__)
        assert progress[4] == 4
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()


# From a URL


@pytest.fixture
async def address(tmp_path) -> AsyncIterator[str]:
    """Of the file that a server calls dreams.safetensors."""

    async def answer(_: web.Request) -> web.Response:
        named = {"Content-Disposition": 'attachment; filename="dreams.safetensors"'}
        return web.Response(body=file_of(), headers=named)

    runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/api/download/models/1"
    await runner.cleanup()


async def test_a_download_has_the_servers_name_and_is_removed_once_it_is_stored(
    address: str, tmp_path
):
    expected = sha256(file_of())
    with pytest.raises(RuntimeError, match="the upload failed"):
        async with stored.local_file(address, expected, kinds.MODEL, tmp_path) as path:
            raise RuntimeError("the upload failed")
    assert path.is_file(), "it is not downloaded again the next time"
    async with stored.local_file(address, expected, kinds.MODEL, tmp_path) as again:
        assert again == path
        assert path.name == "dreams.safetensors"
    assert not path.exists()


# LoRAs


def test_a_lora_is_stored_with_its_hash_in_the_manifest_if_there_is_one(
    in_process: Imagefleet,
    lora: Path,
    flags: list[str],
    storage_settings: StorageSettings,
):
    result = in_process("files", "add", "lora", lora.name, *flags)
    assert result.returncode == console.EXIT_DONE, result.stderr
    assert result.stdout == "<lora:rocket:1>\n"
    first = sha256(lora.read_bytes())
    stored, manifest = blobs_in(
        storage_settings, "loras/rocket.safetensors", "loras/manifest.json"
    )
    assert (stored, manifest) == (lora.read_bytes(), None)

    listed = in_process(
        "files", "add", "lora", lora.name, "--manifest", "--json", *flags
    )
    assert json.loads(listed.stdout)["files"][0]["in_manifest"] is True
    lora.write_bytes(lora_of("x"))
    in_process("files", "add", "lora", lora.name, "--name", "night (v2)", *flags)

    (manifest,) = blobs_in(storage_settings, "loras/manifest.json")
    assert manifest is not None
    assert json.loads(manifest) == {
        "rocket": first,
        "night (v2)": sha256(lora.read_bytes()),
    }
    rows = json.loads(in_process("files", "list", "lora", "--json", *flags).stdout)[
        "files"
    ]
    assert [row["name"] for row in rows] == [
        "night (v2).safetensors",
        "rocket.safetensors",
    ]


# Lists


def test_an_empty_list_says_how_to_fill_it(in_process: Imagefleet, lora: Path):
    in_process("files", "add", "lora", lora.name)
    result = in_process("files", "list", "model")
    assert (result.stdout, result.returncode) == ("", console.EXIT_DONE)
    assert "models/ is empty: `imagefleet files add model` stores" in result.stderr


async def test_a_file_that_was_put_there_by_hand_is_listed_too(
    local_settings: StorageSettings,
):
    async with open_storage(local_settings) as storage:
        await storage.create()
        for name in ("models/sub/a.tar", "models/b.safetensors", "models/notes.txt"):
            await storage.files.create(name, b"12345", "text/plain", {})
        rows = await stored.read(storage, kinds.MODEL)
    assert [(row.name, row.content, row.bytes) for row in rows] == [
        ("b.safetensors", None, 5),
        ("sub/a.tar", None, 5),
    ]
