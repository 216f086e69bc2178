"""Jobs of img2img, inpainting and the second pass, drawn by the engine with a tiny checkpoint."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tiny_model
from imagefleet.storage.open import Storage
from messages import file_of, image, message
from worker.engine.load import EngineSettings, load_engine
from worker.inputs import img2img


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model.build_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize(
    "storage_settings",
    ["local", pytest.param("azurite", marks=pytest.mark.slow)],
    indirect=True,
)
async def test_jobs_of_all_passes_are_drawn_beside_each_other(
    storage: Storage, run_pipeline, model: Path
):
    source = np.random.default_rng(0).integers(0, 256, (96, 128, 3), np.uint8)
    mask = np.zeros((96, 128), np.uint8)
    mask[20:60, 30:90] = 255
    for name, pixels in (("a.png", source), ("m.png", mask)):
        await storage.files.create(f"inputs/{name}", file_of(pixels), "image/png", {})
    base = {"steps": 4, "width": 64, "height": 64, "seed": 5}
    given = {**base, "init_images": ["a.png"]}
    hires = {**base, "enable_hr": True, "hr_scale": 1.5, "hr_second_pass_steps": 2}
    jobs = {
        "plain": base,
        "again": given,
        "cut": {**given, "mask": "m.png", "inpaint_full_res_padding": 4},
        "whole": {
            **given,
            "mask": "m.png",
            "inpaint_full_res": False,
            "inpainting_fill": 2,
        },
        "latent": hires,
    }
    pipeline = await run_pipeline(
        sent=(message(**fields, id=name) for name, fields in jobs.items()),
        load=lambda: load_engine(EngineSettings(model, "cpu", slots=4)),
    )
    assert pipeline.metrics.outcomes == {"completed": len(jobs)}
    found = {}
    for name in jobs:
        drawn = await image(storage, f"default/{name}.png")
        found[name] = np.asarray(drawn).astype(int)
    sizes = {name: pixels.shape[1::-1] for name, pixels in found.items()}
    assert sizes == {
        **dict.fromkeys(("plain", "again", "whole"), (64, 64)),
        "cut": (128, 96),
        "latent": (96, 96),
    }
    resized = np.asarray(
        Image.fromarray(source).resize((64, 64), Image.Resampling.LANCZOS)
    )
    kept = img2img.blur_mask(mask, 4, 4) == 0
    assert np.array_equal(found["cut"][kept], source[kept])
    assert not np.array_equal(found["cut"][~kept], source[~kept])
    small = np.asarray(
        Image.fromarray(img2img.blur_mask(mask, 4, 4)).resize(
            (64, 64), Image.Resampling.LANCZOS
        )
    )
    assert np.array_equal(found["whole"][small == 0], resized[small == 0])
    assert len({pixels.tobytes() for pixels in found.values()}) == len(jobs)
