"""The text stage of a cascade: prompts become text states, on a CPU or a GPU with enough memory.

Prompts are cleaned as the captions were that IF was trained with, by diffusers' own function.
Without its libraries diffusers leaves that out; here they are required, or states would differ from
machine to machine. An encoder that was trained with captions as they are says so in its
configuration: `"clean_caption": false`.
"""

import functools
import importlib.util
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, T5EncoderModel
from transformers.utils import logging as transformers_logging

from imagefleet.errors import SetupError
from imagefleet.validation import JSONDict
from worker.engine.families import reading
from worker.engine.pixel import text_states

#: The encoder of DeepFloyd IF's stages, where no configuration names one.
DEFAULT_NAME = "t5-v1_1-xxl"


class TextStage:
    """A T5 encoder with its tokenizer; for any thread."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """*folder* has the subfolders `text_encoder` and `tokenizer`, as every IF stage's has.

        Raises SetupError if one of them is missing or damaged. See `require_encoder`.
        """
        cleans = _config(folder).get("clean_caption", True)
        self._clean = clean_caption if cleans else text_states.clean
        encoder = reading.read_network(T5EncoderModel, folder / "text_encoder")
        self._encoder: Any = encoder.to(device=device, dtype=dtype)
        self._tokenizer = _read_tokenizer(folder / "tokenizer")
        if len(self._tokenizer) > self._encoder.config.vocab_size:
            # On a GPU, a token id out of range is a device-side assert, which ends the process.
            raise SetupError(
                f"the tokenizer of {str(folder)!r} belongs to another text encoder"
            )
        self._device = device
        self._lock = threading.Lock()

    @torch.no_grad()
    def encode(self, prompts: Iterable[str]) -> Tensor:
        """The states of prompts [prompts, 77, width] in the encoder's type.

        As by diffusers' `IFPipeline.encode_prompt` with `clean_caption`: cut off at 77 tokens.
        """
        with self._lock:
            tokens = self._tokenizer(
                [self._clean(each) for each in prompts],
                padding="max_length",
                max_length=text_states.TOKENS,
                truncation=True,
                return_tensors="pt",
            ).to(self._device)
            states: Tensor = self._encoder(
                tokens.input_ids, attention_mask=tokens.attention_mask
            )[0]
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


def require_encoder(folder: Path) -> None:
    """Raises SetupError where a stage's folder has no weights of T5, or a library is missing."""
    if not has_encoder(folder):
        raise SetupError(
            f"{str(folder)!r} has no weights of a T5 encoder (text_encoder/*.safetensors)"
        )
    require_libraries(folder)


def require_libraries(folder: Path) -> None:
    """Raises SetupError, with the command to run, where prompts for a stage cannot be cleaned."""
    cleans = _config(folder).get("clean_caption", True)
    if cleans and importlib.util.find_spec("bs4") is None:
        raise SetupError(
            "beautifulsoup4 is not installed, which IF's text encoder needs: pip install '.[t5]'"
        )


def encoder_name(folder: Path) -> str:
    """The name of a stage's text encoder, whether its weights are there or not."""
    found = _config(folder).get("_name_or_path") or DEFAULT_NAME
    return str(found).rstrip("/").rpartition("/")[2]


def has_encoder(folder: Path) -> bool:
    """True if a stage's folder has the weights of its text encoder, a T5."""
    is_t5 = _config(folder).get("model_type", "t5") == "t5"
    return is_t5 and any((folder / "text_encoder").glob("*.safetensors"))


def _config(folder: Path) -> JSONDict:
    return reading.read_json(folder / "text_encoder" / "config.json")


def _read_tokenizer(folder: Path) -> Any:
    """T5's tokenizer, as a tokenizer.json or as the spiece.model that DeepFloyd's folders have."""
    has_library = importlib.util.find_spec("sentencepiece") is not None
    if not (has_library or (folder / "tokenizer.json").is_file()):
        raise SetupError(
            f"{str(folder)!r} has no tokenizer.json: to read its spiece.model, pip install '.[t5]'"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (*reading.LOADING_ERRORS, ImportError) as error:
        raise SetupError(
            f"the tokenizer {str(folder)!r} cannot be loaded: {reading.brief(error)}"
        ) from error
