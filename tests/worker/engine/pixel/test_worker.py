"""Jobs drawn by a worker's whole pipeline with a tiny stage, on both storages."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from imagefleet.storage.protocol import Storage
from pixel import tiny_cascade
from worker.engine import contract


async def test_a_worker_draws_jobs_with_a_base_stage(
    storage: Storage,
    run_pipeline: Any,
    message: Any,
    make_engine: Any,
    request_of: Any,
    draw: Any,
    difference: Any,
) -> None:
    fields: dict[str, Any] = {"prompt": "A red house", "negative_prompt": "blurry", "seed": 1}
    fields |= {"steps": 8, "cfg_scale": 7}
    for name, sampler in (("one", "DDPM"), ("two", "Fast27"), ("three", "k_euler_a")):
        await storage.queue.send([message(**fields, id=name, sampler_name=sampler)])
    await storage.queue.send([message(**fields, id="bad", sampler_name="DDIM")])
    await run_pipeline(make_engine())
    expected = draw(
        make_engine(),
        *(request_of(sampler=each) for each in ("ddpm", "fast27", "euler_ancestral")),
    )
    for name, image in zip(("one", "two", "three"), expected, strict=True):
        data = await storage.blobs.read(f"default/{name}.png", max_bytes=2**20)
        assert data is not None
        with Image.open(BytesIO(data)) as read:
            assert difference(np.asarray(read.convert("RGB")), image) <= 2
            assert "Sampler: " in read.info["parameters"]
    assert await storage.blobs.read("default/bad.png", max_bytes=2**20) is None


async def test_the_second_stage_enlarges_the_stored_image_of_the_first(
    storage: Storage,
    run_pipeline: Any,
    message: Any,
    make_engine: Any,
    request_of: Any,
    draw: Any,
    difference: Any,
) -> None:
    base, upscaler = make_engine(), make_engine("sr")
    fields: dict[str, Any] = {"prompt": "A red house", "negative_prompt": "blurry", "seed": 1}
    fields |= {"steps": 6, "cfg_scale": 7, "sampler_name": "DDPM"}
    enlarge = {"model": upscaler.model_name, "denoising_strength": 0.25}
    job = message(**fields, id="one", model=base.model_name, then=[enlarge])
    await storage.models.send([job])
    for engine in (base, upscaler):
        await run_pipeline(engine)
    names = ("default/one.png", "default/one~2.png")
    small, large = [await read(storage, name) for name in names]
    assert small.shape[:2] == (tiny_cascade.BASE_SIDE, tiny_cascade.BASE_SIDE)
    init = contract.InitImage(small, 0.25)
    request = request_of("sr", init=init, steps=6, sampler="ddpm", cfg_scale=7.0)
    (expected,) = draw(make_engine("sr"), request)
    assert difference(large, expected) <= 2


async def read(storage: Storage, name: str) -> contract.Pixels:
    data = await storage.blobs.read(name, max_bytes=2**20)
    assert data is not None
    with Image.open(BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))
