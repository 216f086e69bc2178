"""Reads textual inversion embeddings: vectors that stand in a prompt for tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import safetensors.torch
import torch
from safetensors import SafetensorError

from imagefleet import errors
from imagefleet.files.contents import EMBEDDING_WIDTHS
from imagefleet.job.clip import CHUNK_TOKENS
from worker.engine import contract
from worker.engine.files.safetensors import UnusableError, named, refuse_damaged

#: The text encoder that each tensor is for, in the file of an embedding for several.
CLIP_L, CLIP_G = "clip_l", "clip_g"

#: The same, by the network's name in diffusers.
NAMES = {"text_encoder": CLIP_L, "text_encoder_2": CLIP_G}

#: The names that diffusers' training scripts for SDXL gave these tensors at first.
_ALIASES = {"text_encoders_0": CLIP_L, "text_encoders_1": CLIP_G}

#: What the library raises for a damaged file.
_DAMAGED = (SafetensorError, ValueError, KeyError, TypeError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vectors [length, width] for each text encoder, on the CPU; the same if the file is."""

    name: str = field(compare=False)
    sha256: str
    length: int = field(compare=False)
    vectors: Mapping[str, torch.Tensor] = field(compare=False, repr=False)

    @property
    def size_bytes(self) -> int:
        return sum(each.nbytes for each in self.vectors.values())


def read(embedding: contract.Embedding, widths: Mapping[str, int], dtype: torch.dtype) -> Embedding:
    """Reads a file for text encoders whose tokens' vectors have these *widths*, as *dtype*.

    Raises UnusableFileError if it is no embedding, or none for this model, TransientError if it
    could not be read, and UnsettledFileError if it has changed meanwhile.
    """
    with named(f"the embedding {embedding.name!r}, which the prompt names,"):
        content = embedding.path.read_bytes()
        if hashlib.sha256(content).hexdigest() != embedding.sha256:
            raise errors.UnsettledFileError(
                f"the file of the embedding {embedding.name!r} has just changed"
            )
        try:
            tensors = safetensors.torch.load(content)
        except _DAMAGED as error:
            raise UnusableError(f"is not a complete .safetensors file: {error}") from error
        found = _by_encoder(tensors, widths)
        lengths = {len(each) for each in found.values()}
        if len(lengths) > 1:
            shapes = ", ".join(f"{key} {list(each.shape)}" for key, each in found.items())
            raise UnusableError(f"gives text encoders different numbers of vectors ({shapes})")
        (length,) = lengths
        if not 0 < length <= CHUNK_TOKENS:
            raise UnusableError(f"has {length:,} vectors; a prompt's chunk holds {CHUNK_TOKENS}")
        vectors = {key: each.to(dtype) for key, each in found.items()}
        refuse_damaged(vectors)
    return Embedding(embedding.name, embedding.sha256, length, vectors)


def _by_encoder(
    tensors: Mapping[str, torch.Tensor], widths: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """The vectors for each text encoder, as [length, width]."""
    named = {_ALIASES.get(key, key): each for key, each in tensors.items()}
    if len(widths) == 1 and len(named) == 1:  # whatever the tensor's name
        found = dict(zip(widths, named.values(), strict=True))
    elif named.keys() == widths.keys():
        found = {key: named[key] for key in widths}
    else:
        raise _unfit(named, widths)
    found = {key: each[None] if each.dim() == 1 else each for key, each in found.items()}
    for key, item in found.items():
        if item.dim() != 2 or not item.is_floating_point():  # noqa: PLR2004 - [vectors, width]
            raise UnusableError(f"holds {item.dtype} of the shape {list(item.shape)}")
        if item.shape[1] != widths[key]:
            raise _unfit(named, widths)
    return found


def _unfit(tensors: Mapping[str, torch.Tensor], widths: Mapping[str, int]) -> UnusableError:
    """Says what the embedding was made for, and what this model needs."""
    if {CLIP_L, CLIP_G} <= tensors.keys():
        origin = "was made for SDXL"
    elif len(tensors) == 1:
        (tensor,) = tensors.values()
        width = tensor.shape[-1] if tensor.dim() else 0
        made_for = f", as for {EMBEDDING_WIDTHS[width]}" if width in EMBEDDING_WIDTHS else ""
        origin = f"has vectors of {width:,} numbers{made_for}"
    else:
        keys = ", ".join(sorted(repr(key[:40]) for key in tensors)[:3])
        origin = f"holds {len(tensors):,} tensors ({keys})" if tensors else "is empty"
    needed = " and ".join(
        f"{width:,} numbers" + (f" for {key}" if len(widths) > 1 else "")
        for key, width in widths.items()
    )
    return UnusableError(f"{origin}; this model takes vectors of {needed}")
