"""Jobs drawn by a worker's whole pipeline with a tiny stage, on both storages."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from drawing import difference
from imagefleet.files.kinds import TEXT
from imagefleet.job.message import read_job
from imagefleet.signing import JobSigner, SigningKey
from imagefleet.storage.open import Storage
from messages import failed_jobs, message
from pixel import tiny_cascade
from worker.engine.pixel import text_stage, text_states
from worker.files import manifest

pytestmark = pytest.mark.slow

FEW_STEPS: dict[str, Any] = {
    "seed": 1,
    "steps": 2,
    "cfg_scale": 7,
    "sampler_name": "DDPM",
}


Folders = dict[str, Path]


@pytest.fixture(scope="session")
def cascade(stage, tmp_path_factory) -> Folders:
    """Two stages that have the same text encoder, as IF's have."""
    folder = tmp_path_factory.mktemp("cascade")
    for name in ("base", "sr"):
        shutil.copytree(stage(name), folder / name)
        shutil.copytree(
            stage("base") / "text_encoder",
            folder / name / "text_encoder",
            dirs_exist_ok=True,
        )
    return {name: folder / name for name in ("base", "sr")}


@pytest.fixture(scope="session")
def small_cascade(cascade: Folders, remove_encoder, tmp_path_factory) -> Folders:
    """The same as 8 GB cards have them: without a text encoder."""
    folder = tmp_path_factory.mktemp("small")
    return {
        name: remove_encoder(whole, folder / name) for name, whole in cascade.items()
    }


@pytest.fixture
def made(tmp_path) -> Path:
    """Where text states are made."""
    folder = tmp_path / "made"
    folder.mkdir()
    return folder


async def store_states(
    storage: Storage, folder: Path, made: Path, *prompts: str
) -> list[str]:
    """Stores what the encoder of a stage's *folder* says of prompts; returns the files' stems."""
    text = text_stage.TextStage(folder, torch.device("cpu"), torch.float32)
    encoder = text_stage.encoder_name(folder)
    stems = []
    for prompt in prompts:
        stems.append(text_states.stem(prompt, encoder))
        content = text_states.content(prompt, encoder, text.encode([prompt])[0])
        path = made / f"{stems[-1]}.safetensors"
        path.write_bytes(content)
        blob = f"{TEXT.folder}/{path.name}"
        assert await storage.files.create(blob, content, "application/octet-stream", {})
    return stems


async def test_stages_without_a_text_encoder_draw_the_images_of_those_with_one(
    storage: Storage,
    run_pipeline,
    make_engine,
    cascade: Folders,
    small_cascade: Folders,
    made: Path,
    tmp_path,
    monkeypatch,
    stored,
):
    # As files have them; random weights would enlarge the rounding from step to step.
    encode = text_stage.TextStage.encode
    monkeypatch.setattr(
        text_stage.TextStage, "encode", lambda *given: encode(*given).half().float()
    )
    fields = {**FEW_STEPS, "prompt": "A red (house)", "negative_prompt": "blurry"}
    fields |= {"steps": 6}
    stems = await store_states(
        storage, cascade["base"], made, "a red (house)", "blurry"
    )
    drawn = {}
    for name, folders in (("whole", cascade), ("small", small_cascade)):
        engines = [make_engine(folder=folder) for folder in folders.values()]
        enlarge = {"model": engines[1].model_name, "denoising_strength": 0.25}
        model = engines[0].model_name
        await storage.models.send(
            [message(**fields, id=name, model=model, then=[enlarge])]
        )
        for engine in engines:
            await run_pipeline(engine)
        drawn[name] = [(await stored(f"{name}{end}"))[0] for end in ("", "~s2")]
    for small, whole in zip(drawn["small"], drawn["whole"], strict=True):
        assert difference(small, whole) == 0
    cache = tmp_path / "cache" / TEXT.folder
    assert {path.stem for path in cache.glob("*.safetensors")} == set(stems)


async def test_a_job_whose_text_states_are_missing_fails_with_the_command_that_makes_them(
    storage: Storage,
    run_pipeline,
    make_engine,
    cascade: Folders,
    small_cascade: Folders,
    made: Path,
):
    await store_states(storage, cascade["base"], made, "a red house", "")
    jobs = {
        "good": {"prompt": "a red house"},
        "lost": {"prompt": "a blue house"},
        "half": {"prompt": "a red house", "negative_prompt": "blurry"},
    }
    await storage.queue.send(
        [message(**FEW_STEPS, **jobs[name], id=name) for name in jobs]
    )
    engine = make_engine("base", folder=small_cascade["base"])
    on_engine = []
    prepare = engine.prepare
    engine.prepare = lambda request: (on_engine.append(request), prepare(request))[1]
    await run_pipeline(engine)
    reasons = {each.id: each.reason for each in await failed_jobs(storage)}
    assert reasons.keys() == {"lost", "half"}
    assert (
        "the text states of the prompt by 'tiny-t5' are not in the storage"
        in reasons["lost"]
    )
    assert "the text states of the negative prompt" in reasons["half"]
    assert all(
        "`imagefleet files make text JOBS --model FOLDER`" in each
        for each in reasons.values()
    )
    assert [str(each.prompt) for each in on_engine] == ["a red house"], (
        "decided before the engine"
    )
    assert await storage.blobs.read("default/good.png") is not None


async def test_with_a_trusted_key_only_listed_text_states_are_used(
    storage: Storage,
    run_pipeline,
    make_engine,
    cascade: Folders,
    small_cascade: Folders,
    made: Path,
    tmp_path,
):
    key = SigningKey.create(tmp_path / "key.pem")
    await store_states(
        storage, cascade["base"], made, "a red house", "a blue house", ""
    )
    listed = {
        stem: hashlib.sha256((made / f"{stem}.safetensors").read_bytes()).hexdigest()
        for stem in (
            text_states.stem(each, tiny_cascade.ENCODER) for each in ("a red house", "")
        )
    }
    content = manifest.encode(TEXT.folder, listed, key)
    name = f"{TEXT.folder}/{manifest.NAME}"
    assert await storage.files.create(name, content, "application/json", {})
    for job_id, prompt in (("good", "a red house"), ("unlisted", "a blue house")):
        job = read_job(message(**FEW_STEPS, prompt=prompt, id=job_id), job_id)
        await storage.queue.send([job.to_message(JobSigner(key, storage.scope))])
    await run_pipeline(
        make_engine(folder=small_cascade["base"]), trusted_key=key.public
    )
    (failed,) = await failed_jobs(storage)
    assert failed.id == "unlisted"
    assert "which is signed, does not list" in failed.reason
    assert await storage.blobs.read("default/good.png") is not None
