"""`imagefleet files` with text states: workers find what is stored, however often it runs."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cli import console
from fleet.files import texts
from imagefleet.files.kinds import TEXT
from imagefleet.signing import SigningKey, TrustedKeys
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet, assert_refused, told
from pixel import tiny_cascade
from storages import flags
from worker.engine.pixel import text_stage, text_states
from worker.files import manifest
from worker.files.library import FileLibrary, Source

JOBS = [
    {"prompt": "A Red House", "negative_prompt": "blurry"},
    {"prompt": "a red house <lora:none:1>", "negative_prompt": "Blurry "},
    {
        "prompt": "two dogs",
        "then": [{"prompt": "two dogs, sharp", "denoising_strength": 0.25}],
    },
]

#: Of all stages, as the encoder is given them; without a negative prompt it is the empty one.
PROMPTS = ("a red house", "blurry", "two dogs", "two dogs, sharp", "")

WIDTH = 32


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return tiny_cascade.build(tmp_path_factory.mktemp("stage") / "base", "base")


@pytest.fixture
def signing_key(tmp_path, monkeypatch) -> SigningKey:
    key = SigningKey.create(tmp_path / "key.pem")
    monkeypatch.setenv("IMAGEFLEET_SIGNING_KEY", str(tmp_path / "key.pem"))
    return key


def make_text(jobs: Path, model: Path, settings: StorageSettings) -> list[str]:
    command = ["files", "make", "text", str(jobs), "--model", str(model)]
    return [*command, *flags(settings)]


def stored(settings: StorageSettings) -> set[str]:
    async def names() -> set[str]:
        async with open_storage(settings) as storage:
            return {name async for name in storage.files.names(f"{TEXT.folder}/")}

    return {Path(name).name for name in asyncio.run(names())} - {manifest.NAME}


def found_by_workers(
    settings: StorageSettings,
    prompts: Sequence[str],
    cache: Path,
    trusted: str | None = None,
) -> list[torch.Tensor]:
    async def resolve() -> list[Path]:
        async with open_storage(settings) as storage:
            keys = TrustedKeys.read(trusted) if trusted else None
            library = FileLibrary(Source(storage.files, cache, 2**20, keys), TEXT)
            return [
                await library.resolve(text_states.stem(each, tiny_cascade.ENCODER))
                for each in prompts
            ]

    paths = asyncio.run(resolve())
    return [
        text_states.read(path, prompt, tiny_cascade.ENCODER, WIDTH)
        for path, prompt in zip(paths, prompts, strict=True)
    ]


def names_of(prompts: Sequence[str]) -> set[str]:
    return {
        f"{text_states.stem(each, tiny_cascade.ENCODER)}.safetensors"
        for each in prompts
    }


def test_workers_find_the_states_of_all_prompts_of_all_stages(
    in_process: Imagefleet,
    jobs: Path,
    model: Path,
    storage_settings: StorageSettings,
    tmp_path,
    monkeypatch,
):
    command = [*make_text(jobs, model, storage_settings), "--json"]
    added = in_process(*command)
    assert told(added) == {
        "encoder": tiny_cascade.ENCODER,
        "jobs": len(JOBS),
        "prompts": len(PROMPTS),
        "missing": len(PROMPTS),
        "stored": len(PROMPTS),
        "in_manifest": False,
    }
    assert stored(storage_settings) == names_of(PROMPTS)
    stage = text_stage.TextStage(model, torch.device("cpu"), torch.float32)
    states = found_by_workers(storage_settings, PROMPTS, tmp_path / "cache")
    for prompt, each in zip(PROMPTS, states, strict=True):
        assert torch.equal(each, stage.encode([prompt])[0].half())

    listed = in_process("files", "list", "text", "--json", *flags(storage_settings))
    rows = json.loads(listed.stdout)["files"]
    assert {(row["name"], row["content"]) for row in rows} == {
        (name, tiny_cascade.ENCODER) for name in names_of(PROMPTS)
    }

    def encode(*_: Any) -> torch.Tensor:
        raise AssertionError("they are there")

    monkeypatch.setattr(text_stage.TextStage, "encode", encode)
    again = in_process(*command)
    assert told(again)["stored"] == 0


def test_an_interrupted_command_goes_on_where_it_was(
    in_process: Imagefleet,
    jobs: Path,
    model: Path,
    storage_settings: StorageSettings,
    monkeypatch,
):
    monkeypatch.setattr(texts, "CHUNK", 1)
    made: list[str] = []
    encode = text_stage.TextStage.encode

    def fail_at_the_third(self: Any, prompts: list[str]) -> torch.Tensor:
        made.extend(prompts)
        if len(made) == 3:
            raise KeyboardInterrupt
        return encode(self, prompts)

    monkeypatch.setattr(text_stage.TextStage, "encode", fail_at_the_third)
    command = make_text(jobs, model, storage_settings)
    assert in_process(*command).returncode != console.EXIT_DONE
    there = stored(storage_settings)
    assert len(there) == 2
    dry = in_process(*command, "--dry-run")
    assert dry.returncode == console.EXIT_DONE
    assert stored(storage_settings) == there, "a dry run changes nothing"
    assert (
        f"{len(PROMPTS) - len(there)} of 5 prompts by tiny-t5 have no text states"
        in dry.stderr
    )
    assert names_of(dry.stdout.splitlines()) == names_of(PROMPTS) - there
    made.clear()
    monkeypatch.setattr(text_stage.TextStage, "encode", encode)
    ended = in_process(*command)
    said = f"{len(PROMPTS) - len(there)} text states stored, {len(there)} were there"
    assert said in ended.stderr
    assert stored(storage_settings) == names_of(PROMPTS)


def test_with_a_signing_key_all_are_listed_and_what_others_stored_is_replaced(
    in_process: Imagefleet,
    jobs: Path,
    model: Path,
    storage_settings: StorageSettings,
    tmp_path,
    signing_key: SigningKey,
    monkeypatch,
):
    monkeypatch.setattr(texts, "CHUNK", 2)
    foreign = text_states.content(
        "two dogs", tiny_cascade.ENCODER, torch.ones(77, WIDTH)
    )
    blob = f"{TEXT.folder}/{text_states.stem('two dogs', tiny_cascade.ENCODER)}.safetensors"

    async def put() -> None:
        async with open_storage(storage_settings) as storage:
            await storage.create()
            await storage.files.create(blob, foreign, "application/octet-stream", {})

    asyncio.run(put())
    command = [*make_text(jobs, model, storage_settings), "--json"]
    added = in_process(*command)
    found = told(added)
    assert (found["stored"], found["in_manifest"]) == (len(PROMPTS), True)
    states = found_by_workers(
        storage_settings, PROMPTS, tmp_path / "cache", signing_key.public
    )
    assert not torch.equal(states[2], torch.ones(77, WIDTH).half()), (
        "what a stranger stored"
    )
    assert json.loads(in_process(*command).stdout)["stored"] == 0


def test_states_made_on_another_machine_are_stored_as_they_are(
    in_process: Imagefleet,
    jobs: Path,
    model: Path,
    storage_settings: StorageSettings,
    tmp_path,
):
    elsewhere = tmp_path / "elsewhere"
    made = elsewhere / "files" / TEXT.folder
    command = ["files", "make", "text", str(jobs), "--model", str(model)]
    assert (
        in_process(*command, f"--storage=local:{elsewhere}").returncode
        == console.EXIT_DONE
    )
    added = in_process("files", "add", "text", str(made), *flags(storage_settings))
    assert added.returncode == console.EXIT_DONE, added.stderr
    assert added.stderr.count(": stored: tiny-t5, ") == len(PROMPTS)
    states = found_by_workers(storage_settings, PROMPTS, tmp_path / "cache")
    assert [each.shape for each in states] == [(77, WIDTH)] * len(PROMPTS)
    other = made / f"{text_states.stem('blurry', tiny_cascade.ENCODER)}.safetensors"
    rounded = text_states.content(
        "blurry", tiny_cascade.ENCODER, torch.zeros(77, WIDTH)
    )
    other.write_bytes(rounded)
    again = in_process("files", "add", "text", str(made), *flags(storage_settings))
    assert again.stderr.count(": was there: tiny-t5, ") == len(PROMPTS)
    (left,) = found_by_workers(storage_settings, ["blurry"], tmp_path / "cache2")
    assert left.any(), "one that another machine computed stays"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--model / IMAGEFLEET_MODEL: "),
        (["--model", "elsewhere"], "has no weights of a T5 encoder"),
        (["--model", "sd15"], "has no weights of a T5 encoder"),
    ],
)
def test_without_a_text_encoder_nothing_is_read(
    arguments: list[str],
    said: str,
    in_process: Imagefleet,
    jobs: Path,
    local_settings: StorageSettings,
):
    clip = jobs.parent / "sd15" / "text_encoder"
    clip.mkdir(parents=True)
    (clip / "config.json").write_text('{"model_type": "clip_text_model"}')
    (clip / "model.safetensors").touch()
    result = in_process(
        "files", "make", "text", str(jobs), *arguments, *flags(local_settings)
    )
    assert_refused(result, said)
    assert not Path(local_settings.storage.removeprefix("local:")).exists()
