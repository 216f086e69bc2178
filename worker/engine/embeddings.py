"""Reads textual inversion embeddings: vectors that stand in a prompt for tokens."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from imagefleet.errors import UnsettledFileError
from imagefleet.files import embedding
from imagefleet.files.embedding import CLIP_G, CLIP_L
from imagefleet.files.safetensors import UnusableError, identify
from worker.engine import contract
from worker.engine.files.safetensors import Tensors, named, refuse_damaged, tensors_of

#: The same, by the network's name in diffusers.
NAMES = {"text_encoder": CLIP_L, "text_encoder_2": CLIP_G}


@dataclass(frozen=True)
class Embedding:
    """The vectors [length, width] for each text encoder, on the CPU; the same if the file is."""

    name: str = field(compare=False)
    sha256: str
    vectors: Tensors = field(compare=False, repr=False)

    @property
    def length(self) -> int:
        return len(next(iter(self.vectors.values())))

    @property
    def size_bytes(self) -> int:
        return sum(each.nbytes for each in self.vectors.values())


def read(
    embedding: contract.Embedding, widths: Mapping[str, int], dtype: torch.dtype
) -> Embedding:
    """Reads a file for text encoders whose tokens' vectors have these *widths*, as *dtype*.

    Raises UnusableFileError if it is no embedding, or none for this model, TransientError if it
    could not be read, and UnsettledFileError if it has changed meanwhile.
    """
    with named(f"the embedding {embedding.name!r}, which the prompt names,"):
        identity = identify(embedding.path)
        if hashlib.sha256(embedding.path.read_bytes()).hexdigest() != embedding.sha256:
            raise UnsettledFileError(
                f"the file of the embedding {embedding.name!r} has just changed"
            )
        vectors = vectors_of(tensors_of(identity), widths, dtype)
    return Embedding(embedding.name, embedding.sha256, vectors)


def vectors_of(
    tensors: Tensors, widths: Mapping[str, int], dtype: torch.dtype
) -> Tensors:
    """An embedding's vectors [length, width] for each text encoder; raises UnusableError."""
    integers = [key for key, each in tensors.items() if not each.is_floating_point()]
    shapes = {key: each.shape for key, each in tensors.items()}
    keys = embedding.read(shapes, integers)
    if len(widths) == 1 and "" in keys:  # whatever the tensor's name
        keys = dict(zip(widths, keys.values(), strict=True))
    found = {
        name: tensors[key].view(-1, tensors[key].shape[-1])
        for name, key in keys.items()
    }
    if {name: each.shape[1] for name, each in found.items()} != widths:
        made_for, _ = embedding.describe(shapes, integers)
        numbers = " and ".join(f"{width:,} numbers" for width in widths.values())
        raise UnusableError(
            f"was made for {made_for}; this model takes vectors of {numbers}"
        )
    vectors = {name: each.to(dtype) for name, each in found.items()}
    refuse_damaged(vectors)
    return vectors
