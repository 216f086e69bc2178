"""Whole pictures of a tiny klein against diffusers' pipeline, in float32."""

import pytest

pytestmark = pytest.mark.slow

SIZES = [(64, 64), (128, 64), (64, 96), (80, 112), (16, 64), (128, 128), (48, 48)]


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_pictures_are_those_of_diffusers_at_any_size(
    steps: int, make_engine, expected, request_of, draw_floats
):
    requests = [
        request_of(
            prompt=f"A {width} by {height} house",
            width=width,
            height=height,
            steps=steps,
            seed=number,
        )
        for number, (width, height) in enumerate(SIZES)
    ]
    drawn = draw_floats(make_engine(), *requests)
    for request, image in zip(requests, drawn, strict=True):
        difference = (image.clamp(-1, 1) - expected(request)).abs().max()
        assert difference < 1e-5, (request.width, request.height)


def test_the_base_is_guided_as_diffusers_guides_it(
    make_engine,
    klein,
    expected,
    request_of,
    draw_floats,
):
    engine = make_engine(klein(is_distilled=False))
    requests = [
        request_of(steps=steps, cfg_scale=scale, seed=steps)
        for steps, scale in ((3, 4.0), (5, 1.0), (6, 2.5))
    ]
    for request, image in zip(requests, draw_floats(engine, *requests), strict=True):
        theirs = expected(request, is_distilled=False)
        assert (image.clamp(-1, 1) - theirs).abs().max() < 1e-5
