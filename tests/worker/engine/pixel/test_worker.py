"""Jobs drawn by a worker's whole pipeline with a tiny stage, on both storages."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from imagefleet.storage.protocol import Storage


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
