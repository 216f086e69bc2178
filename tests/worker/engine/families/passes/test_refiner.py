"""A refiner, and hires fix by another checkpoint, are AUTOMATIC1111's: k-diffusion's own loop.

The networks of both are diffusers' own; the function that denoises changes them where
`sd_samplers_common.apply_refiner` (1.10) does.
"""

import copy
import dataclasses
import gc
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import a1111
from calls import watch_calls
from drawing import ROUNDING, assert_alike, difference, draw, draw_alone, make_request
from families import tiny_families
from imagefleet import errors
from imagefleet.job.prompt import read_prompt
from imagefleet.telemetry import host
from tests.worker.engine.families.test_hires import first_pass
from tests.worker.engine.families.test_loras import write_lora
from worker.engine import contract, load
from worker.engine.passes import begin
from worker.engine.passes.checkpoints import CachedCheckpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def other_folder(family_folder, tmp_path_factory) -> Any:
    """Another checkpoint of a family: all of its networks have other weights."""

    @cache
    def build(family: tiny_families.FamilyName, seed: int = 1) -> Path:
        folder = tmp_path_factory.mktemp("others") / f"{family}-{seed}"
        shutil.copytree(family_folder(family), folder)
        generator = torch.Generator().manual_seed(seed)
        for path in sorted(folder.rglob("*.safetensors")):
            tensors = load_file(path)
            for tensor in (each for each in tensors.values() if each.dim() > 1):
                tensor.add_(
                    torch.randn(tensor.shape, generator=generator) * tensor.std() / 2
                )
            save_file(tensors, path, {"format": "pt"})
        return folder

    return build


