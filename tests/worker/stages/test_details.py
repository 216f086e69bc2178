"""ADetailer: what a detector finds in a picture is drawn again, beside the jobs of others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_model
from benchmarks.stand_in import draw_noise
from imagefleet.job.passes.fields import Pass
from imagefleet.storage.open import Storage
from imagefleet.validation import JSONDict
from messages import Drawing, blobs, failed_jobs, image, message
from tiny_detectors import write_detector
from worker.engine import load
from worker.node.watchdog import NodeWatchdog

SIZE = (128, 128)

#: In the picture twice as large as in what the detector sees.
FACES = [(20, 20, 16, 16, 0.9), (48, 40, 10, 10, 0.6)]


def adetailer(*units: JSONDict) -> JSONDict:
    return {"alwayson_scripts": {"ADetailer": {"args": [True, False, *units]}}}


async def store(storage: Storage, tmp_path: Path, found: list[Any] = FACES) -> None:
    data = write_detector(tmp_path / "face.onnx", found).read_bytes()
    kind = "application/octet-stream"
    await storage.files.create("detectors/face_yolov8n.onnx", data, kind, {})


async def pixels(storage: Storage, blob: str) -> np.ndarray[Any, Any]:
    return np.asarray(await image(storage, blob)).astype(int)


async def test_each_part_is_an_inpainting_of_the_picture_so_far(
    storage: Storage, run_pipeline, tmp_path, monkeypatch
):
    await store(storage, tmp_path)
    counted = []
    monkeypatch.setattr(
        NodeWatchdog, "image_generated", lambda _, __, passes: counted.extend(passes)
    )
    unit = {"ad_model": "face_yolov8n.pt", "ad_prompt": "a face:1.0"}
    detailed = message(id="d", seed=5, steps=9, **adetailer(unit))
    others = [message(id=f"o{seed}", seed=seed) for seed in range(100, 110)]
    engine = Drawing(size=SIZE, capacity=3)
    await run_pipeline(engine, sent=[*others[:5], detailed, *others[5:]])

    plain, *parts = (each for each in engine.drawn if each.seed < 100)
    assert [each.seed for each in parts] == [5, 6]
    assert plain.init is None
    for part in parts:
        assert (part.prompt.text, part.steps, part.hires) == ("a face", 9, None)
        assert part.init.denoising_strength == 0.4
        assert part.init.masked_content == "original"
        assert (part.width, part.height) == SIZE
        assert part.init.mask is not None
    drawn = await pixels(storage, "default/d.png")
    changed = (drawn != draw_noise(plain).astype(int)).any(axis=2)
    rows, columns = np.nonzero(changed)
    # The boxes with what dilation and blur add, and nothing of the rest.
    assert 8 <= columns.min() < 24
    assert changed[70:90, 86:106].mean() > 0.9
    assert not changed[104:].any()
    assert not changed[:, :8].any()
    text = (await image(storage, "default/d.png")).info["parameters"]
    assert (
        'ADetailer model: face_yolov8n.pt, ADetailer prompt: "a face:1.0", ADetailer'
        " confidence: 0.3, ADetailer dilate erode: 4, ADetailer mask blur: 4, ADetailer"
        " denoising strength: 0.4, ADetailer inpaint only masked: True, ADetailer inpaint"
        " padding: 32, "
    ) in text
    for seed in range(100, 110):
        own = replace(plain, seed=seed, steps=20)
        other = await pixels(storage, f"default/o{seed}.png")
        assert np.array_equal(other, draw_noise(own))
    assert rows.size > 0
    # Or a worker that draws parts would count as slow.
    assert counted.count(Pass(*SIZE, 4, encodes=True)) == 2
    assert len(counted) == 1 + 2 + 10


async def test_a_picture_in_which_nothing_is_found_stays_as_it_is(
    storage: Storage, run_pipeline, tmp_path
):
    await store(storage, tmp_path, [(20, 20, 16, 16, 0.1)])
    unit = {"ad_model": "face_yolov8n.pt"}
    engine = Drawing(size=SIZE)
    await run_pipeline(
        engine, sent=[message(id="d", seed=5, n_iter=2, **adetailer(unit))]
    )
    assert [each.seed for each in engine.drawn] == [5, 6]
    drawn = await pixels(storage, "default/d.png")
    assert np.array_equal(drawn, draw_noise(engine.drawn[0]))


async def test_parts_have_no_estimates_of_their_own(
    storage: Storage, run_pipeline, tmp_path
):
    await store(storage, tmp_path)
    unit = {"ad_model": "face_yolov8n.pt"}
    body = message(id="d", seed=5, keep="early.contrast=0", **adetailer(unit))
    engine = Drawing(size=SIZE)
    await run_pipeline(engine, sent=[body])
    assert [each.seed for each in engine.drawn] == [5, 5, 5, 6]
    assert await blobs(storage) == ["default/d.png"]


async def test_a_job_whose_detector_is_missing_fails_and_says_so(
    storage: Storage, run_pipeline
):
    await storage.create()
    unit = {"ad_model": "hand_yolov8n.pt"}
    engine = Drawing()
    await run_pipeline(engine, sent=[message(id="d", **adetailer(unit))])
    assert engine.drawn == [], "nothing is drawn in vain"
    (failed,) = await failed_jobs(storage)
    assert "no detector hand_yolov8n.onnx in detectors/" in str(failed.reason)


@pytest.mark.slow
async def test_parts_are_drawn_by_a_real_engine_beside_other_jobs(
    storage: Storage, run_pipeline, tmp_path
):
    """In company the part is what it is alone, and all around it the picture's own."""
    await store(storage, tmp_path)
    checkpoint = tiny_model.build_half_checkpoint(tmp_path / "tiny")

    async def drawn(*bodies: str) -> dict[str, np.ndarray[Any, Any]]:
        settings = load.EngineSettings(checkpoint, "cpu", slots=3)
        await run_pipeline(load.load_engine(settings), sent=bodies)
        names = [name for name in await blobs(storage) if name.startswith("default/")]
        return {name: await pixels(storage, name) for name in names}

    size = {"steps": 4, "width": 128, "height": 128, "seed": 5}
    unit = adetailer({"ad_model": "face_yolov8n"})
    found = await drawn(
        message(id="alone", **size, **unit), message(id="plain", **size)
    )
    others = [message(id=f"o{at}", **{**size, "seed": at}) for at in range(6)]
    found = await drawn(*others[:3], message(id="beside", **size, **unit), *others[3:])
    alone, beside, plain = (
        found[f"default/{name}.png"] for name in ("alone", "beside", "plain")
    )
    assert np.abs(alone - beside).max() <= 2
    changed = (alone != plain).any(axis=2)
    assert changed[30:50, 30:50].mean() > 0.5
    assert not changed[104:].any()
