import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drawing import ROUNDING, difference, draw, draw_alone, make_request
from imagefleet import errors
from worker.engine import contract
from worker.engine.sampler import NoiseStream
from worker.engine.slots.prepare import PreparedRequest

pytestmark = pytest.mark.slow


NAN_SEED = 666

LONG = "a red house in a meadow, (under a blue sky:1.2), " * 5
FOREST, NIGHT, OUTLINE = "magic-fantasy-forest-v2", "night-palette", "outline-style"


def patch_noise(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[torch.Tensor, int], None]
) -> None:
    """Calls *act* with the first latents of each image and its seed."""
    original = PreparedRequest.first_latents

    def first_latents(prepared: PreparedRequest, noise: NoiseStream) -> torch.Tensor:
        latents = original(prepared, noise)
        act(latents, prepared.request.seed)
        return latents

    monkeypatch.setattr(PreparedRequest, "first_latents", first_latents)


@pytest.mark.parametrize("position", range(4))
def test_an_image_does_not_depend_on_its_batch_or_its_place_in_it(
    engine: Any, position: int
) -> None:
    alone = draw(engine, make_request(seed=5))
    others = [make_request(seed=100 + row, prompt=f"other {row}") for row in range(3)]
    batch = [*others[:position], make_request(seed=5), *others[position:]]
    assert difference(draw(engine, *batch)[position], alone[0]) <= ROUNDING


def test_each_row_of_a_mixed_batch_reaches_its_own_ticket(engine: Any) -> None:
    requests = [
        make_request(seed=1, cfg_scale=1.0),
        make_request(seed=1, cfg_scale=12.0),
        make_request(seed=2, prompt="a red castle"),
        make_request(seed=2, negative_prompt="a red castle"),
    ]
    together = draw(engine, *requests)
    alone = draw_alone(engine, requests)
    for row in range(4):
        assert [difference(together[row], image) <= ROUNDING for image in alone] == [
            other == row for other in range(4)
        ]


def test_only_requests_that_can_share_a_call_do_and_the_oldest_goes_first(
    engine: Any,
) -> None:
    requests = [
        make_request(steps=3),
        make_request(width=72),
        make_request(steps=3, seed=9, cfg_scale=3.0),
        make_request(clip_skip=2),
        make_request(steps=3, prompt="long " * 40),
    ]
    for ticket, request in enumerate(requests):
        engine.admit(ticket, engine.prepare(request))
    ticks = []
    while engine.busy:
        ticks.append([finished.ticket for finished in engine.tick()])
    assert ticks == [[0, 2, 4], [1], [3]]


def test_free_counts_down_from_capacity_and_comes_back(engine: Any) -> None:
    assert engine.free == engine.capacity == 8
    prepared = engine.prepare(make_request(steps=1))
    for ticket in range(engine.capacity):
        assert engine.free == engine.capacity - ticket
        engine.admit(ticket, prepared)
    assert engine.free == 0
    assert [finished.ticket for finished in engine.tick()] == [0, 1, 2, 3]
    assert engine.free == 4
    engine.tick()
    assert not engine.busy
    assert engine.tick() == []


def test_images_have_the_requested_size_and_the_native_size_is_known(
    engine: Any,
) -> None:
    assert engine.default_size == (64, 64)
    assert engine.model_name == "tiny"
    (image,) = draw(engine, make_request(width=88, height=40))
    assert image.shape == (40, 88, 3)
    assert image.dtype == np.uint8
    assert image.std() > 20


def test_only_a_nan_image_fails(make_engine: Any, monkeypatch: Any) -> None:
    engine = make_engine()
    requests = [make_request(seed=seed) for seed in (1, NAN_SEED, 3)]
    sound = draw(engine, *requests)

    def act(latents: torch.Tensor, seed: int) -> None:
        if seed == NAN_SEED:
            latents.fill_(torch.nan)

    patch_noise(monkeypatch, act)
    first, middle, last = draw(engine, *requests)
    assert isinstance(middle, errors.TransientError)
    assert "NaN" in middle.message
    assert difference(first, sound[0]) == 0
    assert difference(last, sound[2]) == 0


def test_the_third_chunk_of_a_long_prompt_counts(engine: Any) -> None:
    long = "a castle on a hill, " * 11
    prepared = engine.prepare(make_request(prompt=long + "red"))
    assert prepared.text_rows[0].length == 3
    red, blue = draw(
        engine, make_request(prompt=long + "red"), make_request(prompt=long + "blue")
    )
    assert difference(red, blue) > ROUNDING


def test_too_long_a_prompt_is_refused(engine: Any) -> None:
    with pytest.raises(errors.JobError, match="chunks"):
        engine.prepare(make_request(negative_prompt="word " * 5000))


def test_clip_skip_changes_the_image_and_is_limited(engine: Any) -> None:
    plain, skipped = draw(engine, make_request(), make_request(clip_skip=2))
    assert difference(plain, skipped) > ROUNDING
    with pytest.raises(errors.JobError, match="clip_skip"):
        engine.prepare(make_request(clip_skip=5))


def test_an_unknown_sampler_is_refused(engine: Any) -> None:
    with pytest.raises(errors.JobError, match="huen"):
        engine.prepare(make_request(sampler="huen"))