@dataclasses.dataclass(frozen=True, slots=True)
class Refined(a1111.Reference):
    """Draws on two pipelines' networks: from *switch_at* on, the second's."""

    second: Any = None
    switch_at: float = 0.8
    total_steps: int | None = None

    def predict_noise(
        self, request: contract.ImageRequest, size: tuple[int, int]
    ) -> Any:
        both = [
            a1111.Reference(each, self.k_diffusion).predict_noise(request, size)
            for each in (self.pipeline, self.second)
        ]
        alphas = self.pipeline.scheduler.alphas_cumprod
        known = self.k_diffusion.external.DiscreteEpsDDPMDenoiser(
            both[0], alphas, quantize=False
        )
        refining = [False]
        calls = [0]

        def predict(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
            sigma = known.t_to_sigma(timestep.float())
            if self.total_steps:
                done = torch.tensor(calls[0] / self.total_steps)
            else:
                done = (999 - torch.argmin((known.sigmas - sigma.max()).abs())) / 1000
            refining[0] |= not bool(done < self.switch_at)
            calls[0] += 1
            return both[refining[0]](x, timestep)

        return predict


@pytest.fixture(scope="session")
def pipelines(family_pipeline, other_folder) -> Any:
    """A family's pipeline, and that of the other checkpoint."""

    @cache
    def make(family: str) -> tuple[Any, Any]:
        one = family_pipeline(family)
        folder = other_folder(family)
        two = copy.copy(one)
        parts = {
            name: type(getattr(one, name)).from_pretrained(folder / name).eval()
            for name in ("unet", "vae", "text_encoder", "text_encoder_2")
            if hasattr(one, name)
        }
        two = type(one)(**{**one.components, **parts})
        a1111.resize_last(two.unet)
        return one, two

    return make


#: With a history of one call and of several, and with two calls a step and noise.
SAMPLERS = ["dpmpp_2m_karras", "lms", "dpmpp_2s_ancestral"]


@pytest.mark.parametrize(
    ("family", "sampler"), [*(("sd1", each) for each in SAMPLERS), ("sdxl", "dpmpp_2m")]
)
def test_another_checkpoint_goes_on_with_the_same_run_beside_plain_jobs(
    family: str,
    sampler: str,
    other_folder,
    latents: list[torch.Tensor],
    pipelines,
    k_diffusion,
    family_engine,
):
    """With its own text states, to 1e-5 of the latents, and its own VAE."""
    request = make_request(
        prompt="a star", negative_prompt="red", sampler=sampler, steps=5, seed=4
    )
    refiner = contract.Refiner(other_folder(family), 0.6)
    engine = family_engine(family)
    refined = dataclasses.replace(request, refiner=refiner)
    plain, image = draw(engine, request, refined)
    drawn = list(latents)
    (alone,) = draw(engine, request)
    one, two = pipelines(family)
    theirs = Refined(one, k_diffusion, second=two, switch_at=0.6)
    factor = one.vae_scale_factor
    begun = torch.zeros(1, 4, request.height // factor, request.width // factor)
    expected = theirs.img2img(request, begun, steps=5, t_enc=4)
    (found,) = [each for each in drawn if (each - expected[0]).abs().max() < 0.1]
    assert (found - expected[0]).abs().max() <= 1e-5 * expected.abs().max()
    assert (
        difference(image, a1111.Reference(two, k_diffusion).decode(expected))
        <= ROUNDING
    )
    assert difference(plain, alone) <= ROUNDING
    assert difference(image, alone) > 20, "or the test shows nothing"


@pytest.mark.parametrize(
    ("sampler", "by_steps"), [("ddim", False), ("plms", True), ("dpmpp_2m", False)]
)
def test_inpainting_is_the_same_with_its_first_checkpoints_latents_where_it_keeps_them(
    sampler: str,
    by_steps: bool,
    other_folder,
    pipelines,
    k_diffusion,
    pixels: contract.Pixels,
    family_engine,
):
    mask = np.zeros(pixels.shape[:2], np.uint8)
    mask[:, 32:] = 255
    init = contract.InitImage(pixels, 0.75, mask)
    refiner = contract.Refiner(other_folder("sd1"), 0.6, by_steps)
    request = make_request(
        prompt="a star", negative_prompt="red", sampler=sampler, steps=8, init=init
    )
    taken = begin.img2img(8, 0.75)
    one, two = pipelines("sd1")
    total = taken.t_enc + 1 if by_steps else None
    theirs = Refined(one, k_diffusion, second=two, switch_at=0.6, total_steps=total)
    latents = theirs.encode(pixels)
    drawn = torch.zeros_like(latents[:, :1])
    drawn[..., drawn.shape[-1] // 2 :] = 1
    expected = theirs.img2img(
        request, latents, mask=a1111.Mask(drawn, latents), **taken._asdict()
    )
    refined = dataclasses.replace(request, refiner=refiner)
    _, image = draw(family_engine("sd1"), request, refined)
    assert (
        difference(image, a1111.Reference(two, k_diffusion).decode(expected))
        <= ROUNDING
    )


@pytest.mark.parametrize(
    ("family", "upscaler"), [("sd1", "Latent"), ("sdxl", "Lanczos")]
)
def test_hires_fix_goes_on_with_another_checkpoint_and_its_vae(
    family: str,
    upscaler: str,
    other_folder,
    pipelines,
    k_diffusion,
    family_engine,
):
    hires = contract.HiresPass(
        96, 96, 0.7, 4, upscaler, checkpoint=other_folder(family)
    )
    request = make_request(prompt="a star", negative_prompt="red", hires=hires, seed=5)
    one, two = pipelines(family)
    small = first_pass(one, request)
    theirs = a1111.Reference(two, k_diffusion)
    if upscaler == "Latent":
        larger = a1111.interpolate(small, 96, 96, mode="bilinear")
    else:
        image = a1111.Reference(one, k_diffusion).decode(small, rounds=False)
        resized = Image.fromarray(image).resize((96, 96), Image.Resampling.LANCZOS)
        larger = theirs.encode(np.asarray(resized))
    taken = begin.second_pass(4, 0.7)._asdict()
    expected = theirs.img2img(request, larger, **taken, told=(96, 96))
    image, _ = draw(family_engine(family), request, make_request(seed=6))
    assert difference(image, theirs.decode(expected)) <= ROUNDING


@pytest.mark.parametrize(
    ("family", "slot_weights"), [("sdxl", "merged"), ("sd1", "reloaded")]
)
def test_from_the_first_call_on_it_draws_as_an_engine_of_that_checkpoint_with_the_same_loras(
    family: str,
    slot_weights,
    make_engine,
    family_folder,
    other_folder,
    tmp_path,
):
    """Its LoRAs are in its own weights, and in those of the other checkpoint."""
    own, its = (
        make_engine(model=folder, slot_weights=slot_weights)
        for folder in (family_folder(family), other_folder(family))
    )
    paths = [
        write_lora(
            tmp_path / f"{seed}.safetensors", own.checkpoint, "original", seed=seed
        )
        for seed in (1, 2)
    ]
    one, other = ((contract.Lora(path.stem, path, 0.6, 0.4),) for path in paths)
    requests = [
        make_request(prompt="a star", seed=seed, steps=2, loras=loras)
        for seed, loras in enumerate(((), one, other, other, one, ()))
    ]
    refined = [
        dataclasses.replace(
            each, refiner=contract.Refiner(other_folder(family)) if at % 2 else None
        )
        for at, each in enumerate(requests)
    ]
    images = draw(own, *refined)
    for at, request in enumerate(requests):
        assert (
            difference(images[at], draw(its if at % 2 else own, request)[0]) <= ROUNDING
        )
    assert own.self_check.find_fault() is None


@pytest.fixture
def engine(family_folder, make_engine) -> Any:
    """A tiny SD1.5 of its own, to break."""
    return make_engine(model=family_folder("sd1"))


@pytest.fixture
def mixed(other_folder) -> list[contract.ImageRequest]:
    """Jobs in all parts of which noise is drawn, with one and two rows, and one without others."""
    refiner = contract.Refiner(other_folder("sd1"), 0.5)
    another = contract.Refiner(other_folder("sd1", 2), 0.3, by_steps=True)
    own = contract.Refiner(None, 0.7)
    hires = contract.HiresPass(
        96, 96, 0.8, 3, "Lanczos", checkpoint=other_folder("sd1")
    )
    few = dataclasses.replace(make_request().sampler_options, s_min_uncond=1.5)
    return [
        make_request(seed=1, steps=6, refiner=refiner),
        make_request(seed=2, steps=6, prompt=read_prompt("a [cat:dog:4]", steps=6)),
        make_request(seed=3, steps=6, refiner=refiner, sampler_options=few),
        make_request(seed=4, steps=4, hires=hires, refiner=own, sampler="dpmpp_2m_sde"),
        make_request(
            seed=5, refiner=another, prompt=read_prompt("a [cat:dog:3] AND x", steps=4)
        ),
    ]


def test_images_are_the_same_in_company_and_alone_whatever_fails_once(
    engine,
    mixed: list[Any],
    monkeypatch,
):
    """What another checkpoint goes on with is begun again where it took over, with its noise."""
    alone = draw_alone(engine, mixed)
    failing = iter((*[False] * 3, True))
    exchange = CachedCheckpoint.exchange

    failures = iter((False, True))

    def fail_exchange(self: CachedCheckpoint, unet: Any) -> None:
        if next(failures, False):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        exchange(self, unet)

    watch_calls(
        monkeypatch,
        engine,
        lambda call: call.key.checkpoint is not None and next(failing, False),
    )
    for order in ([0, 1, 2, 3, 4], [4, 3, 1, 0, 2]):
        images = draw(engine, *(mixed[at] for at in order))
        assert_alike(images, [alone[at] for at in order])
        monkeypatch.setattr(CachedCheckpoint, "exchange", fail_exchange)
    assert next(failing, None) is None, "all failures came"
    assert next(failures, None) is None
    assert engine.self_check.find_fault() is None


def test_a_check_of_the_weights_in_between_finds_the_checkpoints_own(
    engine, mixed: list[Any]
):
    alone = draw(engine, mixed[0])[0]
    engine.admit(0, engine.prepare(mixed[0]))
    checked = 0
    finished = []
    while engine.busy:
        finished += engine.tick()
        if engine._weights._other is not None:
            checked += 1
            assert engine.self_check.find_fault() is None
            assert engine._weights._other is None
    assert checked > 1
    assert difference(finished[0].outcome, alone) <= ROUNDING


def test_they_are_dropped_once_no_job_needs_them_and_the_engine_may_take_another_model(
    engine,
    mixed: list[Any],
    other_folder,
    make_engine,
):
    held = engine._stager._caches.checkpoints
    held.kept_bytes = 0
    draw(engine, mixed[0], mixed[4], mixed[0])
    swap = load.read_beside(engine, load.EngineSettings(other_folder("sd1", 3)))
    assert swap()
    gc.collect()
    assert len(held._alive) == 1
    fresh = make_engine(model=other_folder("sd1", 3))
    for request in (make_request(), mixed[0]):
        assert difference(*draw(engine, request), *draw(fresh, request)) <= ROUNDING
    assert engine.self_check.find_fault() is None
    assert held.keep_only(())
    gc.collect()
    assert held.held_bytes == 0


def test_a_checkpoint_that_does_not_fit_fails_its_job_alone_and_says_why(
    engine,
    family_folder,
    other_folder,
    tmp_path,
    monkeypatch,
):
    v = shutil.copytree(other_folder("sd1"), tmp_path / "v")
    config = v / "scheduler" / "scheduler_config.json"
    config.write_text(config.read_text().replace('"epsilon"', '"v_prediction"'))
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(b"0" * 40)
    for path, reason in {
        family_folder(
            "sdxl"
        ): "'sdxl' cannot draw with this .*: 'sdxl' is not of the kind",
        v: "'v' predicts otherwise",
        cut: "'cut' cannot draw with this .* cannot be loaded",
    }.items():
        hires = contract.HiresPass(96, 96, 0.7, 4, "Latent", checkpoint=path)
        for changes in ({"refiner": contract.Refiner(path)}, {"hires": hires}):
            with pytest.raises(
                errors.UnusableFileError, match=f"the checkpoint {reason}"
            ):
                engine.prepare(make_request(**changes))
    monkeypatch.setattr(host, "free_memory_bytes", lambda: 10)
    with pytest.raises(
        errors.TransientError, match="no memory for the checkpoint 'sd1-4'"
    ):
        engine.prepare(make_request(refiner=contract.Refiner(other_folder("sd1", 4))))
