from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import batch_engine
from imagefleet import errors
from worker.engine import contract

#: Of 255. A batch of another size is summed in another order in float32; rounding to 8 bits may
#: then fall the other way. A row mixed up with another differs by 100 and more.
ROUNDING = 2

POISONED_SEED = 666


def poison(monkeypatch: pytest.MonkeyPatch, act: Callable[[torch.Tensor, list[int]], None]) -> None:
    """Lets *act* do as it pleases with the noise of a batch, given the seeds of its rows."""
    original = batch_engine.draw_noise

    def noise(generators: Sequence[torch.Generator], shape: tuple[int, int, int]) -> torch.Tensor:
        drawn = original(generators, shape)
        act(drawn, [generator.initial_seed() for generator in generators])
        return drawn

    monkeypatch.setattr(batch_engine, "draw_noise", noise)


@pytest.mark.parametrize("position", range(4))
def test_an_image_does_not_depend_on_its_batch_or_its_place_in_it(
    engine: Any, make_request: Any, draw: Any, difference: Any, position: int
) -> None:
    alone = draw(engine, make_request(seed=5))
    others = [make_request(seed=100 + row, prompt=f"other {row}") for row in range(3)]
    batch = [*others[:position], make_request(seed=5), *others[position:]]
    assert difference(draw(engine, *batch)[position], alone[0]) <= ROUNDING


def test_each_row_of_a_mixed_batch_reaches_its_own_ticket(
    engine: Any, make_request: Any, draw: Any, difference: Any
) -> None:
    requests = [
        make_request(seed=1, cfg_scale=1.0),
        make_request(seed=1, cfg_scale=12.0),
        make_request(seed=2, prompt="a red castle"),
        make_request(seed=2, negative_prompt="a red castle"),
    ]
    together = draw(engine, *requests)
    alone = [draw(engine, request)[0] for request in requests]
    for row in range(4):
        assert [difference(together[row], image) <= ROUNDING for image in alone] == [
            other == row for other in range(4)
        ]


