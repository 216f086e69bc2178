"""Jobs that only enlarge an image, alone and as a stage, on both storages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import tiny_model
from benchmarks.stand_in import StandInEngine
from imagefleet.files.picture import message_in, parameters
from imagefleet.storage.open import Storage
from messages import (
    Drawing,
    failures,
    file_of,
    image,
    records,
)
from tests.worker.engine.support import esrgan
from worker.engine import contract
from worker.engine.load import EngineSettings, load_engine

#: The networks are the same on both storages, whose contract has its own tests.
pytestmark = pytest.mark.parametrize(
    "storage_settings",
    ["local", pytest.param("azurite", marks=pytest.mark.slow)],
    indirect=True,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model.build_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> tuple[Path, Any]:
    return esrgan.build(tmp_path_factory.mktemp("upscalers") / "4x_Tiny.safetensors")


@pytest.fixture(autouse=True)
def _soon(monkeypatch) -> None:
    monkeypatch.setattr("worker.settle.FIRST_RETRY_SECONDS", 0.05)
    monkeypatch.setattr("worker.stages.record.FLUSH_SECONDS", 0.05)
    monkeypatch.setattr("worker.stages.record.LOCAL_FLUSH_SECONDS", 0.05)
    monkeypatch.setattr("worker.stages.prepare.HAND_BACK_SECONDS_UNTIL_EMPTY", 0.1)


@pytest.fixture(autouse=True)
async def upscaler(storage: Storage, network: tuple[Path, Any]) -> None:
    data = network[0].read_bytes()
    await storage.files.create(
        "upscalers/4x_Tiny.safetensors", data, "application/x", {}
    )


def picture(width: int = 64, height: int = 48) -> contract.Pixels:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


async def put(storage: Storage, name: str, data: bytes) -> None:
    assert await storage.files.create(f"inputs/{name}", data, "image/png", {})


def loads(model: Path) -> Callable[[], contract.Engine]:
    return lambda: load_engine(EngineSettings(model, "cpu", slots=2))


def upscaled(**fields: Any) -> str:
    given = {
        "init_images": ["a.png"],
        "upscaler_1": "4x_Tiny",
        "upscaling_resize": 4,
        **fields,
    }
    return json.dumps(given)


async def test_a_chain_ends_with_what_the_network_makes_of_its_image(
    storage: Storage, run_pipeline, model: Path, network: tuple[Path, Any]
):
    first = {
        "id": "a",
        "prompt": "a house",
        "steps": 4,
        "width": 64,
        "height": 64,
        "seed": 5,
    }
    enlarge = {"upscaler_1": "4x_Tiny", "upscaling_resize": 4}
    resize = {"upscaler_1": "Lanczos", "resize_mode": 1, "upscaling_resize_w": 128}
    then = [enlarge, {**resize, "upscaling_resize_h": 64}]
    pipeline = await run_pipeline(
        sent=[json.dumps({**first, "then": then})], load=loads(model)
    )
    assert pipeline.metrics.outcomes == {"completed": 3}
    drawn, enlarged, cut = [
        await image(storage, f"default/{name}.png") for name in ("a", "a~s2", "a~s3")
    ]
    expected = esrgan.enlarge(network[1], np.asarray(drawn))
    assert np.array_equal(np.asarray(enlarged), expected)
    assert (enlarged.size, cut.size) == ((256, 256), (128, 64))
    smaller = Image.fromarray(expected).resize((128, 128), Image.Resampling.LANCZOS)
    assert np.array_equal(np.asarray(cut), np.asarray(smaller)[32:96])
    assert enlarged.info["parameters"] == (
        drawn.info["parameters"]
        + ", Postprocess upscale by: 4, Postprocess upscaler: 4x_Tiny"
    )
    assert cut.info["parameters"].endswith(
        ", Postprocess upscaler: 4x_Tiny, Postprocess upscale to: 128x64, Postprocess crop to:"
        " 128x64, Postprocess upscaler: Lanczos"
    )
    found = sorted(await records(storage), key=lambda each: each.stage)
    assert [(each.width, each.height) for each in found] == [
        (64, 64),
        (256, 256),
        (128, 64),
    ]
    assert [each.completes_job for each in found] == [False, False, True]
    assert {(each.steps, each.seed, each.prompt) for each in found} == {
        (4, 5, "a house")
    }


async def test_a_first_job_enlarges_a_file_of_the_storage_and_keeps_its_text(
    storage: Storage, run_pipeline
):
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9286] = b"UNICODE\0" + "a hut\nSteps: 9".encode("utf-16-be")
    await put(storage, "a.png", file_of(picture()))
    await put(storage, "b.webp", file_of(picture(), "WEBP", lossless=True, exif=exif))
    jpeg = {"output": {"format": "jpeg"}}
    jobs = [upscaled(id="a"), upscaled(id="b", init_images=["b.webp"], **jpeg)]
    engine = StandInEngine(size=(64, 64))
    pipeline = await run_pipeline(engine, sent=jobs)
    assert pipeline.metrics.outcomes == {"completed": 2}
    plain = await image(storage, "default/a.png")
    kept = await image(storage, "default/b.jpg")
    assert plain.size == kept.size == (256, 192)
    facts = "Postprocess upscale by: 4, Postprocess upscaler: 4x_Tiny"
    assert plain.info["parameters"] == facts
    assert parameters(kept, 1000) == f"a hut\nSteps: 9, {facts}"
    data = await storage.blobs.read("default/a.png")
    assert json.loads(message_in(data))["upscaler_1"] == "4x_Tiny"
    for record in await records(storage):
        assert (record.width, record.height, record.steps, record.sampler) == (
            256,
            192,
            None,
            None,
        )


async def test_a_prompt_of_a_stage_that_enlarges_needs_none_of_its_files(
    storage: Storage, run_pipeline
):
    engine = Drawing(size=(64, 64))
    await put(storage, "a.png", file_of(picture()))
    pipeline = await run_pipeline(
        engine, sent=[upscaled(id="a", prompt="a <lora:nowhere:1>")]
    )
    assert pipeline.metrics.outcomes == {"completed": 1}
    (request,) = engine.drawn
    assert (request.width, request.height, request.loras) == (64, 48, ())
    assert request.upscale.whole == (256, 192)
    ((name, path),) = request.upscale.upscalers
    assert (name, path and path.name) == ("4x_Tiny", "4x_Tiny.safetensors")
    assert np.array_equal(request.init.pixels, picture())


async def test_what_cannot_be_enlarged_is_the_jobs_fault_and_says_why(
    storage: Storage, run_pipeline
):
    await put(storage, "a.png", file_of(picture()))
    await put(storage, "large.png", file_of(np.resize(picture(16, 1), (1200, 1200, 3))))
    await put(storage, "grey.png", file_of(np.full((64, 64, 3), 7, np.uint8)))
    jobs = {
        "missing": ({"init_images": ["no.png"]}, "there is no 'inputs/no.png'"),
        "large": (
            {"init_images": ["large.png"]},
            "upscaling_resize: the image would have 4800x4800 pixels; at least 64 a side and 4,194",
        ),
        "grey": (
            {"init_images": ["grey.png"]},
            "init_images: the image is all one colour",
        ),
        "nameless": ({"upscaler_1": "8x"}, "no upscaler 8x.safetensors in upscalers/"),
        "second": (
            {"upscaler_2": "8x", "extras_upscaler_2_visibility": 0.1},
            "no upscaler 8x.safetensors in upscalers/",
        ),
        "drawn": (
            {"denoising_strength": 0.3},
            "denoising_strength: a job with upscaler_1 only",
        ),
    }
    pipeline = await run_pipeline(
        StandInEngine(size=(64, 64)),
        sent=(upscaled(id=name, **fields) for name, (fields, _) in jobs.items()),
    )
    assert pipeline.metrics.outcomes == {"failed": len(jobs)}
    found = await failures(storage)
    assert {
        name: reason in found[name].reason for name, (_, reason) in jobs.items()
    } == dict.fromkeys(jobs, True)


async def test_one_colour_after_a_cut_is_the_jobs_fault_and_not_the_nodes(
    storage: Storage, run_pipeline, model: Path
):
    pixels = np.full((64, 256, 3), 7, np.uint8)
    pixels[0, 0] = 200
    await put(storage, "a.png", file_of(pixels))
    cut = {"resize_mode": 1, "upscaling_resize_w": 64, "upscaling_resize_h": 64}
    pipeline = await run_pipeline(
        sent=[upscaled(id="a", upscaler_1="Lanczos", **cut)], load=loads(model)
    )
    assert pipeline.metrics.outcomes == {"failed": 1}
    assert (await failures(storage))[
        "a"
    ].reason == "what is left of the image is all one colour"
