"""Cuts weighted words into chunks of 75 tokens, as AUTOMATIC1111 does. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from imagefleet import errors
from imagefleet.job.prompt import Prompt, weighted_parts

CHUNK_TOKENS = 75

#: A phrase that starts within this many tokens of a chunk's end moves to the next chunk, if the
#: chunk cannot hold all of it; AUTOMATIC1111's default.
COMMA_BACKTRACK = 20

#: 2,400 tokens. Without a limit, one prompt of 64 KiB could fill the GPU.
MAX_CHUNKS = 32

Tokenise = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""The token ids of each text, without start and end tokens."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Up to 75 tokens and the weight of each; the text encoder pads it."""

    tokens: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()


def cut(prompt: Prompt | str, tokenise: Tokenise, comma: int | None) -> tuple[Chunk, ...]:
    """Cuts a prompt (text: one without LoRA tags) into chunks; *comma* is the comma's token id.

    Raises:
        JobError: it is too long, or a weight is not a number or out of range.
    """
    sections = weighted_parts(prompt) if isinstance(prompt, str) else prompt.sections
    ids = iter(tokenise([part.text for section in sections for part in section]))
    chunks: list[Chunk] = []
    for section in sections:
        tokens = [(token, part.weight) for part in section for token in next(ids)]
        chunks.extend(_cut_section(tokens, comma) or [Chunk()])
    # BREAK ends its chunk, even an empty one, but starts none at the end of the prompt.
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
