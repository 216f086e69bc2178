"""`imagefleet files add lora FOLDER` with an adapter that peft has saved."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from imagefleet.files import adapter, contents, safetensors
from in_process import Imagefleet, assert_refused, told

LAYER = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "watercolor"
    folder.mkdir()
    config = {"peft_type": "VERA", "r": 4, "target_modules": ["to_q"]}
    (folder / adapter.CONFIG).write_text(json.dumps(config))
    tensors = {
        "base_model.vera_A": torch.ones(4, 8),
        f"base_model.model.{LAYER}.vera_lambda_b": torch.zeros(8),
    }
    save_file(tensors, folder / adapter.WEIGHTS)
    return folder


def test_an_adapter_is_stored_as_one_file_under_the_folders_name(
    in_process: Imagefleet, folder: Path, tmp_path
):
    storage = f"--storage=local:{tmp_path / 'data'}"
    added = in_process("files", "add", "lora", str(folder), storage, "--json")
    (row,) = told(added)["files"]
    assert row["content"] == "SD 1.x VERA adapter"
    assert row["blob"] == "loras/watercolor.safetensors"
    (stored,) = (tmp_path / "data").rglob("watercolor.safetensors")
    assert sorted(load_file(stored)) == [
        "unet.base_model.vera_A",
        f"unet.{LAYER}.vera_lambda_b",
    ]
    with stored.open("rb") as file:
        metadata = safetensors.read_header(file).metadata
    assert json.loads(metadata[contents.ADAPTER_METADATA])["unet.peft_type"] == "VERA"


def test_an_adapter_without_its_weights_is_refused_before_anything_is_stored(
    in_process: Imagefleet, folder: Path, tmp_path
):
    (folder / adapter.WEIGHTS).unlink()
    storage = f"--storage=local:{tmp_path / 'data'}"
    assert_refused(
        in_process("files", "add", "lora", str(folder), storage),
        "save the adapter with peft's save_pretrained",
    )
    assert not (tmp_path / "data").exists()
