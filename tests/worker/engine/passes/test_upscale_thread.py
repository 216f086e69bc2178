"""Requests that only enlarge an image: as spandrel does it in one piece, beside what is drawn."""

import threading
from collections.abc import Callable
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
from worker.engine.passes import upscale_thread
from worker.engine.passes.upscale_thread import UpscaleThread
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
def enlarging(network: Any) -> Enlarging:
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
    slot_engine: SlotEngine, enlarging: Enlarging, network: Any
):
    upscalers = (("4x_Tiny", network[0]), ("Nearest", None))
    request = enlarging(upscalers=upscalers, blend=0.25, width=96, height=96)
    (found,) = draw(slot_engine, request)
    first = Image.fromarray(esrgan.enlarge(network[1], picture()))
    second = Image.fromarray(picture()).resize((160, 96), Image.Resampling.NEAREST)
    expected = np.asarray(Image.blend(first, second, 0.25))[:, 32:128]
    assert np.array_equal(found, expected)


def test_images_are_drawn_and_enlarged_beside_each_other(
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


def test_the_engine_holds_no_more_than_it_has_room_for_and_waits_only_briefly(
    slot_engine: SlotEngine, enlarging: Enlarging, monkeypatch
):
    may_go_on = threading.Event()
    enlarge = upscale_thread.upscaling.enlarge

    def slow(*arguments: Any) -> contract.Pixels:
        assert may_go_on.wait()
        return enlarge(*arguments)

    monkeypatch.setattr(upscale_thread.upscaling, "enlarge", slow)
    prepared = slot_engine.prepare(enlarging())
    room = slot_engine.capacity
    for ticket in range(room):
        assert slot_engine.free == room - ticket
        slot_engine.admit(ticket, prepared)
    assert (slot_engine.free, slot_engine.capacity, slot_engine.busy) == (0, room, True)
    assert slot_engine.tick() == []
    may_go_on.set()
    finished = []
    while slot_engine.busy:
        finished += slot_engine.tick()
    assert [each.ticket for each in finished] == list(range(room))


def test_what_fails_is_the_images_own_outcome(
    slot_engine: SlotEngine,
    enlarging: Enlarging,
    monkeypatch,
):
    def fail(*_: Any) -> contract.Pixels:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(upscale_thread.upscaling, "enlarge", fail)
    (outcome,) = draw(slot_engine, enlarging())
    assert isinstance(outcome, errors.TransientError)
    assert "ran out of memory" in outcome.message


def test_a_broken_gpu_is_the_nodes_fault(enlarging: Enlarging, monkeypatch):
    def fail(*_: Any) -> contract.Pixels:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(upscale_thread.upscaling, "enlarge", fail)
    enlarger = UpscaleThread(UpscalerCache(CPU), CPU)
    enlarger.add(1, enlarger.prepare(enlarging()))
    enlarger._thread.shutdown()
    with pytest.raises(errors.NodeError, match="the GPU is broken"):
        enlarger.collect(wait=False)
    enlarger.close()


def test_a_file_that_is_no_upscaler_is_refused_before_the_request_waits(
    slot_engine: SlotEngine, enlarging: Enlarging, tmp_path
):
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"none")
    with pytest.raises(errors.UnusableFileError, match="'damaged' is not a complete"):
        slot_engine.prepare(enlarging(upscalers=(("damaged", damaged),)))
