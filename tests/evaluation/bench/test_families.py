"""The benchmark of other model families than SD1.x."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel

from evaluation.bench import baseline, engine, jobs, machine
from families import tiny_families
from imagefleet import errors
from imagefleet.job.passes.fields import Pass
from imagefleet.pricing import families
from in_process import assert_refused
from klein import tiny_klein
from worker.engine import contract
from worker.engine.families.table import SDXL, X4_UPSCALER

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny_sdxl(tmp_path_factory) -> Path:
    return tiny_families.build(tmp_path_factory.mktemp("model") / "tiny", "sdxl")


def tflop(call: Callable[[], object]) -> float:
    """Counts the operations of a call on the meta device."""
    with machine.FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return float(counter.get_total_flops() / 1e12)


def test_the_plan_counts_the_operations_that_sdxl_has():
    planned = families.FAMILIES[SDXL.slug]
    side = planned.width // 8
    with torch.device("meta"):
        unet = UNet2DConditionModel(**SDXL.unet_config)
        inputs = torch.empty(1, 4, side, side), torch.empty(1)
        context = torch.empty(1, 77, unet.config.cross_attention_dim)
        added = {"text_embeds": torch.empty(1, 1280), "time_ids": torch.empty(1, 6)}
        counted = tflop(lambda: unet(*inputs, context, added_cond_kwargs=added))
    calls = planned.image_tflop(steps=2) - planned.image_tflop(steps=1)
    assert 2 * counted == pytest.approx(calls, rel=0.02)


@pytest.mark.parametrize("side", [512, 1024])
def test_the_plan_counts_the_operations_that_the_x4_upscaler_has(side: int):
    planned = families.FAMILIES[X4_UPSCALER.slug]
    with torch.device("meta"):
        unet = UNet2DConditionModel(**X4_UPSCALER.unet_config)
        vae = AutoencoderKL(**X4_UPSCALER.vae_config)
        inputs = torch.empty(1, 7, side // 4, side // 4), torch.empty(1)
        context = torch.empty(1, 77, unet.config.cross_attention_dim)
        level = torch.empty(1, dtype=torch.long)
        call = tflop(lambda: unet(*inputs, context, class_labels=level))
        decoding = tflop(lambda: vae.decode(inputs[0][:, :4]))
    one, two = (planned.image_tflop(side, side, steps) for steps in (1, 2))
    assert 2 * call == pytest.approx(two - one, rel=0.01)
    assert decoding == pytest.approx(2 * one - two - 2 * planned.text_tflop, rel=0.01)


def test_an_unknown_family_and_a_cpu_are_refused(tmp_path):
    without = "unknown family without a --model '{}'"
    for family in ("sd3", "klein"):
        with pytest.raises(errors.SetupError, match=without.format(family)):
            engine.prepare(None, tmp_path, "cpu", family=family)
    with pytest.raises(errors.SetupError, match="--family sdxl is for GPUs"):
        engine.prepare(None, tmp_path, "cpu", family="sdxl")


def test_the_baseline_draws_sdxl(tiny_sdxl: Path):
    plain = baseline.PlainDiffusers(tiny_sdxl, torch.device("cpu"), torch.float32)
    fields = {"loras": (), "sampler": "euler_ancestral", "cfg_scale": 7.0, "seed": 1}
    request = contract.ImageRequest("a", "b", steps=1, width=64, height=64, **fields)  # type: ignore[arg-type]
    (image,) = plain.draw([request])
    assert image.shape == (64, 64, 3)


@pytest.mark.parametrize("is_distilled", [True, False])
def test_klein_is_measured_with_its_own_steps_guidance_and_loras(
    in_process, tmp_path, monkeypatch, is_distilled: bool
):
    model = tiny_klein.build(tmp_path / "klein", is_distilled=is_distilled)
    monkeypatch.setattr(jobs, "reference_words", lambda: ("a house", "ugly"))
    monkeypatch.setattr(engine, "prepare", partial(engine.prepare, loras=4))
    arguments = ("bench", "--model", str(model), "--seconds", "0.1", "--slots", "2")
    ended = in_process(*arguments, "--json")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    family = families.find(report["family"])
    assert report["steps"] == family.steps == (4 if is_distilled else 50)
    assert report["flops_per_image"] == 1e12 * family.image_tflop(64, 64)
    for other in (*arguments, "--baseline"), ("bench", "latency", *arguments[1:3]):
        assert_refused(in_process(*other), "klein/measure.py measures")


def test_the_plan_counts_what_encoding_and_a_controlnet_take():
    sd1 = families.FAMILIES["sd1"]
    channels = (320, 640, 1280, 1280)
    config = {"block_out_channels": channels, "cross_attention_dim": 768}
    with torch.device("meta"):
        control = ControlNetModel(attention_head_dim=8, **config)
        vae = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
        )
        pixels = torch.empty(1, 3, 512, 512)
        latents = torch.empty(1, 4, 64, 64)
        context = torch.empty(1, 77, 768)
        encoding = tflop(lambda: vae.encode(pixels))
        controlling = tflop(lambda: control(latents, torch.empty(1), context, pixels))
    plain = sd1.passes_tflop([Pass(512, 512, 1)])
    unguided = sd1.passes_tflop([Pass(512, 512, 15, rows=1)])
    assert unguided == pytest.approx(0.55 * sd1.image_tflop(512, 512, 15), rel=0.01)
    assert plain == pytest.approx(sd1.image_tflop(512, 512, 1))
    encodes = sd1.passes_tflop([Pass(512, 512, 1, encodes=True)]) - plain
    controls = sd1.passes_tflop([Pass(512, 512, 1, controls=1)]) - plain
    assert encodes == pytest.approx(encoding, rel=0.05)
    assert controls == pytest.approx(2 * controlling, rel=0.2), "SDXL's is larger"
