"""Jobs of img2img, the second pass and ControlNets on both storages, with a stand-in engine."""

import base64
import hashlib
import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from benchmarks.stand_in import StandInEngine
from header_files import LORA, REFINER, file_of
from imagefleet import errors
from imagefleet.storage.open import Storage
from messages import (
    Drawing,
    failed_jobs,
    failing,
    failures,
    image,
    message,
    records,
)
from messages import file_of as image_file
from stored_images import member, store_pack
from worker.engine import contract
from worker.inputs import pictures


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def in_base64(picture: Image.Image) -> str:
    return base64.b64encode(image_file(picture)).decode()


def disc(width: int, height: int) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(
        np.where((x - 40) ** 2 + (y - 40) ** 2 < 300, 255, 0).astype(np.uint8)
    )


@pytest.fixture
def engine() -> Drawing:
    return Drawing(size=(64, 64))


async def put(
    storage: Storage, name: str, data: bytes, container: str = "files"
) -> None:
    blobs = storage.files if container == "files" else storage.blobs
    assert await blobs.create(name, data, "application/octet-stream", {})


async def test_an_image_may_be_a_file_a_result_or_in_the_message(
    storage: Storage, run_pipeline, engine: Drawing
):
    images = {
        "file": picture(64, 64, 1),
        "result": picture(64, 64, 2),
        "own": picture(64, 64, 3),
    }
    await put(storage, "inputs/cats/a.png", image_file(images["file"]))
    await put(storage, "default/0001.png", image_file(images["result"]), "images")
    sources = {
        "file": "cats/a.png",
        "result": "images/default/0001.png",
        "own": "data:image/png;base64," + in_base64(images["own"]),
    }
    pipeline = await run_pipeline(
        engine,
        sent=(
            message(
                id=name,
                prompt=name,
                init_images=[source],
                batch_size=2,
                denoising_strength=0.4,
            )
            for name, source in sources.items()
        ),
    )
    assert pipeline.metrics.outcomes == {"completed": 3}
    assert len(engine.drawn) == 6
    for request in engine.drawn:
        init = request.init
        assert np.array_equal(init.pixels, np.asarray(images[str(request.prompt)]))
        assert (init.denoising_strength, init.mask) == (0.4, None)
    found = await image(storage, "default/own~1.png")
    assert "Denoising strength: 0.4, RNG: CPU" in found.info["parameters"]


@pytest.mark.parametrize("opened", ["own", "*", "winter, secret"])
async def test_an_image_of_another_campaign_is_read_only_where_a_setting_opens_it(
    storage: Storage,
    run_pipeline,
    engine: Drawing,
    opened: str,
):
    await put(storage, "secret/s.png", image_file(picture(64, 64)), "images")
    await put(storage, "spring/a.png", image_file(picture(64, 64)), "images")
    named = "images/secret/s.png"
    own = {"init_images": ["images/spring/a.png"], "denoising_strength": 0.05}
    jobs = {
        "picture": {"init_images": [named], "denoising_strength": 0.05},
        "mask": own | {"mask": named},
        "enlarged": {
            "upscaler_1": "Lanczos",
            "upscaling_resize": 2,
            "init_images": [named],
        },
    }
    await storage.queue.send(
        message(id=name, campaign="spring", **fields) for name, fields in jobs.items()
    )
    await run_pipeline(
        engine,
        input_campaigns=opened,
        sent=[message(id="own", campaign="spring", **own)],
    )
    found = await failures(storage)
    assert len(engine.drawn) == (1 if opened == "own" else 4)
    assert found.keys() == (jobs.keys() if opened == "own" else set())
    for failed in found.values():
        assert (
            "is an image of the campaign 'secret', and the job is of 'spring'"
            in failed.reason
        )
        assert "--input-campaigns secret" in failed.reason


