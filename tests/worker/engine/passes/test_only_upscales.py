"""Requests that only enlarge an image: as spandrel does it in one piece, beside what is drawn."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from drawing import draw, make_request
from imagefleet import errors
from tests.worker.engine.support import esrgan
from worker.engine import contract
from worker.engine.passes import upscaling
from worker.engine.passes.upscaling import UpscalerCache
from worker.engine.slots.engine import SlotEngine

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")

Enlarging = Callable[..., contract.ImageRequest]


def picture(width: int = 40, height: int = 24) -> contract.Pixels:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> tuple[Path, Any]:
    return esrgan.build(tmp_path_factory.mktemp("upscalers") / "4x_Tiny.safetensors")


@pytest.fixture
def enlarging(network) -> Enlarging:
    """A request that enlarges the picture four times."""

    def make(
        pixels: contract.Pixels | None = None, **changes: Any
    ) -> contract.ImageRequest:
        pixels = picture() if pixels is None else pixels
        size = pixels.shape[1] * 4, pixels.shape[0] * 4
        given = {
            "upscalers": (("4x_Tiny", network[0]),),
            "whole": size,
            "scale": 4.0,
            **changes,
        }
        fields = {"width": given["whole"][0], "height": given["whole"][1], **given}
        init = contract.InitImage(pixels, 0.0)
        height, width = pixels.shape[:2]
        upscale = contract.Upscale(**fields)
        return make_request(init=init, upscale=upscale, width=width, height=height)

    return make


def test_two_upscalers_are_blended_and_cut_at_both_sides(
    slot_engine: SlotEngine, enlarging: Enlarging, network
):
    upscalers = (("4x_Tiny", network[0]), ("Nearest", None))
    request = enlarging(upscalers=upscalers, blend=0.25, width=96, height=96)
    (found,) = draw(slot_engine, request)
    first = Image.fromarray(esrgan.enlarge(network[1], picture()))
    second = Image.fromarray(picture()).resize((160, 96), Image.Resampling.NEAREST)
    expected = np.asarray(Image.blend(first, second, 0.25))[:, 32:128]
    assert np.array_equal(found, expected)


def test_images_that_are_drawn_and_enlarged_end_in_one_engine(
    slot_engine: SlotEngine, enlarging: Enlarging
):
    drawings = [make_request(seed=seed) for seed in range(3)]
    resize = enlarging(upscalers=(("Lanczos", None),))
    alone = [*draw(slot_engine, *drawings), *draw(slot_engine, resize)]
    first, second, third = drawings
    found = draw(slot_engine, first, enlarging(), second, enlarging(), third, resize)
    assert [found[at].shape for at in (1, 3)] == [(96, 160, 3)] * 2
    for one, other in zip((found[0], found[2], found[4], found[5]), alone, strict=True):
        assert np.array_equal(one, other)


@pytest.fixture
def prepare(enlarging: Enlarging) -> Callable[[], Any]:
    cache = UpscalerCache(CPU)
    return lambda: cache.prepare(enlarging())


def test_networks_enlarge_one_image_at_a_time(prepare, monkeypatch):
    running = threading.Lock()
    enlarge = upscaling.enlarge

    def alone(*arguments: Any) -> contract.Pixels:
        assert running.acquire(blocking=False)
        try:
            return enlarge(*arguments)
        finally:
            running.release()

    monkeypatch.setattr(upscaling, "enlarge", alone)
    with ThreadPoolExecutor(3) as threads:
        found = [threads.submit(prepare) for _ in range(6)]
    assert all(
        np.array_equal(each.result().pixels, found[0].result().pixels) for each in found
    )


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (torch.cuda.OutOfMemoryError(), errors.TransientError, "ran out of memory"),
        (
            RuntimeError("CUDA error: an illegal memory access was encountered"),
            errors.NodeError,
            "the GPU is broken",
        ),
    ],
)
def test_a_failure_is_the_images_or_the_nodes(
    prepare, monkeypatch, error: Exception, kind: type[Exception], said: str
):
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(upscaling.Upscaler, "_run", fail)
    with pytest.raises(kind, match=said):
        prepare()


def test_a_file_that_is_no_upscaler_is_refused_before_the_request_waits(
    slot_engine: SlotEngine, enlarging: Enlarging, tmp_path
):
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"none")
    with pytest.raises(errors.UnusableFileError, match="'damaged' is not a complete"):
        slot_engine.prepare(enlarging(upscalers=(("damaged", damaged),)))