def test_prepare_is_thread_safe(engine: Any) -> None:
    texts = [f"photo number {number} " * 20 for number in range(40)]
    expected = [engine.prepare(make_request(prompt=text)).texts for text in texts]
    got: dict[str, object] = {}

    def prepare(share: list[str]) -> None:
        for text in share:
            got[text] = engine.prepare(make_request(prompt=text)).texts

    threads = [
        threading.Thread(target=prepare, args=(texts[at::4],)) for at in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[text] for text in texts] == expected


@pytest.mark.filterwarnings(
    # diffusers converts torch tensors to numpy in a way that numpy deprecates
    "ignore:__array__ implementation:DeprecationWarning"
)
def test_images_match_diffusers_own_pipeline(engine: Any, checkpoint: Path) -> None:
    from diffusers import EulerAncestralDiscreteScheduler, StableDiffusionPipeline

    scheduler = EulerAncestralDiscreteScheduler.from_pretrained(
        checkpoint / "scheduler", timestep_spacing="linspace"
    )
    pipeline = StableDiffusionPipeline.from_pretrained(
        checkpoint, scheduler=scheduler, local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)
    requests = [
        make_request(seed=3, steps=15),
        make_request(seed=4, steps=15, cfg_scale=3.0),
    ]
    for request, image in zip(requests, draw(engine, *requests), strict=True):
        reference = pipeline(
            request.prompt,
            negative_prompt=request.negative_prompt,
            num_inference_steps=request.steps,
            guidance_scale=request.cfg_scale,
            generator=torch.Generator().manual_seed(request.seed),
            width=request.width,
            height=request.height,
            output_type="np",
        ).images[0]
        # The sigmas differ by 1e-5: diffusers interpolates them, k-diffusion their logarithms.
        assert difference(image, (reference * 255).round().astype(np.uint8)) <= ROUNDING


def test_a_closed_engine_holds_nothing(checkpoint: Path, make_engine: Any) -> None:
    engine: contract.Engine = make_engine()
    engine.admit(1, engine.prepare(make_request()))
    engine.close()
    assert not engine.busy


# On the trained demo model.


@pytest.fixture
def ask() -> Callable[..., contract.ImageRequest]:
    """At the model's native size, in a few steps."""

    def make(**changes: Any) -> contract.ImageRequest:
        fields = {
            "steps": 6,
            "width": 128,
            "height": 128,
            "negative_prompt": "blurry",
            **changes,
        }
        return make_request(**fields)  # type: ignore[no-any-return]

    return make


@pytest.fixture
def others(ask: Any, demo_lora: Any) -> list[contract.ImageRequest]:
    """With other prompts, lengths, LoRAs, steps, samplers, guidance scales and sizes."""
    return [
        ask(seed=10, prompt=LONG),
        ask(seed=11, prompt="", negative_prompt=""),
        ask(seed=12, prompt="a star", negative_prompt=LONG, cfg_scale=3.0),
        ask(seed=13, loras=(demo_lora(OUTLINE, 0.8, 0.8),)),
        ask(
            seed=14,
            loras=(demo_lora(FOREST, 1.0, 0.2), demo_lora(NIGHT, 0.5, 0.5)),
            steps=3,
        ),
        ask(seed=15, prompt="a cat", steps=4, sampler="dpmpp_2m_karras", clip_skip=2),
        ask(seed=16, prompt="a boat BREAK at sea", steps=2, width=88),
    ]


@pytest.mark.parametrize(
    ("words", "strength", "at"),
    [
        ("an orange cat", 0.0, 0),
        ("an orange cat", 0.35, 7),
        (LONG, 0.8, 3),
        (LONG, 0.0, 3),
    ],
)
def test_an_image_is_the_same_with_seven_different_ones(
    demo_engine: Any,
    others: list[contract.ImageRequest],
    ask: Any,
    demo_lora: Any,
    words: str,
    strength: float,
    at: int,
) -> None:
    loras = (demo_lora(FOREST, strength, strength),) if strength else ()
    one = ask(prompt=words, seed=7, loras=loras)
    alone = draw(demo_engine, one)[0]
    together = draw(demo_engine, *others[:at], one, *others[at:])
    assert difference(alone, together[at]) <= ROUNDING
    assert alone.std() > 20, "not a uniform image"
    for image in together[:at] + together[at + 1 :]:
        assert image.shape != alone.shape or difference(alone, image) > 100


def test_an_image_is_the_same_in_one_call_with_seven_of_other_lengths(
    demo_engine: Any, ask: Any, demo_lora: Any
) -> None:
    """With the same LoRA, so that they share each UNet call."""
    words = [
        "a cat",
        LONG,
        "",
        LONG * 3,
        "a (red:1.3) star",
        "cat " * 76,
        "a BREAK b",
        "x",
    ]
    requests = [
        ask(
            prompt=text,
            negative_prompt=words[-1 - at],
            seed=at,
            steps=4,
            cfg_scale=3.0 + at,
            loras=(demo_lora(FOREST, 0.35, 0.35),),
        )
        for at, text in enumerate(words)
    ]
    for ticket, request in enumerate(requests):
        demo_engine.admit(ticket, demo_engine.prepare(request))
    together = {finished.ticket: finished.outcome for finished in demo_engine.tick()}
    assert len(together) == 8, "one call"
    for ticket, request in enumerate(requests):
        assert difference(draw(demo_engine, request)[0], together[ticket]) <= ROUNDING