async def test_an_image_has_whole_cells_of_the_size_that_is_asked_for(
    storage: Storage, run_pipeline, engine: Drawing
):
    """Also one with a mask, whose borders outside of them are left out."""
    source = picture(200, 120)
    mask = disc(200, 120)
    await put(storage, "inputs/a.png", image_file(source))
    await put(storage, "inputs/mask.png", image_file(mask))
    masked = {"init_images": ["a.png"], "mask": "mask.png", "inpaint_full_res": False}
    size = {"width": 79, "height": 69}
    await run_pipeline(
        engine, sent=[message(id="j", **size), message(id="k", **size, **masked)]
    )
    assert {(each.width, each.height) for each in engine.drawn} == {(79, 69)}
    for name in "jk":
        found = await image(storage, f"default/{name}.png")
        assert found.size == (72, 64)
        assert "Size: 79x69" in found.info["parameters"], "as there"
    sizes = {(each.width, each.height) for each in await records(storage)}
    assert sizes == {(72, 64)}
    corner = np.asarray(pictures.resize(0, source, (79, 69)))[:4, :4]
    assert np.array_equal(np.asarray(found)[:4, :4], corner), "which is not masked"


async def test_a_second_pass_gets_its_size_and_its_upscaler(
    storage: Storage,
    run_pipeline,
    engine: Drawing,
    lora_bytes: Callable[[str], bytes],
):
    await put(storage, "upscalers/4x_Sharp.safetensors", lora_bytes("weights"))
    hires = {
        "enable_hr": True,
        "hr_upscaler": "4x_Sharp",
        "hr_second_pass_steps": 9,
        "hr_sampler_name": "DPM++ 2M Karras",
        "hr_prompt": "a larger house:1.5",
        "denoising_strength": 0.6,
    }
    plain_fields = {"enable_hr": True, "eta_ancestral": 0.5, "sampler_name": "DDIM"}
    await run_pipeline(
        engine,
        sent=[
            message(id="j", **hires),
            message(id="k", **plain_fields, hr_sampler_name="Euler a"),
        ],
    )
    passes = {request.hires for request in engine.drawn}
    (found,) = (each for each in passes if each and each.upscaler_path)
    (plain,) = (each for each in passes if each and not each.upscaler_path)
    assert found.upscaler_path.read_bytes() == lora_bytes("weights")
    assert (found.width, found.height, found.steps) == (128, 128, 9)
    assert (found.sampler, found.prompt.weights) == ("dpmpp_2m_karras", (1.5,))
    assert str(found.prompt) == "a larger house"
    assert (plain.upscaler, plain.steps, plain.prompt) == ("Latent", 20, None)
    assert (plain.sampler, plain.sampler_options.eta) == ("euler_ancestral", 0.5)
    assert {request.sampler_options.eta for request in engine.drawn} == {None}
    drawn = await image(storage, "default/j.png")
    assert drawn.size == (128, 128)
    assert (
        "Size: 64x64, Model: stand-in, Denoising strength: 0.6, RNG: CPU, Hires sampler: DPM++ 2M,"
        ' Hires prompt: "a larger house:1.5", Hires schedule type: Karras, Hires upscale: 2,'
        " Hires steps: 9, Hires upscaler: 4x_Sharp, Version"
    ) in drawn.info["parameters"]


async def test_a_vae_is_found_by_its_name_and_written_into_the_image(
    storage: Storage,
    run_pipeline,
    engine: Drawing,
    lora_bytes: Callable[[str], bytes],
):
    data = lora_bytes("weights")
    await put(storage, "vaes/sharp.safetensors", data)
    settings = {"sd_vae": "sharp.safetensors"}
    jobs = [
        {"override_settings": {**settings, "tiling": True}},
        {"sd_vae": "Automatic", "tiling": None},
        {"sd_vae": "sharpe"},
    ]
    await run_pipeline(
        engine, sent=(message(id=f"j{at}", **each) for at, each in enumerate(jobs))
    )
    named = {
        request.vae and (request.vae.name, request.vae.path) for request in engine.drawn
    }
    (found,) = (each for each in named if each)
    assert named == {found, None}
    assert found[0] == "sharp"
    assert found[1].read_bytes() == data
    sha256 = hashlib.sha256(data).hexdigest()
    text = (await image(storage, "default/j0.png")).info["parameters"]
    assert f", VAE hash: {sha256[:10]}, VAE: sharp.safetensors, " in text
    assert ", RNG: CPU, Tiling: True, " in text
    assert {request.tiling for request in engine.drawn} == {True, False}
    plain = (await image(storage, "default/j1.png")).info["parameters"]
    assert "VAE" not in plain
    assert "Tiling" not in plain
    assert (
        "no VAE sharpe.safetensors in vaes/" in (await failures(storage))["j2"].reason
    )


