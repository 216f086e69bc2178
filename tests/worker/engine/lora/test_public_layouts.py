"""Layouts of public LoRAs and embeddings: drawn by their models, or refused in one sentence.

The layouts are named by the report that they are from: `14005` and `3437` of diffusers, `275` of
sd-scripts, `8360` of AUTOMATIC1111, `3060` of ComfyUI, `104` of efficiency-nodes.
"""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import save
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from imagefleet import errors
from imagefleet.files import kinds, safetensors
from worker.engine import contract, embeddings
from worker.engine.families import reading, table
from worker.engine.lora import file as lora_file

LAYOUTS = json.loads(Path(__file__).with_name("layouts.json").read_text())
TYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
WIDTHS = {"sd1": {"clip_l": 768}, "sdxl": {"clip_l": 768, "clip_g": 1280}}
KEY = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
Tensors = dict[str, torch.Tensor]


def made(layout: dict[str, Any]) -> Tensors:
    return {
        key: torch.full(shape, 0.5).to(TYPES[kind])
        for key, (kind, shape) in layout["tensors"].items()
    }


@pytest.fixture(scope="module")
def models() -> dict[str, lora_file.Layers]:
    """The layers of the families' own sizes, without memory for weights."""

    def layers(family: table.Family, **changes: int) -> lora_file.Layers:
        return lora_file.Layers(
            reading.build(UNet2DConditionModel, {**family.unet_config, **changes}),
            {
                each.network: reading.build(
                    CLIPTextModelWithProjection
                    if each.rules.has_pooled
                    else CLIPTextModel,
                    each.config,
                )
                for each in family.text_encoders
            },
        )

    return {
        "sd1": layers(table.SD1),
        "sd2": layers(table.SD2),
        "sdxl": layers(table.SDXL),
        "inp": layers(table.SD1, in_channels=9),
    }


def of_worker(layers: lora_file.Layers, path: Path) -> str:
    """Why a worker refuses a LoRA; '' if it draws it."""
    lora = contract.Lora(path.stem, path, 1.0, 1.0)
    try:
        lora_file.LoraCache(layers, 10**9).get(lora)
    except errors.UnusableFileError as error:
        return error.message
    return ""


def of_console(kind: kinds.FileKind, path: Path) -> str:
    """Why `files add` refuses a file; '' if it stores it."""
    try:
        header = safetensors.read_header(io.BytesIO(path.read_bytes()))
        kinds.check(kind, str(path), header)
    except errors.SetupError as error:
        return error.message
    return ""


@pytest.mark.parametrize("name", LAYOUTS["loras"])
def test_each_layout_of_a_lora_is_stored_and_drawn_by_its_models(
    models: dict[str, lora_file.Layers], tmp_path, name: str
):
    layout = LAYOUTS["loras"][name]
    path = tmp_path / f"{name}.safetensors"
    path.write_bytes(save(made(layout)))
    assert of_console(kinds.LORA, path) == ""
    drawn_by = [model for model in models if of_worker(models[model], path) == ""]
    assert sorted(drawn_by) == layout["drawn_by"]
    assert drawn_by


def pair(rank: int = 2, **more: torch.Tensor) -> Tensors:
    factors = {
        "lora_down.weight": torch.ones(2, 320),
        "lora_up.weight": torch.ones(320, rank),
    }
    return {f"{KEY}.{name}": each for name, each in {**factors, **more}.items()}


BROKEN: dict[str, Tensors] = {
    "alone": {f"{KEY}.alpha": torch.ones(())},
    "ranks": pair(3),
    "integers": pair(alpha=torch.ones(()))
    | {f"{KEY}.lora_up.weight": torch.ones(320, 2).int()},
    "boft": {f"{KEY}.oft_blocks": torch.ones(3, 4, 80, 80)},
    "ia3 of neither": {f"{KEY}.weight": torch.ones(320)},
    "empty": pair(alpha=torch.ones(0)),
    "two embeddings in one": pair()
    | {f"bundle_emb.a.{key}": torch.ones(1, 768) for key in "bc"},
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_every_worker_refuses_is_never_stored_and_for_the_same_reason(
    models: dict[str, lora_file.Layers], tmp_path, name: str
):
    path = tmp_path / f"{name}.safetensors"
    path.write_bytes(
        save({key: each.contiguous() for key, each in BROKEN[name].items()})
    )
    reason = of_console(kinds.LORA, path)
    assert reason.startswith(f"the LoRA {name!r} ")
    assert {of_worker(models[name], path) for name in ("sd1", "sd2", "inp")} == {reason}


DAMAGED: dict[str, Tensors] = {
    "nan": {**pair(), f"{KEY}.alpha": torch.tensor(float("nan"))},
    "infinity in bfloat16": {
        key: (each / 0).bfloat16() for key, each in pair().items()
    },
    "nan in float8": {
        key: (each * float("nan")).to(torch.float8_e4m3fn)
        for key, each in pair().items()
    },
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_numbers_are_refused_by_every_worker(
    models: dict[str, lora_file.Layers], tmp_path, name: str
):
    path = tmp_path / f"{name}.safetensors"
    path.write_bytes(
        save({key: each.contiguous() for key, each in DAMAGED[name].items()})
    )
    for model in ("sd1", "sd2", "inp"):
        assert of_worker(models[model], path).startswith(
            f"the LoRA {name!r} is damaged: "
        )


@pytest.mark.parametrize("name", LAYOUTS["embeddings"])
def test_each_layout_of_an_embedding_is_stored_and_drawn_or_refused_in_both_places(
    tmp_path, name: str
):
    layout = LAYOUTS["embeddings"][name]
    path = tmp_path / f"{name}.safetensors"
    path.write_bytes(save(tensors := made(layout)))
    drawn_by = []
    reasons = set()
    for model, widths in WIDTHS.items():
        try:
            found = embeddings.vectors_of(tensors, widths, torch.float32)
        except safetensors.UnusableError as error:
            reasons.add(f"the embedding {name!r} {error}")
        else:
            drawn_by.append(model)
            assert {key: each.shape[1] for key, each in found.items()} == widths
    assert drawn_by == layout["drawn_by"]
    assert of_console(kinds.EMBEDDING, path) == ("" if drawn_by else reasons.pop())
