"""The text encoder of a model's folder, by which `files make text` makes states of prompts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from imagefleet.errors import SetupError
from worker.engine import device as devices
from worker.engine.flow import checkpoint, text
from worker.engine.pixel import text_stage


class Encoder(Protocol):
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """The states of prompts [prompts, tokens, width]."""


def name_of(model: Path) -> str:
    """The name of a folder's encoder; raises SetupError if the folder has none."""
    family = checkpoint.family_of(model)
    if family is None:
        text_stage.require_encoder(model)
        return text_stage.encoder_name(model)
    if not text.has_encoder(model):
        raise SetupError(
            f"{str(model)!r} has no weights of a Qwen3 encoder (text_encoder/*.safetensors)"
        )
    return text.encoder_name(model, family.text)


def open_encoder(model: Path, device: torch.device) -> Encoder:
    """The encoder of a folder that has one, on the device."""
    family = checkpoint.family_of(model)
    if family is None:
        dtype = devices.find_dtype("auto", device)
        return text_stage.TextStage(model, device, dtype)
    dtype = devices.find_dtype("auto", device, "bfloat16")
    encoder = text.PromptEncoder(model, family.text, device, dtype)
    encoder.place(may_stay=True)
    return encoder
