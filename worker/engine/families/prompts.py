"""Text encoders that read a prompt whole, as Qwen3 does for flows and T5 for pixels."""

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from imagefleet.errors import SetupError
from imagefleet.validation import JSONDict
from worker.engine.families import reading


class PromptEncoder:
    """An encoder with its tokenizer; for any thread."""

    def __init__(
        self,
        folder: Path,
        encoder: Any,
        device: torch.device,
        tokens: int,
        text_of: Callable[[str], str],
    ) -> None:
        """*folder* has the subfolder `tokenizer`; prompts are padded to *tokens*, or cut off there.

        *text_of*: what the encoder reads for a prompt.
        Raises SetupError if the tokenizer is missing, damaged or another encoder's.
        """
        self._encoder = encoder
        self._device = device
        self._tokens = tokens
        self._text_of = text_of
        self._tokenizing = threading.Lock()
        self._lock = threading.Lock()
        own = folder / "tokenizer"
        if not own.is_dir():
            raise SetupError(f"the text encoder's tokenizer is missing: {str(own)!r}")
        with reading.named(own, "the tokenizer "):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                own, local_files_only=True
            )
        if len(self._tokenizer) > encoder.config.vocab_size:
            # On a GPU, a token id out of range is a device-side assert, which ends the process.
            raise SetupError(
                f"the tokenizer of {str(folder)!r} belongs to another text encoder"
            )

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """The states of prompts [prompts, tokens, width] in the encoder's type, on its device."""
        self.refuse_long(prompts)
        texts = list(map(self._text_of, prompts))
        with self._tokenizing:
            found = self._tokenizer(
                texts,
                padding="max_length",
                max_length=self._tokens,
                truncation=True,
                return_tensors="pt",
            )
        with self._lock:
            found = found.to(self._device)
            return self._states(found.input_ids, found.attention_mask)

    def refuse_long(self, prompts: Iterable[str]) -> None:
        """Raises JobError for a prompt that may not be cut off; any may, unless a subclass says."""

    def _states(self, ids: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError


def config_of(folder: Path) -> JSONDict:
    """The configuration of a model's text encoder."""
    return reading.read_json(folder / "text_encoder" / "config.json")


def name_of(folder: Path, default: str) -> str:
    """The name of a model's text encoder, whether its weights are there or not."""
    found = config_of(folder).get("_name_or_path") or default
    return str(found).rstrip("/").rpartition("/")[2]


def has_encoder(folder: Path, kind: str) -> bool:
    """True if a model's folder has the weights of a text encoder of a *kind*, such as "t5"."""
    is_known = config_of(folder).get("model_type", kind) == kind
    return is_known and any((folder / "text_encoder").glob("*.safetensors"))


def require_encoder(folder: Path, kind: str) -> None:
    """Raises SetupError for a folder without these weights."""
    if not has_encoder(folder, kind):
        raise SetupError(
            f"{str(folder)!r} has no weights of a {kind.capitalize()} encoder"
            " (text_encoder/*.safetensors)"
        )
