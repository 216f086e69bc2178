"""Jobs drawn by a worker's whole pipeline with a tiny klein."""

from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

import imagefleet
from imagefleet.pricing import families
from imagefleet.storage.open import Storage
from messages import failed_jobs, message
from worker.engine import load
from worker.engine.device import Precision
from worker.engine.slots import memory
from worker.files import check

pytestmark = pytest.mark.slow


async def parameters(storage: Storage, name: str) -> str:
    data = await storage.blobs.read(f"default/{name}.png", max_bytes=2**20)
    with Image.open(BytesIO(data)) as image:
        return str(image.info["parameters"])


async def test_a_job_without_settings_is_drawn_and_told_as_klein_wants_it(
    storage: Storage, run_pipeline, make_engine
):
    jobs = {
        "usual": {"prompt": "a (red:1.3) house", "negative_prompt": "blurry"},
        "said": {"prompt": "a house", "steps": 6, "sampler_name": "Euler"},
        "other": {"prompt": "a house", "sampler_name": "DPM++ 2M"},
        "guided": {"prompt": "a house", "cfg_scale": 5},
        "joined": {"prompt": "a house AND a tree"},
    }
    fields = {"seed": 1, "width": 64, "height": 64}
    sent = [message(**fields, **own, id=name) for name, own in jobs.items()]
    await run_pipeline(make_engine(), sent=sent)
    usual, said = [await parameters(storage, name) for name in ("usual", "said")]
    assert usual.startswith("a (red:1.3) house\n")
    assert "Steps: 4, Sampler: Euler, Schedule type: Automatic, CFG scale: 1," in usual
    assert "Steps: 6, Sampler: Euler," in said
    reasons = {each.id: each.reason for each in await failed_jobs(storage)}
    assert reasons.keys() == {"other", "guided", "joined"}
    assert "FLUX.2-klein, which takes Euler with Automatic" in reasons["other"]
    assert (
        "cfg_scale is 5, and this worker draws with FLUX.2-klein" in reasons["guided"]
    )
    assert "does not support AND or prompt editing" in reasons["joined"]


def test_a_program_without_a_queue_draws_with_kleins_own_settings(klein):
    with imagefleet.Engine(klein(), device="cpu", precision="float32") as engine:
        (drawn,) = engine.draw([{"prompt": "a house", "width": 64, "height": 64}])
    assert drawn.error is None
    assert (drawn.job.steps, drawn.job.cfg_scale) == (4, 1)


@pytest.mark.parametrize(
    ("precision", "is_int8"), [("int8", True), ("auto", True), ("float32", False)]
)
async def test_int8_stands_in_the_parameters_whether_asked_for_or_needed(
    storage: Storage,
    run_pipeline,
    klein,
    monkeypatch,
    caplog,
    precision: Precision,
    is_int8: bool,
):
    caplog.set_level("INFO")
    monkeypatch.setattr(
        memory, "has_no_room_for_weights", lambda _, size: size > 100_000
    )
    engine = load.load_engine(load.EngineSettings(klein(), "cpu", precision=precision))
    sent = [message(prompt="a house", width=64, height=64, id="a")]
    await run_pipeline(engine, sent=sent)
    told = ", Weights: int8, " in await parameters(storage, "a")
    said = "most weights are held in int8" in caplog.text
    assert (told, said) == (is_int8, precision == "auto")


def test_its_folder_and_its_family_are_known_before_torch(klein):
    folder: Path = klein()
    check.check_path(folder)
    family = families.of_title(check.family(folder))
    assert (family.slug, family.steps, family.rows) == ("klein", 4, 1)
    # Counted by torch for the architecture: 10.17 at 512x512, 34.82 at 1024x1024.
    assert family.image_tflop() == pytest.approx(4 * 34.82 + 10.5 + 2.8, rel=0.01)
    assert family.image_tflop(512, 512) == pytest.approx(4 * 10.17 + 5.3, rel=0.01)
    base = families.of_title(check.family(klein(is_distilled=False)))
    assert base.image_tflop() == pytest.approx(2 * (50 * 34.82 + 2.8) + 10.5, rel=0.01)
