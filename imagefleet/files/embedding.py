"""Reads the tensors of a textual inversion embedding by their names and shapes alone."""

from collections.abc import Collection, Mapping, Sequence

from imagefleet.files.safetensors import UnusableError
from imagefleet.job.clip import CHUNK_TOKENS

#: The shapes of tensors by their names.
Shapes = Mapping[str, Sequence[int]]

#: The text encoder that each tensor is for, in the file of an embedding for several.
CLIP_L = "clip_l"
CLIP_G = "clip_g"

#: The names that diffusers' training scripts for SDXL gave these tensors at first.
_ALIASES = {"text_encoders_0": CLIP_L, "text_encoders_1": CLIP_G}

#: Models by the widths of the vectors for their text encoders.
_FAMILIES = {(768,): "SD 1.x", (1024,): "SD 2.x", (768, 1280): "SDXL"}


def read(shapes: Shapes, integers: Collection[str] = ()) -> dict[str, str]:
    """The keys of SDXL's two tensors by text encoder, or that of the only one, as ''.

    As in AUTOMATIC1111, others beside SDXL's are left out. *integers*: the keys of those of no
    floating point. Raises UnusableError if it is no embedding.
    """
    found = {_ALIASES.get(key, key): key for key in shapes}
    if {CLIP_L, CLIP_G} <= found.keys():
        found = {name: found[name] for name in (CLIP_L, CLIP_G)}
    elif len(found) == 1:
        found = {"": next(iter(shapes))}
    else:
        shown = ", ".join(sorted(repr(key[:40]) for key in shapes)[:3])
        raise UnusableError(
            f"holds {len(shapes):,} tensors ({shown}): an embedding has one, [vectors, width], or"
            " for SDXL two, clip_l and clip_g"
        )
    for key in found.values():
        if not 1 <= len(shapes[key]) <= 2 or key in integers:  # noqa: PLR2004 - [vectors, width]
            what = "whole numbers" if key in integers else "a tensor"
            raise UnusableError(f"holds {what} of the shape {list(shapes[key])}")
    counts = {shapes[key][0] if len(shapes[key]) > 1 else 1 for key in found.values()}
    if len(counts) > 1:
        raise UnusableError(
            f"gives text encoders different numbers of vectors ({sorted(counts)})"
        )
    if not 0 < min(counts) <= CHUNK_TOKENS:
        raise UnusableError(
            f"has {min(counts):,} vectors; a prompt's chunk holds {CHUNK_TOKENS}"
        )
    return found


def describe(shapes: Shapes, integers: Collection[str]) -> tuple[str, int]:
    """The models that an embedding is for, and its number of vectors; raises UnusableError."""
    found = read(shapes, integers)
    widths = tuple(shapes[key][-1] for key in found.values())
    if widths not in _FAMILIES:
        raise UnusableError(
            f"has vectors of {sum(widths):,} numbers: those of SD 1.x have 768, of SD 2.x 1,024,"
            " and SDXL's embeddings have two tensors, clip_l and clip_g"
        )
    first = shapes[next(iter(found.values()))]
    return _FAMILIES[widths], first[0] if len(first) > 1 else 1
