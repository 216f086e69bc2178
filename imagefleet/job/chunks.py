"""Weighted words to chunks of tokens, as AUTOMATIC1111 cuts them. Imports no torch.

The text encoder takes 75 tokens at a time, so a longer prompt is cut, and each chunk encoded by
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from imagefleet import errors
from imagefleet.job import prompt

CHUNK_TOKENS = 75

#: A phrase of which this many tokens or fewer stand in a full chunk goes whole into the next one;
#: AUTOMATIC1111's default.
COMMA_BACKTRACK = 20

#: 32 chunks are 2,400 tokens. Without a limit, one prompt of 64 KiB could fill the GPU.
MAX_CHUNKS = 32

Tokenise = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""The token ids of each of some texts, without start and end tokens."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Up to 75 tokens and the weight of each; to fill it up is the text encoder's matter."""

    tokens: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()


def cut(text: str, tokenise: Tokenise, comma: int | None) -> tuple[Chunk, ...]:
    """Cuts a prompt without tags into chunks, at least one; *comma* is the comma's token id.

    Raises:
        JobError: it is too long, or a weight in it is no number or too large.
    """
    sections = prompt.weighted_parts(text)
    ids = iter(tokenise([part.text for section in sections for part in section]))
    chunks: list[Chunk] = []
    for section in sections:
        tokens = [(token, part.weight) for part in section for token in next(ids)]
        chunks.extend(_cut_section(tokens, comma) or [Chunk()])
    # A BREAK fills up its chunk, even an empty one, but begins none at the prompt's end.
    if len(sections) > 1 and not chunks[-1].tokens:
        chunks.pop()
    if len(chunks) > MAX_CHUNKS:
        raise errors.JobError(
            f"the prompt has {len(chunks):,} chunks of {CHUNK_TOKENS} tokens; {MAX_CHUNKS} at most"
        )
    return tuple(chunks)


def _cut_section(tokens: Iterable[tuple[int, float]], comma: int | None) -> list[Chunk]:
    chunks = []
    chunk: list[tuple[int, float]] = []
    last_comma: int | None = None
    for token, weight in tokens:
        if len(chunk) == CHUNK_TOKENS:
            end = CHUNK_TOKENS
            if last_comma is not None and token != comma and end - last_comma <= COMMA_BACKTRACK:
                end = last_comma + 1
            chunks.append(_chunk(chunk[:end]))
            chunk, last_comma = chunk[end:], None
        if token == comma:
            last_comma = len(chunk)
        chunk.append((token, weight))
    if chunk:
        chunks.append(_chunk(chunk))
    return chunks


def _chunk(tokens: Sequence[tuple[int, float]]) -> Chunk:
    return Chunk(tuple(token for token, _ in tokens), tuple(weight for _, weight in tokens))
