"""Textual inversion embeddings: the models that one is for, told by the shapes of its tensors."""

from __future__ import annotations

from imagefleet import errors
from imagefleet.files.contents import EMBEDDING_WIDTHS
from imagefleet.files.safetensors import Header
from imagefleet.job.chunks import CHUNK_TOKENS


def describe(path: str, header: Header) -> tuple[str, int]:
    """The models that an embedding is for, and its number of vectors.

    Raises:
        SetupError: its tensors are not those of an embedding.
    """
    shapes = [shape if len(shape) > 1 else (1, *shape) for shape in header.shapes.values()]
    counts = {shape[0] for shape in shapes}
    widths = {shape[-1] for shape in shapes}
    is_for_two = widths == {768, 1280}
    are_vectors = all(len(shape) == 2 for shape in shapes)  # noqa: PLR2004 - [vectors, width]
    if not are_vectors or len(shapes) != 1 + is_for_two or len(counts) != 1:
        shown = "; ".join(
            f"{name[:40]} {list(shape)}" for name, shape in list(header.shapes.items())[:3]
        )
        raise errors.SetupError(
            f"{path!r} holds the tensors {shown}: an embedding has one, [vectors, width], or for"
            " SDXL two, clip_l and clip_g"
        )
    (count,) = counts
    if not 0 < count <= CHUNK_TOKENS:
        raise errors.SetupError(
            f"{path!r} has {count:,} vectors; a chunk of a prompt holds {CHUNK_TOKENS}"
        )
    if is_for_two:
        return "SDXL", count
    (width,) = widths
    if width not in EMBEDDING_WIDTHS or width == 1280:  # noqa: PLR2004 - half of SDXL's
        raise errors.SetupError(
            f"{path!r} has vectors of {width:,} numbers: those of SD 1.x have 768, of SD 2.x 1,024,"
            " and SDXL's embeddings have two tensors, clip_l and clip_g"
        )
    return EMBEDDING_WIDTHS[width], count
