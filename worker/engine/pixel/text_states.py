"""Text states as files: what a text encoder says of a prompt, for all stages of a cascade.

DeepFloyd IF's encoder, T5-XXL, takes 9.5 GB in float16; the states of a prompt take 631 kB. So they
are computed once, by `text_stage`. A file has the tensor `states` [tokens, width] in float16, or
for chat models, whose states take 7.9 MB, in int8 with a scale for each token; the encoder's name
and the SHA-256 of the prompt. Its own name is the SHA-256 of both. Imports no torch
until states are read or written: whoever fills the queue knows their names.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from imagefleet.errors import JobError, TransientError
from imagefleet.files.contents import TEXT_STATES_FORMAT

if TYPE_CHECKING:
    import torch

#: DeepFloyd IF was trained with no more, though T5 takes any number.
TOKENS = 77

#: In place of a file: states of zeros, for an image that only checks a node.
ZEROS = Path("zeros")

_TENSOR = "states"
_SCALES = "scales"

#: In the names of chat models' encoders (`flow.text.encoder_name`): prompts are read as they stand.
CHAT_MARK = " layers "


def stem(prompt: str, encoder: str) -> str:
    """The name of the file with a prompt's states by the *encoder* of that name, unsuffixed."""
    return _sha256(f"{encoder}\n{read_by(encoder, prompt)}")


def read_by(encoder: str, prompt: str) -> str:
    """A prompt as the *encoder* of that name tells it from others."""
    return prompt if CHAT_MARK in encoder else clean(prompt)


def clean(prompt: str) -> str:
    """Normal form of a prompt: prompts with the same form share a file of states.

    The encoder reads them cleaned further (`text_stage`).
    """
    return prompt.lower().strip()


def content(prompt: str, encoder: str, states: torch.Tensor) -> bytes:
    """The file with a prompt's states [tokens, width]."""
    from safetensors.torch import save

    from worker.engine.networks import int8

    states = states.cpu()
    tensors = {_TENSOR: states.half()}
    if CHAT_MARK in encoder:
        rounded, scales = int8.round_rows(states)
        tensors = {_TENSOR: rounded, _SCALES: scales}
    data: bytes = save(
        {name: each.contiguous() for name, each in tensors.items()},
        _metadata(prompt, encoder),
    )
    return data


def read(
    path: Path | None, prompt: str, encoder: str, width: int, tokens: int = TOKENS
) -> torch.Tensor:
    """The states [*tokens*, *width*] of a prompt in a file.

    Raises JobError if there is none, or they are of another prompt or encoder, or not finite, and
    TransientError if the file cannot be read.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    if path == ZEROS:
        return torch.zeros(tokens, width)
    if path is None:
        raise JobError(
            "the prompt's text states are missing, and this model has no text encoder:"
            " `imagefleet files make text` makes them (docs/models.md)"
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            states: torch.Tensor = file.get_tensor(_TENSOR).clone()
            if _SCALES in file.keys():  # noqa: SIM118 - it is no mapping
                states = states * file.get_tensor(_SCALES)
    except (OSError, SafetensorError) as error:
        raise TransientError(
            f"the text states {path.name!r} cannot be read: {error}"
        ) from (error)
    if metadata != _metadata(prompt, encoder):
        raise JobError(
            f"{path.name!r} does not have the text states of this prompt by {encoder!r}"
        )
    if tuple(states.shape) != (tokens, width) or not states.isfinite().all():
        raise JobError(
            f"the text states {path.name!r} are damaged: {list(states.shape)} instead of"
            f" [{tokens}, {width}], or not finite"
        )
    return states


def _metadata(prompt: str, encoder: str) -> dict[str, str]:
    return {
        "format": TEXT_STATES_FORMAT,
        "encoder": encoder,
        "prompt_sha256": _sha256(read_by(encoder, prompt)),
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
