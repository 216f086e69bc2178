"""Jobs of img2img, inpainting and the second pass, drawn by the engine with a tiny checkpoint."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import tiny_model
from imagefleet.storage.open import Storage
from messages import RunPipeline
from worker.engine.load import EngineSettings, load_engine
from worker.inputs import img2img


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "storage_settings",
    ["local", pytest.param("azurite", marks=pytest.mark.slow)],
    indirect=True,
)
async def test_jobs_of_all_passes_are_drawn_beside_each_other(
    storage: Storage, run_pipeline: RunPipeline, model: Path
) -> None:
    image = np.random.default_rng(0).integers(0, 256, (96, 128, 3), np.uint8)
    mask = np.zeros((96, 128), np.uint8)
    mask[20:60, 30:90] = 255
    for name, pixels in (("a.png", image), ("m.png", mask)):
        await storage.files.create(f"inputs/{name}", png(pixels), "image/png", {})
    base = {"prompt": "a house", "steps": 4, "width": 64, "height": 64, "seed": 5}
    given = {**base, "init_images": ["a.png"]}
    hires = {**base, "enable_hr": True, "hr_scale": 1.5, "hr_second_pass_steps": 2}
    jobs = {
        "plain": base,
        "again": given,
        "little": {**given, "denoising_strength": 0.1},
        "cut": {**given, "mask": "m.png", "inpaint_full_res_padding": 4},
        "whole": {
            **given,
            "mask": "m.png",
            "inpaint_full_res": False,
            "inpainting_fill": 2,
        },
        "latent": hires,
        "lanczos": {
            **hires,
            "hr_upscaler": "Lanczos",
            "hr_resize_x": 128,
            "hr_resize_y": 64,
        },
    }
    await storage.queue.send(
        json.dumps({**fields, "id": name}) for name, fields in jobs.items()
    )
    pipeline = await run_pipeline(
        load=lambda: load_engine(EngineSettings(model, "cpu", slots=4))
    )
    assert dict(pipeline.metrics.outcomes) == {"completed": len(jobs)}
    found = {}
    for name in jobs:
        data = await storage.blobs.read(f"default/{name}.png")
        found[name] = np.asarray(Image.open(io.BytesIO(data or b""))).astype(int)
    sizes = {name: pixels.shape[1::-1] for name, pixels in found.items()}
    assert sizes == {
        **dict.fromkeys(("plain", "again", "little", "whole"), (64, 64)),
        "cut": (128, 96),
        "latent": (96, 96),
        "lanczos": (128, 64),
    }
    resized = np.asarray(
        Image.fromarray(image).resize((64, 64), Image.Resampling.LANCZOS)
    )
    kept = img2img.blur_mask(mask, 4, 4) == 0
    assert np.array_equal(found["cut"][kept], image[kept])
    assert not np.array_equal(found["cut"][~kept], image[~kept])
    small = np.asarray(
        Image.fromarray(img2img.blur_mask(mask, 4, 4)).resize(
            (64, 64), Image.Resampling.LANCZOS
        )
    )
    assert np.array_equal(found["whole"][small == 0], resized[small == 0])
    assert len({pixels.tobytes() for pixels in found.values()}) == len(jobs)