async def test_other_checkpoints_are_fetched_by_name_once_and_the_engines_own_is_its_own(
    storage: Storage, run_pipeline, engine: Drawing
):
    files = {
        "late": file_of(data=b"late"),
        "xl": file_of(*REFINER),
        "lora": file_of(*LORA),
    }
    for name, data in files.items():
        await put(storage, f"models/{name}.safetensors", data)
    second = {"enable_hr": True, "width": 64, "height": 64}
    jobs = [
        {
            "refiner_checkpoint": "late.safetensors [0123456789]",
            "refiner_switch_at": 0.7,
        },
        {"hr_checkpoint_name": "late", **second},
        {"hr_checkpoint_name": "late", "refiner_checkpoint": "stand-in", **second},
        {
            "refiner_checkpoint": "None",
            "hr_checkpoint_name": "Use same checkpoint",
            **second,
        },
        {"refiner_checkpoint": "later"},
        {"refiner_checkpoint": "lora"},
        {"refiner_checkpoint": "xl"},
    ]
    await run_pipeline(
        engine, sent=(message(id=f"j{at}", **each) for at, each in enumerate(jobs))
    )
    found = [
        (request.hires and request.hires.checkpoint, request.refiner)
        for request in engine.drawn
    ]
    (path,) = {hires for hires, _ in found if hires}
    assert path.read_bytes() == file_of(data=b"late")
    expected = [
        (None, contract.Refiner(path, 0.7)),
        (path, None),
        (path, contract.Refiner(None)),
        (None, None),
    ]
    (refiner,) = (
        each for _, each in found if each and each.path and each.path.stem == "xl"
    )
    assert refiner.path.read_bytes() == files["xl"]
    expected.append((None, refiner))
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    text = (await image(storage, "default/j0.png")).info["parameters"]
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert f", Refiner: late [{sha256[:10]}], Refiner switch at: 0.7, " in text
    failed = await failures(storage)
    assert failed.keys() == {"j4", "j5"}
    assert "the checkpoint 'later': there is no models/later.saf" in failed["j4"].reason
    assert "is a LoRA" in failed["j5"].reason


async def test_a_controlnet_gets_its_map_in_the_jobs_size(
    storage: Storage,
    run_pipeline,
    engine: Drawing,
    lora_bytes: Callable[[str], bytes],
):
    await put(storage, "controlnets/canny.safetensors", lora_bytes("weights"))
    await put(storage, "inputs/map.png", image_file(picture(64, 64, 7)))
    unit = {
        "image": "map.png",
        "model": "canny [0123abcd]",
        "weight": 0.5,
        "guidance_end": 0.8,
    }
    scripts = {"ControlNet": {"args": [unit, {"enabled": False}]}}
    await run_pipeline(engine, sent=[message(id="j", alwayson_scripts=scripts)])
    ((control,),) = (request.controls for request in engine.drawn)
    assert (control.name, control.weight, control.start, control.end) == (
        "canny",
        0.5,
        0.0,
        0.8,
    )
    assert control.path.read_bytes() == lora_bytes("weights")
    assert np.array_equal(control.pixels, np.asarray(picture(64, 64, 7)))
    text = (await image(storage, "default/j.png")).info["parameters"]
    assert (
        'RNG: CPU, ControlNet 0: "Module: none, Model: canny, Weight: 0.5, Resize Mode: Crop and'
        " Resize, Processor Res: 512, Threshold A: 0.5, Threshold B: 0.5, Guidance Start: 0.0,"
        ' Guidance End: 0.8, Pixel Perfect: False, Control Mode: Balanced", Version'
    ) in text


