"""The text encoder of a model's folder, by which `files make text` makes states of prompts."""

from pathlib import Path

import torch

from worker.engine import device as devices
from worker.engine.families import prompts
from worker.engine.families.prompts import PromptEncoder
from worker.engine.flow import checkpoint, text
from worker.engine.pixel import text_stage


def name_of(model: Path) -> str:
    """The name of a folder's encoder; raises SetupError if the folder has none."""
    family = checkpoint.family_of(model)
    if family is None:
        prompts.require_encoder(model, text_stage.KIND)
        text_stage.require_libraries(model)
        return text_stage.encoder_name(model)
    prompts.require_encoder(model, text.KIND)
    return text.encoder_name(model, family.text)


def open_encoder(model: Path, device: torch.device) -> PromptEncoder:
    """The encoder of a folder that has one, on the device."""
    family = checkpoint.family_of(model)
    if family is None:
        dtype = devices.find_dtype("auto", device)
        return text_stage.TextStage(model, device, dtype)
    dtype = devices.find_dtype("auto", device, "bfloat16")
    encoder = text.ChatEncoder(model, family.text, device, dtype)
    encoder.place(may_stay=True)
    return encoder
