"""Upscaler files: an ESRGAN of one block through spandrel, and files that are none."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from imagefleet import errors
from tests.worker.engine.support import esrgan
from worker.engine import contract
from worker.engine.passes import upscaling as model

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")

Build = Callable[..., tuple[Path, Any]]


@pytest.fixture
def build(tmp_path) -> Build:
    def build(name: str = "4x-tiny", **options: int) -> tuple[Path, Any]:
        return esrgan.build(tmp_path / f"{name}.safetensors", **options)

    return build


def test_tiles_become_smaller_while_the_memory_is_short(
    build: Build, monkeypatch, caplog
):
    path, network = build()
    upscaler = model.UpscalerCache(CPU).get(path)
    run = model.in_tiles
    sizes = []
    longest = 96

    def short(
        network: Any, pixels: contract.Pixels, scale: int, tile: int, **how: Any
    ) -> Any:
        sizes.append(tile)
        if tile > longest:
            raise torch.cuda.OutOfMemoryError
        return run(network, pixels, scale, tile, **how)

    monkeypatch.setattr(model, "in_tiles", short)
    pixels = esrgan.picture(140, 16)
    whole = esrgan.enlarge(network, pixels).astype(int)
    # A pixel of an ESRGAN sees far, and at a tile's edge zeros; this one sees less far.
    assert np.abs(upscaler.enlarge(pixels) - whole).mean() < 1
    longest = 48
    upscaler.enlarge(pixels)
    assert sizes == [192, 96, 192, 96, 48]
    for message, size in zip(caplog.messages, (96, 48), strict=True):
        assert message.endswith(
            f"4x-tiny ran out of memory: it goes on in tiles of {size} pixels"
        )
    longest = 192
    for _ in range(3):
        upscaler.enlarge(pixels)
    assert sizes[5:] == [96, 192, 192]


def test_an_image_for_which_no_tile_is_small_enough_is_tried_again_elsewhere(
    build: Build, monkeypatch
):
    path, _ = build()

    def fail(*_: object, **__: object) -> NoReturn:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(model, "in_tiles", fail)
    with pytest.raises(errors.TransientError, match="ran out of memory"):
        model.UpscalerCache(CPU).get(path).enlarge(esrgan.picture(8, 8))


def test_a_file_is_read_once_unless_it_is_replaced(build: Build):
    path, _ = build()
    cache = model.UpscalerCache(CPU)
    first = cache.get(path)
    assert cache.get(path) is first
    build("4x-tiny", scale=2)
    assert cache.get(path).scale == 2


def test_a_file_that_has_gone_is_fetched_again(tmp_path):
    with pytest.raises(errors.TransientError, match="'gone' cannot be read"):
        model.UpscalerCache(CPU).get(tmp_path / "gone.safetensors")


def test_a_file_of_something_else_is_refused_by_name(tmp_path):
    path = tmp_path / "lora.safetensors"
    save_file({"lora_unet_down.weight": torch.zeros(4, 4)}, path)
    with pytest.raises(errors.UnusableFileError, match="'lora' has an architecture"):
        model.UpscalerCache(CPU).get(path)


def test_a_network_for_grey_images_is_refused(build: Build):
    path, _ = build(channels=1)
    with pytest.raises(errors.UnusableFileError, match="does not enlarge RGB images"):
        model.UpscalerCache(CPU).get(path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda tensors: tensors.pop("model.1.sub.0.RDB2.conv3.0.weight"),
            "has tensors",
        ),
        (lambda tensors: tensors["model.0.bias"].fill_(torch.nan), "NaN, infinity"),
    ],
)
def test_damaged_weights_are_refused(build: Build, damage, reason: str):
    path, network = build()
    tensors = network.state_dict()
    damage(tensors)
    save_file(tensors, path)
    with pytest.raises(errors.UnusableFileError, match=reason):
        model.UpscalerCache(CPU).get(path)


def test_a_worker_without_spandrel_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "spandrel", None)
    with pytest.raises(errors.JobError, match=r"pip install '\.\[upscalers\]'"):
        model.read_upscaler((str(tmp_path / "x.safetensors"), 0, 0, 0), CPU)


def test_nothing_is_left_that_others_would_take_for_torchvision():
    program = """
import importlib.util, sys
from worker.engine.passes import upscaling
assert upscaling.import_spandrel().MAIN_REGISTRY.architectures()
found = importlib.util.find_spec("torchvision")
assert found is not None or not [name for name in sys.modules if name.startswith("torchvision")]
"""
    subprocess.run([sys.executable, "-c", program], check=True)
