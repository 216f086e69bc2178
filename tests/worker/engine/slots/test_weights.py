"""Another model's weights in an engine that goes on: its images, nothing of the one before."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import tiny_model
from families import tiny_families
from pixel import tiny_cascade
from worker.engine import contract, load
from worker.engine.checkpoint import load_checkpoint
from worker.engine.slots import engine as slots

CPU = torch.device("cpu")


def change_all_weights(source: Path, folder: Path) -> Path:
    """A model of the same architecture; returns its folder."""
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(5)
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        for key, tensor in tensors.items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensors[key] = tensor + (0.05 * noise * (1 + tensor.abs())).to(tensor.dtype)
        save_file(tensors, path, {"format": "pt"})
    return folder


def two_models(folder: Path, family: tiny_families.FamilyName) -> tuple[Path, Path]:
    first = tiny_families.build(folder / "first", family)
    second = change_all_weights(first, folder / "second")
    if family == "sd2":  # the schedule is the model's own, too
        tiny_families.build(folder / "v", "sd2", prediction_type="v_prediction")
        shutil.copytree(folder / "v" / "scheduler", second / "scheduler", dirs_exist_ok=True)
    return first, second


def engine_of(folder: Path, **settings: Any) -> slots.SlotEngine:
    checkpoint = load_checkpoint(folder, CPU, torch.float32)
    return slots.SlotEngine(checkpoint, **{"slots": 3, **settings})


def take(engine: slots.SlotEngine, folder: Path) -> None:
    swap = load.read_beside(engine, folder)
    assert swap is not None
    assert swap()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("sd1", {}),
        ("sd1", {"backend": "eager"}),
        ("sd2", {}),
        ("sdxl", {}),
        ("sdxl", {"is_low_rank": True, "backend": "eager"}),
    ],
)
def test_an_engine_draws_the_images_of_the_model_that_it_took_and_then_of_its_own(
    tmp_path: Path,
    make_request: Any,
    draw: Any,
    difference: Any,
    family: tiny_families.FamilyName,
    settings: dict[str, Any],
) -> None:
    first, second = folders = two_models(tmp_path, family)
    style = tiny_model.build_tiny_lora(tmp_path / "style.safetensors", first)
    lora = contract.Lora("style", style, 0.7, 0.9)
    # All slots with the same LoRA: it is merged into the shared weights, and must not stay there.
    alike = [make_request(seed=seed, steps=9, loras=(lora,), prompt="a dog") for seed in (3, 4, 5)]
    requests = [make_request(seed=1), make_request(seed=2, loras=(lora,), height=72)]
    expected = {}
    for folder in folders:
        alone = engine_of(folder, **settings)
        expected[folder] = [*draw(alone, *requests), *draw(alone, *alike)]
        alone.close()
    assert difference(expected[first][0], expected[second][0]) > 20

    engine = engine_of(first, **settings)
    if "backend" in settings:
        engine.warm_up(*engine.default_size)
    for folder in (first, second, first):
        if folder.name != engine.model_name:
            take(engine, folder)
        assert engine.model_name == folder.name
        images = [*draw(engine, *requests), *draw(engine, *alike)]
        if "is_low_rank" not in settings:
            assert (engine.weight_mode, engine._weights.merged != ()) == ("shared", True)
        for pair in zip(images, expected[folder], strict=True):
            assert difference(*pair) <= 1
        fresh = engine_of(folder)
        assert engine.self_check is not None
        assert fresh.self_check is not None
        assert engine.self_check.find_fault() is None
        assert engine.self_check.weights_id == fresh.self_check.weights_id
    assert engine.recompiles == 0
    engine.close()


def test_a_model_is_not_taken_while_there_are_jobs(tmp_path: Path, make_request: Any) -> None:
    first, second = two_models(tmp_path, "sd1")
    engine = engine_of(first)
    engine.admit(0, engine.prepare(make_request()))
    swap = load.read_beside(engine, second)
    assert swap is not None
    assert not swap()
    assert engine.model_name == "first"
    engine.close()


@pytest.mark.parametrize(
    "build",
    [
        lambda folder: tiny_families.build(folder, "sd2"),
        lambda folder: tiny_families.build(folder, "sd1", size=128),
        lambda folder: tiny_cascade.build(folder, "base"),
        lambda folder: folder,
    ],
    ids=["another family", "another native size", "a stage of a cascade", "no model"],
)
def test_a_model_of_another_architecture_needs_another_engine(
    tmp_path: Path, build: Callable[[Path], Path]
) -> None:
    engine = engine_of(tiny_families.build(tmp_path / "first", "sd1"))
    assert load.read_beside(engine, build(tmp_path / "second")) is None
    engine.close()
