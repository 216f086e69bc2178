"""Jobs that begin with an image, and those with a second pass, in slots beside others."""

from dataclasses import replace
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from calls import watch_calls
from drawing import (
    ROUNDING,
    assert_alike,
    difference,
    draw,
    draw_alone,
    draw_prepared,
    make_request,
)
from imagefleet import errors
from imagefleet.job.samplers import Options
from worker.engine import contract, decoder
from worker.engine.passes.images import ImageCoder


@pytest.fixture(scope="session")
def init() -> Any:
    """An `InitImage` of a width and height; *masked* has its right half drawn anew."""

    def make(
        width: int = 64,
        height: int = 64,
        *,
        masked: bool = False,
        strength: float = 0.6,
    ) -> contract.InitImage:
        colours = np.random.default_rng(width).integers(0, 256, (4, 4, 3), np.uint8)
        pixels = np.asarray(Image.fromarray(colours).resize((width, height)))
        mask = None
        if masked:
            mask = np.zeros((height, width), np.uint8)
            mask[:, width // 2 :] = 255
        return contract.InitImage(pixels, strength, mask)

    return make


def hires(width: int = 96, height: int = 96, **changes: Any) -> contract.HiresPass:
    settings = {"denoising_strength": 0.7, "steps": 3, "upscaler": "Latent", **changes}
    return contract.HiresPass(width, height, **settings)


def test_a_second_pass_has_the_options_of_its_own_sampler(make_slot_engine):
    engine = make_slot_engine(slots=1)
    second = hires(sampler="ddim", sampler_options=Options(eta=0.0))
    request = make_request(sampler_options=Options(eta=1.0), hires=second)
    prepared = engine.prepare(request)
    assert any(prepared.schedule.noisy)
    assert not any(prepared.next_pass.schedule.noisy)
    stop = Event()
    other = replace(prepared, request=replace(request, stop=stop))
    assert other.next_pass.request.stop is stop, "each image of a job has its own"


def test_both_passes_share_calls_with_other_jobs_of_their_size(
    make_slot_engine, init, monkeypatch
):
    engine = make_slot_engine(slots=3)
    watched = watch_calls(monkeypatch, engine)
    requests = [
        make_request(hires=hires(72, 64), steps=3),
        make_request(seed=2, init=init(), steps=8),
        make_request(seed=3, width=72, steps=20),
    ]
    images = draw(engine, *requests)
    assert [image.shape[1] for image in images] == [72, 64, 72]
    calls = [[(ticket, call.key.width) for ticket in call.tickets] for call in watched]
    assert any({(0, 64), (1, 64)} == set(call) for call in calls)
    assert any({(0, 72), (2, 72)} == set(call) for call in calls)
    in_first = [call for call in calls if (0, 64) in call]
    in_second = [call for call in calls if (0, 72) in call]
    assert (len(in_first), len(in_second)) == (3, 3)


def test_the_images_of_a_job_share_what_was_prepared_and_what_was_encoded(
    make_slot_engine, init, monkeypatch,
):  # fmt: skip
    engine = make_slot_engine(slots=3)
    kinds = {"init": init()}, {"hires": hires()}
    requests = [
        [make_request(seed=seed, steps=2, **kind) for seed in (1, 2)] for kind in kinds
    ]
    apart = [draw_alone(engine, each) for each in requests]
    encoded = []
    encode = ImageCoder.encode
    monkeypatch.setattr(
        ImageCoder,
        "encode",
        lambda self, pixels: encode(self, encoded.append(pixels) or pixels),
    )
    for each, expected in zip(requests, apart, strict=True):
        assert_alike(draw_prepared(engine, each), expected)
    assert len(encoded) == 1


@pytest.mark.parametrize(("width", "upscaler"), [(64, "Latent"), (96, "Nearest")])
def test_out_of_memory_in_either_pass_fails_no_image(
    width: int,
    upscaler: str,
    make_slot_engine,
    init,
    monkeypatch,
):
    engine = make_slot_engine(slots=4, blocks=2)
    requests = [
        make_request(seed=seed, hires=hires(upscaler=upscaler)) for seed in (1, 2, 3)
    ]
    requests.append(make_request(seed=4, init=init(masked=True)))
    sound = draw(engine, *requests)
    failures = iter(range(100))
    watch_calls(
        monkeypatch,
        engine,
        lambda call: call.key.width == width and next(failures) in (1, 3),
    )
    assert_alike(draw(engine, *requests), sound)
    assert engine._lanes.blocks == 1
    assert next(failures) > 3, "or the test shows nothing"


@pytest.mark.parametrize("upscaler", ["Latent", "Nearest"])
def test_only_the_job_with_a_first_pass_of_nan_fails(
    upscaler: str,
    make_slot_engine,
    monkeypatch,
):
    engine = make_slot_engine(slots=3)
    requests = [
        make_request(seed=seed, steps=2, hires=hires(upscaler=upscaler, steps=2))
        for seed in (1, 666, 3)
    ]
    sound = draw(engine, *requests)
    end = engine._end_pass

    def end_pass(job: Any, latents: torch.Tensor, history: torch.Tensor) -> None:
        is_broken = job.prepared.request.seed == 666 and job.first_pass is None
        end(job, latents * torch.nan if is_broken else latents, history)

    monkeypatch.setattr(engine, "_end_pass", end_pass)
    images = draw(engine, *requests)
    assert isinstance(images[1], errors.TransientError)
    assert "NaN" in images[1].message
    for at in (0, 2):
        assert difference(images[at], sound[at]) <= ROUNDING


@pytest.mark.slow
def test_a_vae_that_overflows_in_float16_encodes_in_float32(
    make_slot_engine, init, monkeypatch
):
    """Its decoder may go on in float16."""
    engine = make_slot_engine("float16", slots=2)
    requests = [
        make_request(steps=2, init=init()),
        make_request(steps=2, hires=hires(upscaler="Lanczos", steps=2)),
    ]
    sound = draw(engine, *requests)
    from worker.engine.passes import images

    types = []
    encode = images._encode

    def overflow(vae: AutoencoderKL, pixels: torch.Tensor) -> torch.Tensor:
        types.append(vae.dtype)
        latents = encode(vae, pixels)
        return latents if vae.dtype == torch.float32 else latents * torch.nan

    monkeypatch.setattr(images, "_encode", overflow)
    engine._stager._images.clear()
    for image, expected in zip(draw(engine, *requests), sound, strict=True):
        assert isinstance(image, np.ndarray)
        assert np.abs(image.astype(int) - expected).mean() < 2
    assert types == [torch.float16, torch.float32, torch.float32]
    assert engine.checkpoint.vae.dtype == torch.float16


def test_a_first_pass_without_memory_to_decode_it_whole_is_decoded_in_stripes(
    make_slot_engine,
    monkeypatch,
):
    engine = make_slot_engine(slots=2)
    request = make_request(hires=hires(upscaler="Lanczos"))
    (sound,) = draw(engine, request)
    original = decoder.to_images
    ways = []

    def to_images(
        vae: Any, latents: torch.Tensor, *, in_stripes: bool = False
    ) -> torch.Tensor:
        ways.append(in_stripes)
        if not in_stripes and latents.shape[-1] == 8:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return original(vae, latents, in_stripes=in_stripes)

    monkeypatch.setattr(decoder, "to_images", to_images)
    (image,) = draw(engine, request)
    assert ways == [False, True, False]
    assert difference(image, sound) <= ROUNDING


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hires": hires(sampler="dpm_adaptiv")}, "unknown sampler 'dpm_adaptiv'"),
        ({"hires": hires(prompt="word " * 5000)}, "chunks"),
    ],
)
def test_requests_that_cannot_be_drawn_are_refused(
    changes: dict[str, Any], reason: str, slot_engine
):
    with pytest.raises(errors.JobError, match=reason):
        slot_engine.prepare(make_request(**changes))
