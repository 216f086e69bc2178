"""A LoRA that all images share is merged once, with those of jobs beside it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from calls import watch_calls
from drawing import ROUNDING, difference, draw, make_request
from imagefleet import errors
from worker.engine import checkpoint as checkpoints
from worker.engine import contract, load
from worker.engine.lora.shared import Merger


@pytest.fixture(scope="module")
def accelerated(checkpoint: Path, lora_paths: list[Path]) -> Any:
    return load.EngineSettings(checkpoint, "cpu", slots=3, accelerator=lora_paths[0])


@pytest.fixture(scope="module")
def merged_engine(accelerated) -> Any:
    """Shared by tests that leave it unchanged."""
    return load.load_engine(accelerated)


def test_an_accelerator_is_as_a_lora_of_every_job(
    slot_engine,
    merged_engine,
    styles: list[contract.Lora],
):
    shared, style, other = styles
    own = [(), (other, style), (shared,)]
    images = draw(merged_engine, *(make_request(loras=loras) for loras in own))
    twice = replace(shared, text_encoder_weight=2.0, unet_weight=2.0)
    tagged = [(shared,), (shared, other, style), (twice,)]
    for image, loras in zip(images, tagged, strict=True):
        assert (
            difference(image, draw(slot_engine, make_request(loras=loras))[0])
            <= ROUNDING
        )
    assert difference(images[0], draw(slot_engine, make_request())[0]) > 20


def test_the_sum_of_its_weights_is_of_what_it_draws_with(accelerated, merged_engine):
    """Else each check of the weights would find them damaged; and it is another model."""
    assert merged_engine.self_check.find_fault() is None
    plain = checkpoints.load_checkpoint(
        accelerated.model, torch.device("cpu"), torch.float32
    )
    assert merged_engine.checkpoint.weight_sums != plain.weight_sums


def test_a_model_that_is_changed_to_has_the_accelerator_too(accelerated, merged_engine):
    (expected,) = draw(merged_engine, make_request())
    assert load.read_beside(merged_engine, accelerated)()
    assert (draw(merged_engine, make_request())[0] == expected).all()


@pytest.mark.parametrize("has_style", [False, True])
def test_one_that_many_prompts_name_is_merged_once_unless_each_has_a_style_beside_it(
    make_slot_engine,
    styles: list[contract.Lora],
    monkeypatch,
    has_style: bool,
):
    merged = list[int]()
    activate = Merger.activate

    monkeypatch.setattr(
        Merger,
        "activate",
        lambda *given: merged.append(len(given[1])) or activate(*given),
    )
    shared, style, _ = styles
    styles = [
        (replace(style, unet_weight=0.1 * at),) if has_style else ()
        for at in range(1, 13)
    ]
    requests = [
        make_request(
            seed=seed, cfg_scale=1.0, width=32, height=32, loras=(shared, *own)
        )
        for seed, own in enumerate(styles)
    ]
    engine = make_slot_engine(slots=2)
    calls = watch_calls(monkeypatch, engine)
    draw(engine, *requests)
    mode, merges = ("per_slot", []) if has_style else ("shared", [1])
    assert {(call.mode, call.slot_rows) for call in calls} == {(mode, 1)}
    assert merged == merges


def test_a_file_that_is_no_lora_of_the_model_is_refused(accelerated, tmp_path):
    broken = tmp_path / "lcm.safetensors"
    broken.write_bytes(b"\0" * 100)
    for path in (broken, tmp_path / "missing-lcm.safetensors"):
        settings = load.EngineSettings(accelerated.model, "cpu", accelerator=path)
        with pytest.raises(errors.SetupError, match=f"the accelerator '{path.name}'"):
            load.load_engine(settings)


def test_a_lora_of_the_text_encoder_alone_is_refused(
    accelerated, lora_paths: list[Path], tmp_path
):
    of_text = {
        key: each for key, each in load_file(lora_paths[0]).items() if "lora_te" in key
    }
    save_file(of_text, tmp_path / "lcm.safetensors")
    settings = replace(accelerated, accelerator=tmp_path / "lcm.safetensors")
    with pytest.raises(errors.SetupError, match="changes nothing of the UNet"):
        load.load_engine(settings)
