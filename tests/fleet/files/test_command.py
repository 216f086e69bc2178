"""`imagefleet files`: kinds and options that do not fit, and what is removed."""

import asyncio
import json

import pytest

from cli import console
from header_files import lora_of
from imagefleet.signing import SigningKey
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet, assert_refused
from worker.files import manifest


@pytest.fixture
def loras(in_process: Imagefleet, tmp_path, flags: list[str]) -> list[str]:
    """The names of two stored and listed LoRAs."""
    names = ["night", "rocket (v2)"]
    for name in names:
        (tmp_path / f"{name}.safetensors").write_bytes(lora_of(name))
    paths = [f"{name}.safetensors" for name in names]
    added = in_process("files", "add", "lora", *paths, "--manifest", *flags)
    assert added.stdout == "<lora:night:1>\n<lora:rocket (v2):1>\n", added.stderr
    return names


def stored(settings: StorageSettings) -> dict[str, bytes]:
    async def read() -> dict[str, bytes]:
        async with open_storage(settings) as storage:
            names = [name async for name in storage.files.names()]
            return {name: await storage.files.read(name) or b"" for name in names}

    return asyncio.run(read())


def test_a_removed_file_is_neither_stored_nor_listed(
    in_process: Imagefleet,
    loras: list[str],
    flags: list[str],
    storage_settings: StorageSettings,
):
    before = stored(storage_settings)
    command = ("files", "remove", "lora", "night")
    dry = in_process(*command, "--dry-run", "--json", *flags)
    assert [row["name"] for row in json.loads(dry.stdout)["files"]] == [
        "night.safetensors"
    ]
    assert stored(storage_settings) == before

    asked = in_process(*command, *flags)
    assert "Cannot ask without a terminal: add --yes" in asked.stderr
    assert stored(storage_settings) == before

    removed = in_process(*command, "--yes", *flags)
    assert removed.stdout == "loras/night.safetensors: removed\n", removed.stderr
    after = stored(storage_settings)
    assert set(after) == {"loras/manifest.json", "loras/rocket (v2).safetensors"}
    assert set(json.loads(after["loras/manifest.json"])) == {"rocket (v2)"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nihgt", "; did you mean 'night'?"),
        ("rocket (v2).tar", "; did you mean 'rocket (v2)"),
        ("x", ""),
    ],
)
def test_an_unknown_name_is_refused_with_one_like_it_and_nothing_is_removed(
    in_process: Imagefleet,
    loras: list[str],
    flags: list[str],
    storage_settings: StorageSettings,
    name: str,
    hint: str,
):
    before = stored(storage_settings)
    refused = in_process("files", "remove", "lora", "night", name, "--yes", *flags)
    assert_refused(refused, f"no LoRA {name!r} in loras/{hint}")
    assert stored(storage_settings) == before


def test_a_signed_list_loses_a_file_only_with_its_key(
    in_process: Imagefleet, tmp_path, local_settings: StorageSettings
):
    SigningKey.create(tmp_path / "key.pem")
    (tmp_path / "night.safetensors").write_bytes(lora_of())
    storage = f"--storage={local_settings.storage}"
    key = ("--signing-key", "key.pem")
    in_process("files", "add", "lora", "night.safetensors", storage, *key)
    remove = ("files", "remove", "lora", "night.safetensors", "--yes", storage)
    assert "set IMAGEFLEET_SIGNING_KEY" in in_process(*remove).stderr
    assert "loras/night.safetensors" in stored(local_settings)
    assert in_process(*remove, *key).returncode == console.EXIT_DONE
    contents = manifest.parse("loras", stored(local_settings)["loras/manifest.json"])
    assert (contents.files, contents.is_signed) == ({}, True)


def test_a_name_that_two_files_have_is_to_be_given_with_its_suffix(
    in_process: Imagefleet, local_settings: StorageSettings
):
    async def fill() -> None:
        async with open_storage(local_settings) as storage:
            await storage.create()
            for name in ("b.tar", "b.safetensors"):
                await storage.files.create(f"models/{name}", b"x", "text/plain", {})

    asyncio.run(fill())
    storage = f"--storage={local_settings.storage}"
    several = in_process("files", "remove", "model", "b", "--yes", storage)
    assert (
        "'b' is the name of b.safetensors and b.tar: give it with its suffix"
        in several.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("add loras x.safetensors", "unknown kind 'loras'; did you mean 'lora'?"),
        (
            "list pictures",
            "unknown kind 'pictures': give one of model, lora, embedding,",
        ),
        (
            "make lora --model m",
            "unknown kind 'lora': give one of text, kernels",
        ),
        ("add lora x.safetensors --replace", "--replace is for kernels, not for lora"),
        (
            "add model x.safetensors --replace",
            "--replace is for kernels, not for model",
        ),
        ("add kernels x.kernels --name x", "--name is for model, lora, embedding,"),
        (
            "add lora a.safetensors b.safetensors --name x",
            "--name and --sha256 are for one file",
        ),
        ("add text jobs.jsonl", "'jobs.jsonl' does not exist"),
        (
            "make text a.jsonl --model m --slots 4",
            "--slots is for kernels, not for text",
        ),
        ("make kernels jobs.jsonl --model m", "JOBS is for text, not for kernels"),
        (
            "make text jobs.jsonl --model m --output x",
            "--output is for kernels, not for text",
        ),
        ("make kernels --model m --count 3", "--count is for text, not for kernels"),
        ("make text --model m", "JOBS is missing"),
    ],
)
def test_what_does_not_fit_the_kind_is_refused(
    in_process: Imagefleet, tmp_path, arguments: str, reason: str
):
    assert_refused(in_process("files", *arguments.split()), reason)
    assert list(tmp_path.iterdir()) == []
