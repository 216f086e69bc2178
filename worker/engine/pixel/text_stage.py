"""The text stage of a cascade: prompts become text states, on a CPU or a GPU with enough memory.

Prompts are cleaned as the captions were that IF was trained with, by diffusers' own function.
Without its libraries diffusers leaves that out; here they are required, or states would differ from
machine to machine. An encoder that was trained with captions as they are says so in its
configuration: `"clean_caption": false`.
"""

import functools
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import T5EncoderModel
from transformers.utils import logging as transformers_logging

from imagefleet.errors import SetupError
from worker.engine.families import prompts, reading
from worker.engine.families.prompts import PromptEncoder
from worker.engine.pixel import text_states

#: The encoder's `model_type`.
KIND = "t5"

#: The encoder of DeepFloyd IF's stages, where no configuration names one.
DEFAULT_NAME = "t5-v1_1-xxl"


class TextStage(PromptEncoder):
    """A T5 encoder; its states are those of diffusers' `IFPipeline.encode_prompt`."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """*folder* has the subfolders `text_encoder` and `tokenizer`, as every IF stage's has.

        Raises SetupError if one of them is missing or damaged. See `require_libraries`.
        """
        text_of = clean_caption if _cleans(folder) else text_states.clean
        # DeepFloyd's folders have a spiece.model, which takes a library.
        own = folder / "tokenizer"
        if (
            importlib.util.find_spec("sentencepiece") is None
            and not (own / "tokenizer.json").is_file()
        ):
            raise SetupError(
                f"{str(own)!r} has no tokenizer.json: to read its spiece.model, pip install '.[t5]'"
            )
        encoder = reading.read_network(T5EncoderModel, folder / "text_encoder")
        encoder.to(device=device, dtype=dtype)
        super().__init__(folder, encoder, device, text_states.TOKENS, text_of)

    def _states(self, ids: Tensor, mask: Tensor) -> Tensor:
        states: Tensor = self._encoder(ids, attention_mask=mask)[0]
        return states


def clean_caption(prompt: str) -> str:
    """A prompt as the encoder reads it: diffusers' `_text_preprocessing`, which cleans it twice."""
    from bs4 import MarkupResemblesLocatorWarning

    pipeline = _pipeline_class()
    caption = text_states.clean(prompt)
    with warnings.catch_warnings():
        # It takes a prompt that is hardly more than a file's name for one to be opened.
        warnings.simplefilter("ignore", MarkupResemblesLocatorWarning)
        for _ in range(2):
            # The list of what is taken out is theirs.
            caption = pipeline._clean_caption(pipeline, caption)  # noqa: SLF001
    return caption


@functools.cache
def _pipeline_class() -> Any:
    """The class `IFPipeline` of diffusers; it brings a safety checker along, which nobody uses."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it would warn that torchvision is missing
    try:
        from diffusers import IFPipeline
    finally:
        transformers_logging.set_verbosity(verbosity)
    return IFPipeline


def require_libraries(folder: Path) -> None:
    """Raises SetupError, with the command to run, where prompts for a stage cannot be cleaned."""
    if _cleans(folder) and importlib.util.find_spec("bs4") is None:
        raise SetupError(
            "beautifulsoup4 is not installed, which IF's text encoder needs: pip install '.[t5]'"
        )


def encoder_name(folder: Path) -> str:
    """The name of a stage's text encoder, whether its weights are there or not."""
    return prompts.name_of(folder, DEFAULT_NAME)


def _cleans(folder: Path) -> bool:
    return bool(prompts.config_of(folder).get("clean_caption", True))
