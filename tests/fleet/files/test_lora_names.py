"""LoRAs and embeddings of any name: stored, named in prompts, found by workers on both storages."""

import asyncio
import json
import unicodedata
from pathlib import Path

from cli import console
from header_files import lora_of, shaped
from imagefleet import errors
from imagefleet.files.kinds import LORA
from imagefleet.job.prompt import read_prompt
from imagefleet.signing import SigningKey, TrustedKeys
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet
from worker.files.library import EmbeddingLibrary, FileLibrary, Source

NAMES = (
    "Smith, John's style",
    "salt & pepper [v2]!",
    "水墨画风格",
    "Ёлка №1 {final}",
    "100% = $5; a~b@c^d`",
    "e\u0301te\u0301",
    "-dash",
)


def with_alias(alias: str, *others: str) -> bytes:
    """A LoRA whose trainer called it so; *others* make it another file."""
    data = lora_of(*others)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size]) | {
        "__metadata__": {"ss_output_name": alias}
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def found(
    settings: StorageSettings,
    cache: Path,
    *names: str,
    trusted: TrustedKeys | None = None,
    directory: Path | None = None,
) -> list[bytes | str]:
    """The files that a worker finds by these names in prompts, or why it does not."""

    async def read() -> list[bytes | str]:
        results: list[bytes | str] = []
        async with open_storage(settings) as storage:
            library = FileLibrary(
                Source(storage.files, cache, 2**20, trusted), LORA, directory
            )
            for name in names:
                (tag,) = read_prompt(f"a <lora:{name}:0.5>").loras
                try:
                    results.append((await library.resolve(tag.name)).read_bytes())
                except errors.MissingFileError as error:
                    results.append(error.message)
        return results

    return asyncio.run(read())


def test_what_is_stored_under_any_name_is_found_by_it(
    in_process: Imagefleet,
    flags: list[str],
    storage_settings: StorageSettings,
    tmp_path,
):
    expected = []
    for number, name in enumerate(NAMES):
        expected.append(lora_of(str(number)))
        (tmp_path / "loras").mkdir(exist_ok=True)
        (tmp_path / "loras" / f"{name}.safetensors").write_bytes(expected[-1])
    added = in_process("files", "add", "lora", "loras", *flags)
    assert added.returncode == console.EXIT_DONE, added.stderr
    for name in NAMES:
        assert f"<lora:{unicodedata.normalize('NFC', name)}:1>" in added.stdout
    assert found(storage_settings, tmp_path / "cache", *NAMES) == expected
    prompts = [{"prompt": f"a <lora:{name}:1>"} for name in NAMES]
    (tmp_path / "jobs.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in prompts)
    )
    checked = in_process("load", "jobs.jsonl", "--check", *flags)
    assert checked.returncode == console.EXIT_DONE, checked.stderr
    own = found(
        storage_settings, tmp_path / "other", *NAMES, directory=tmp_path / "loras"
    )
    assert own == expected


def test_an_alias_finds_its_file_and_a_files_name_goes_before_it(
    in_process: Imagefleet,
    flags: list[str],
    storage_settings: StorageSettings,
    tmp_path,
):
    files = {
        "forest-000010": with_alias("Magic, forest"),
        "night": with_alias("rocket"),
        "rocket": with_alias("none", "a"),
        "one": with_alias("shared", "b"),
        "two": with_alias("shared", "c"),
    }
    for name, data in files.items():
        (tmp_path / f"{name}.safetensors").write_bytes(data)
        added = in_process("files", "add", "lora", f"{name}.safetensors", *flags)
        assert added.returncode == console.EXIT_DONE, added.stderr
    cache = tmp_path / "cache"
    results = found(
        storage_settings, cache, "Magic, forest", "rocket", "one", "none", "shared"
    )
    assert results[:3] == [files[name] for name in ("forest-000010", "rocket", "one")]
    assert "no LoRA none.safetensors" in str(results[3])
    assert "no LoRA shared.safetensors" in str(results[4])
    jobs = "".join(json.dumps({"prompt": f"<lora:{name}:1>"}) + "\n" for name in files)
    (tmp_path / "jobs.jsonl").write_text(
        jobs + '{"prompt": "<lora:Magic, forest:1>"}\n'
    )
    checked = in_process("load", "jobs.jsonl", "--check", *flags)
    assert checked.returncode == console.EXIT_DONE, checked.stderr
    in_process("files", "remove", "lora", "forest-000010", "--yes", *flags)
    (gone,) = found(storage_settings, tmp_path / "new", "Magic, forest")
    assert "no LoRA Magic, forest.safetensors" in str(gone)


def test_an_alias_is_signed_with_its_file(
    in_process: Imagefleet,
    flags: list[str],
    storage_settings: StorageSettings,
    tmp_path,
    monkeypatch,
):
    key = SigningKey.create(tmp_path / "key.pem")
    monkeypatch.setenv("IMAGEFLEET_SIGNING_KEY", str(tmp_path / "key.pem"))
    (tmp_path / "a.safetensors").write_bytes(data := with_alias("the other name"))
    added = in_process("files", "add", "lora", "a.safetensors", *flags)
    assert added.returncode == console.EXIT_DONE, added.stderr
    trusted = TrustedKeys.read(key.public)
    names = "the other name", "a", "neither"
    one, other, neither = found(
        storage_settings, tmp_path / "cache", *names, trusted=trusted
    )
    assert (one, other) == (data, data)
    assert "does not list 'neither'" in str(neither)


def test_in_a_folder_of_the_workers_own_aliases_are_read_of_the_files(
    local_settings: StorageSettings, tmp_path
):
    loras = tmp_path / "loras"
    loras.mkdir()
    data = with_alias("The alias")
    (loras / "a.safetensors").write_bytes(data)
    (loras / "b.safetensors").write_bytes(with_alias("twice"))
    (loras / "c.safetensors").write_bytes(with_alias("twice", "x"))
    (loras / "damaged.safetensors").write_bytes(b"x")
    asyncio.run(_create(local_settings))
    results = found(
        local_settings, tmp_path / "cache", "The alias", "twice", directory=loras
    )
    assert results[0] == data
    assert "'twice' is an alias of several: name 'b', 'c'" in str(results[1])


async def _create(settings: StorageSettings) -> None:
    async with open_storage(settings) as storage:
        await storage.create()


def test_embeddings_have_any_name_as_well(
    in_process: Imagefleet,
    flags: list[str],
    storage_settings: StorageSettings,
    tmp_path,
):
    for name in ("bad, hands!", "負の手"):
        (tmp_path / f"{name}.safetensors").write_bytes(shaped(v=[1, 768]))
        added = in_process("files", "add", "embedding", f"{name}.safetensors", *flags)
        assert added.returncode == console.EXIT_DONE, added.stderr

    async def names() -> tuple[str, ...]:
        async with open_storage(storage_settings) as storage:
            return await EmbeddingLibrary(
                Source(storage.files, tmp_path / "c", 2**20)
            ).names()

    assert asyncio.run(names()) == ("bad, hands!", "負の手")