async def test_what_is_wrong_with_an_input_is_the_jobs_fault_and_says_which(
    storage: Storage,
    run_pipeline,
    engine: Drawing,
    monkeypatch,
):
    monkeypatch.setattr("worker.inputs.reader.MAX_IMAGE_BYTES", 50_000)
    await put(storage, "inputs/truncated.png", image_file(picture(64, 64))[:2000])
    await put(storage, "inputs/huge.png", image_file(picture(200, 200)))
    unit = {"image": in_base64(picture(64, 64)), "model": "nowhere"}
    jobs = {
        "missing": (
            {"init_images": ["nowhere/a.png"]},
            "init_images: there is no 'inputs/nowhere/a.png' in the container",
        ),
        "missing-result": (
            {"init_images": ["images/default/a.png"]},
            f"init_images: there is no 'default/a.png' in the container {storage.blobs.name!r}",
        ),
        "missing-mask": (
            {"init_images": [in_base64(picture(64, 64))], "mask": "m.png"},
            "mask: there is no 'inputs/m.png'",
        ),
        "truncated": (
            {"init_images": ["truncated.png"]},
            "init_images: the image is a damaged",
        ),
        "huge": (
            {"init_images": ["huge.png"]},
            "init_images: inputs/huge.png is too large",
        ),
        "no-upscaler": (
            {"enable_hr": True, "hr_upscaler": "4x"},
            "no upscaler 4x.safetensors in upscalers/ of the container",
        ),
        "no-controlnet": (
            {"alwayson_scripts": {"controlnet": {"args": [unit]}}},
            "no ControlNet nowhere.safetensors in controlnets/ of the container",
        ),
    }
    await run_pipeline(
        engine, sent=(message(id=name, **fields) for name, (fields, _) in jobs.items())
    )
    found = await failures(storage)
    assert found.keys() == jobs.keys()
    assert engine.drawn == []
    for name, (_, reason) in jobs.items():
        assert reason in found[name].reason
        assert found[name].attempts == 1


async def test_a_size_that_only_the_checkpoint_tells_is_checked_by_the_worker(
    storage: Storage, run_pipeline
):
    await run_pipeline(
        StandInEngine(size=(512, 512)),
        sent=[message(id="j", enable_hr=True, hr_scale=8)],
    )
    reason = (await failures(storage))["j"].reason
    assert reason.startswith(
        "hr_scale: the image would have 4096x4096 pixels; 64 to 2048"
    )


@pytest.mark.parametrize(
    ("error", "outcomes"),
    [
        (errors.TransientError("no answer"), {"retried": 1, "completed": 2}),
        (errors.SetupError("not allowed"), {"failed": 1, "completed": 1}),
    ],
)
async def test_a_storage_that_does_not_answer_is_no_fault_of_the_job_and_one_that_refuses_is(
    storage: Storage,
    run_pipeline,
    monkeypatch,
    error: errors.FleetError,
    outcomes: dict[str, int],
):
    monkeypatch.setattr("worker.settle.FIRST_RETRY_SECONDS", 0.05)
    await put(storage, "default/a.png", image_file(picture(64, 64)), "images")
    faulty = failing(storage.blobs.read, error, 1)
    monkeypatch.setattr(storage.blobs, "read", faulty)
    jobs = [message(id="j", init_images=["images/default/a.png"]), message(id="good")]
    pipeline = await run_pipeline(StandInEngine(size=(64, 64)), sent=jobs)
    assert pipeline.metrics.outcomes == outcomes
    for failed in await failed_jobs(storage):
        assert "cannot be read with this worker's credentials" in failed.reason


async def test_an_image_in_a_pack_is_an_input_as_any_other(
    storage: Storage, run_pipeline
):
    held = [member("a"), member("b")]
    await store_pack(storage, held)
    sources = {"b": "images/spring/b.png", "none": "images/spring/c.png"}
    engine = Drawing(size=(32, 32))
    await run_pipeline(
        engine,
        sent=(
            message(
                id=name, campaign="spring", init_images=[source], denoising_strength=0.4
            )
            for name, source in sources.items()
        ),
    )

    (request,) = engine.drawn
    expected = Image.open(io.BytesIO(held[1].data))
    assert np.array_equal(request.init.pixels, np.asarray(expected))
    (failed,) = (await failures(storage)).values()
    assert "there is no 'spring/c.png'" in failed.reason
