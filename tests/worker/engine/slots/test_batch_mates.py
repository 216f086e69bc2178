"""An image alone is the image drawn with seven others, on the trained demo model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from worker.engine import contract

#: Out of 255: another batch size means another order of float32 sums.
ROUNDING = 2

LONG = "a red house in a meadow, (under a blue sky:1.2), " * 5
FOREST, NIGHT, OUTLINE = "magic-fantasy-forest-v2", "night-palette", "outline-style"


@pytest.fixture
def ask(make_request: Any) -> Callable[..., contract.ImageRequest]:
    """At the model's native size, in a few steps."""

    def make(**changes: Any) -> contract.ImageRequest:
        fields = {"steps": 6, "width": 128, "height": 128, "negative_prompt": "blurry", **changes}
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
        ask(seed=14, loras=(demo_lora(FOREST, 1.0, 0.2), demo_lora(NIGHT, 0.5, 0.5)), steps=3),
        ask(seed=15, prompt="a cat", steps=4, sampler="dpmpp_2m_karras", clip_skip=2),
        ask(seed=16, prompt="a boat BREAK at sea", steps=2, width=88),
    ]


@pytest.mark.parametrize(
    ("words", "strength", "at"),
    [("an orange cat", 0.0, 0), ("an orange cat", 0.35, 7), (LONG, 0.8, 3), (LONG, 0.0, 3)],
)
def test_an_image_is_the_same_with_seven_different_ones(
    demo_engine: Any,
    others: list[contract.ImageRequest],
    ask: Any,
    demo_lora: Any,
    draw: Any,
    difference: Any,
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
    demo_engine: Any, ask: Any, demo_lora: Any, draw: Any, difference: Any
) -> None:
    """With the same LoRA, so that they share each UNet call."""
    words = ["a cat", LONG, "", LONG * 3, "a (red:1.3) star", "cat " * 76, "a BREAK b", "x"]
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
