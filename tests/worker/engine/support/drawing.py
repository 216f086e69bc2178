"""Requests for tiny models, their images, and how far two images are apart."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from worker.engine import contract

#: Out of 255: calls of another size are rounded in another way, a level or two over an image.
ROUNDING = 2

#: Few steps and the smallest size: an image takes some 30 ms.
_REQUEST = contract.ImageRequest(
    prompt="a photo of a jump rope",
    negative_prompt="blurry",
    loras=(),
    sampler="euler_ancestral",
    steps=4,
    cfg_scale=7.0,
    seed=1,
    width=64,
    height=64,
)


def make_request(**changes: Any) -> contract.ImageRequest:
    return dataclasses.replace(_REQUEST, **changes)


def draw(engine: contract.Engine, *requests: contract.ImageRequest) -> list[Any]:
    """Draws requests as the pipeline does; returns the outcomes in their order."""
    waiting = list(enumerate(requests))
    outcomes = {}
    while waiting or engine.busy:
        while waiting and engine.free:
            ticket, request = waiting.pop(0)
            engine.admit(ticket, engine.prepare(request))
        for finished in engine.tick():
            assert finished.ticket not in outcomes
            outcomes[finished.ticket] = finished.outcome
    return [outcomes[ticket] for ticket in range(len(requests))]


def finish(engine: contract.Engine) -> dict[int, Any]:
    """The outcomes of all that was admitted, by ticket and in the order they are done."""
    outcomes = {}
    while engine.busy:
        outcomes |= {each.ticket: each.outcome for each in engine.tick()}
    return outcomes


def draw_prepared(
    engine: contract.Engine, requests: Sequence[contract.ImageRequest]
) -> list[Any]:
    """Draws the images of a job by what was prepared for its first."""
    first = engine.prepare(requests[0])
    for ticket, request in enumerate(requests):
        engine.admit(ticket, dataclasses.replace(first, request=request))
    outcomes = finish(engine)
    return [outcomes[ticket] for ticket in range(len(requests))]


def draw_alone(
    engine: contract.Engine, requests: Iterable[contract.ImageRequest]
) -> list[Any]:
    """Draws each request in an empty engine."""
    return [draw(engine, request)[0] for request in requests]


def assert_alike(
    images: Sequence[object], expected: Sequence[object], within: int = ROUNDING
) -> None:
    """Each image is the one at its place among the *expected*."""
    pairs = zip(images, expected, strict=True)
    found = [difference(*pair) for pair in pairs]
    assert max(found) <= within, found


def difference(one: object, other: object) -> int:
    """The largest difference of two images in any channel of any pixel, out of 255."""
    assert isinstance(one, np.ndarray), one
    assert isinstance(other, np.ndarray), other
    assert one.shape == other.shape
    return int(np.abs(one.astype(int) - other.astype(int)).max())