def test_only_requests_that_can_share_a_call_do_and_the_oldest_goes_first(
    engine: Any, make_request: Any
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


def test_free_counts_down_from_capacity_and_comes_back(engine: Any, make_request: Any) -> None:
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


def test_images_have_the_size_asked_for_and_the_checkpoints_own_size_is_known(
    engine: Any, make_request: Any, draw: Any
) -> None:
    assert engine.default_size == (64, 64)
    assert engine.model_name == "tiny"
    (image,) = draw(engine, make_request(width=88, height=40))
    assert image.shape == (40, 88, 3)
    assert image.dtype == np.uint8
    assert image.std() > 20


def test_an_image_that_comes_out_as_nan_fails_alone(
    make_engine: Any, make_request: Any, draw: Any, difference: Any, monkeypatch: Any
) -> None:
    engine = make_engine()
    requests = [make_request(seed=seed) for seed in (1, POISONED_SEED, 3)]
    sound = draw(engine, *requests)

    def act(noise: torch.Tensor, seeds: list[int]) -> None:
        for row, seed in enumerate(seeds):
            if seed == POISONED_SEED:
                noise[row] = torch.nan

    poison(monkeypatch, act)
    first, poisoned, last = draw(engine, *requests)
    assert isinstance(poisoned, errors.TransientError)
    assert "NaN" in poisoned.message
    assert difference(first, sound[0]) == 0
    assert difference(last, sound[2]) == 0


def test_a_request_that_raises_fails_alone_and_says_why(
    make_engine: Any, make_request: Any, draw: Any, difference: Any, monkeypatch: Any
) -> None:
    engine = make_engine()
    requests = [make_request(seed=seed) for seed in (1, POISONED_SEED, 3)]
    sound = draw(engine, *requests)

    def act(_: torch.Tensor, seeds: list[int]) -> None:
        if POISONED_SEED in seeds:
            raise RuntimeError("no kernel for this")

    poison(monkeypatch, act)
    first, poisoned, last = draw(engine, *requests)
    assert isinstance(poisoned, errors.TransientError)
    assert "no kernel for this" in poisoned.message
    assert difference(first, sound[0]) <= ROUNDING
    assert difference(last, sound[2]) <= ROUNDING


def test_out_of_memory_halves_the_batch_for_good_and_loses_no_image(
    make_engine: Any, make_request: Any, draw: Any, monkeypatch: Any
) -> None:
    engine = make_engine()
    sizes: list[int] = []

    def act(_: torch.Tensor, seeds: list[int]) -> None:
        sizes.append(len(seeds))
        if len(seeds) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    poison(monkeypatch, act)
    requests = [make_request(seed=seed, steps=1) for seed in range(4)]
    assert all(isinstance(outcome, np.ndarray) for outcome in draw(engine, *requests))
    assert sizes == [4, 2, 2]
    draw(engine, *requests)
    assert sizes == [4, 2, 2, 2, 2]
    draw(engine, make_request(width=128, height=128, steps=1))
    draw(engine, *(make_request(seed=seed, width=32, height=32, steps=1) for seed in range(2)))
    assert sizes == [4, 2, 2, 2, 2, 1, 2]


def test_one_image_that_does_not_fit_the_memory_is_tried_elsewhere(
    make_engine: Any, make_request: Any, draw: Any, monkeypatch: Any
) -> None:
    engine = make_engine()

    def act(_: torch.Tensor, seeds: list[int]) -> None:
        if POISONED_SEED in seeds:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    poison(monkeypatch, act)
    (outcome,) = draw(engine, make_request(seed=POISONED_SEED))
    assert isinstance(outcome, errors.TransientError)
    assert "memory" in outcome.message
    engine.admit(1, engine.prepare(make_request()))
    engine.admit(2, engine.prepare(make_request()))
    assert len(engine.tick()) == 2, "one image too large says nothing of a batch of small ones"


def test_a_broken_gpu_is_no_images_fault(
    make_engine: Any, make_request: Any, draw: Any, monkeypatch: Any
) -> None:
    engine = make_engine()

    def act(_: torch.Tensor, seeds: list[int]) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    poison(monkeypatch, act)
    with pytest.raises(errors.NodeError, match="illegal memory access"):
        draw(engine, make_request())


def test_a_vae_that_overflows_in_float16_decodes_in_float32_from_then_on(
    make_engine: Any, make_request: Any, draw: Any, difference: Any, monkeypatch: Any
) -> None:
    engine = make_engine(precision="float16")
    vae = engine._checkpoint.vae
    sound = draw(engine, make_request())
    original = vae.decode

    def decode(latents: torch.Tensor, **settings: Any) -> tuple[torch.Tensor]:
        (image,) = original(latents, **settings)
        return (image * torch.inf if latents.dtype == torch.float16 else image,)

    monkeypatch.setattr(vae, "decode", decode)
    outcomes = draw(engine, make_request(), make_request(seed=2))
    assert difference(outcomes[0], sound[0]) <= 8, "float16 rounds at 1/2048"
    assert vae.dtype == torch.float32


def test_the_third_chunk_of_a_long_prompt_counts(
    engine: Any, make_request: Any, draw: Any, difference: Any
) -> None:
    long = "a castle on a hill, " * 11
    prepared = engine.prepare(make_request(prompt=long + "red"))
    assert len(prepared.prompt) == 3
    red, blue = draw(engine, make_request(prompt=long + "red"), make_request(prompt=long + "blue"))
    assert difference(red, blue) > ROUNDING


def test_a_prompt_without_end_is_refused(engine: Any, make_request: Any) -> None:
    with pytest.raises(errors.JobError, match="chunks"):
        engine.prepare(make_request(negative_prompt="word " * 5000))


def test_clip_skip_changes_the_image_and_has_an_end(
    engine: Any, make_request: Any, draw: Any, difference: Any
) -> None:
    plain, skipped = draw(engine, make_request(), make_request(clip_skip=2))
    assert difference(plain, skipped) > ROUNDING
    with pytest.raises(errors.JobError, match="clip_skip"):
        engine.prepare(make_request(clip_skip=5))


@pytest.mark.parametrize(
    ("change", "reason"), [({"sampler": "heun"}, "heun"), ({"width": 65}, "65x64")]
)
def test_what_this_engine_cannot_draw_is_refused(
    engine: Any, make_request: Any, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(errors.JobError, match=reason):
        engine.prepare(make_request(**change))


def test_prepare_may_be_called_from_many_threads(engine: Any, make_request: Any) -> None:
    texts = [f"photo number {number} " * 20 for number in range(40)]
    expected = [engine.prepare(make_request(prompt=text)).prompt for text in texts]
    got: dict[str, object] = {}

    def prepare(share: list[str]) -> None:
        for text in share:
            got[text] = engine.prepare(make_request(prompt=text)).prompt

    threads = [threading.Thread(target=prepare, args=(texts[at::4],)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[text] for text in texts] == expected


@pytest.mark.filterwarnings(
    # diffusers hands torch tensors to numpy 2 in a way that numpy will drop
    "ignore:__array__ implementation:DeprecationWarning"
)
def test_images_are_those_of_diffusers_own_pipeline(
    engine: Any, checkpoint: Path, make_request: Any, draw: Any, difference: Any
) -> None:
    from diffusers import EulerAncestralDiscreteScheduler, StableDiffusionPipeline

    scheduler = EulerAncestralDiscreteScheduler.from_pretrained(
        checkpoint / "scheduler", timestep_spacing="linspace"
    )
    pipeline = StableDiffusionPipeline.from_pretrained(
        checkpoint, scheduler=scheduler, local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)
    requests = [make_request(seed=3, steps=15), make_request(seed=4, steps=15, cfg_scale=3.0)]
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


def test_a_closed_engine_holds_nothing(
    checkpoint: Path, make_engine: Any, make_request: Any
) -> None:
    engine: contract.Engine = make_engine()
    engine.admit(1, engine.prepare(make_request()))
    engine.close()
    assert not engine.busy
