"""Prompts to embeddings: chunks of 75 tokens, each encoded by itself, put side by side."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from transformers import CLIPTextModel, CLIPTokenizer

Chunk = tuple[int, ...]
"""The ids of one run of the text encoder: start, up to 75 tokens, and end tokens to fill it."""

CHUNK_TOKENS = 75

#: Chunks that the text encoder takes in one call; bounds its memory whatever the prompts' length.
_CHUNKS_PER_CALL = 32


class Tokenizer:
    """Cuts prompts into chunks; may be called from several threads."""

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        self._tokenizer = tokenizer
        # The Rust tokenizer raises "Already borrowed" when two threads meet inside it.
        self._lock = threading.Lock()

    def chunks(self, text: str) -> tuple[Chunk, ...]:
        """At least one chunk, each start + 75 tokens + end; filled up with end tokens."""
        with self._lock:
            ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)[
                "input_ids"
            ]
            start, end = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        parts = [ids[at : at + CHUNK_TOKENS] for at in range(0, len(ids), CHUNK_TOKENS)] or [[]]
        return tuple((start, *part, *[end] * (CHUNK_TOKENS + 1 - len(part))) for part in parts)


def encode(
    text_encoder: CLIPTextModel, prompts: Sequence[Sequence[Chunk]], clip_skip: int
) -> torch.Tensor:
    """Encodes prompts of any length into one tensor [prompts, longest chunk count x 77, width].

    Shorter ones are filled up with chunks of the empty prompt, as AUTOMATIC1111's
    `pad_cond_uncond` does; masking them instead would leave their images alone.
    """
    length = max(len(chunks) for chunks in prompts)
    end = prompts[0][0][-1]
    empty = (prompts[0][0][0], *[end] * (CHUNK_TOKENS + 1))
    filled = [(*chunks, *[empty] * (length - len(chunks))) for chunks in prompts]
    vectors = _encode_chunks(
        text_encoder, dict.fromkeys(chunk for chunks in filled for chunk in chunks), clip_skip
    )
    return torch.stack([torch.cat([vectors[chunk] for chunk in chunks]) for chunks in filled])


def _encode_chunks(
    text_encoder: CLIPTextModel, chunks: Iterable[Chunk], clip_skip: int
) -> dict[Chunk, torch.Tensor]:
    """Each chunk once: a campaign's jobs share their negative prompt."""
    vectors: dict[Chunk, torch.Tensor] = {}
    todo = list(chunks)
    for at in range(0, len(todo), _CHUNKS_PER_CALL):
        part = todo[at : at + _CHUNKS_PER_CALL]
        ids = torch.tensor(part, device=text_encoder.device)
        output = text_encoder(ids, output_hidden_states=True)
        # The module tree lost its `text_model` level in transformers 5.6.
        layers = getattr(text_encoder, "text_model", text_encoder)
        hidden = layers.final_layer_norm(output.hidden_states[-clip_skip])
        vectors.update(zip(part, hidden, strict=True))
    return vectors
