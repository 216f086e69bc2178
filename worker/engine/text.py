"""Prompts to embeddings: chunks of 75 tokens, each encoded by itself, put side by side."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import CLIPTextModel, CLIPTokenizer

from imagefleet import errors
from imagefleet.job import chunks
from imagefleet.job.chunks import CHUNK_TOKENS, Chunk
from imagefleet.job.prompt import Prompt

#: What the text encoder takes in one run: start, a chunk, and end tokens that fill it up.
CONTEXT_TOKENS = CHUNK_TOKENS + 2

#: Chunks that the text encoder takes in one call; bounds its memory whatever the prompts' length.
_CHUNKS_PER_CALL = 32

#: Some 570 chunks of SD1.5 in float16: the negative prompts of all campaigns at hand, at 1 % of a
#: small card's memory. Prompts are mostly new, and only pass through.
_CACHE_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class Context:
    """What the UNet attends to: vectors [rows, tokens, width], filled up to the longest row.

    mask [rows, tokens] is true where a vector belongs to its row; None where all rows are as long.
    """

    vectors: torch.Tensor
    mask: torch.Tensor | None


class Tokenizer:
    """Cuts prompts into chunks; may be called from several threads."""

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        self._tokenizer = tokenizer
        self._comma: int | None = tokenizer.get_vocab().get(",</w>")
        # The Rust tokenizer raises "Already borrowed" when two threads meet inside it.
        self._lock = threading.Lock()

    def chunks(self, prompt: Prompt | str) -> tuple[Chunk, ...]:
        """At least one chunk.

        Raises:
            JobError: it is too long, or a weight is not a number or out of range.
        """
        return chunks.cut(prompt, self._tokenise, self._comma)

    def _tokenise(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        if not texts:
            return []
        with self._lock:
            encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids


class Encoder:
    """The text encoder and, on its device, the vectors that it gave last; for one thread."""

    def __init__(
        self, text_encoder: CLIPTextModel, start: int, end: int, cache_bytes: int = _CACHE_BYTES
    ) -> None:
        self._text_encoder = text_encoder
        self._start = start
        self._end = end
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._cache: OrderedDict[Hashable, torch.Tensor] = OrderedDict()

    def encode(
        self, prompts: Sequence[Sequence[Chunk]], clip_skip: int, loras: Hashable = ()
    ) -> Context:
        """Encodes prompts of any length; *loras* names what is merged into the text encoder now.

        Raises:
            JobError: the weights in a prompt cancel each other out.
        """
        distinct = dict.fromkeys(chunk for prompt in prompts for chunk in prompt)
        vectors = self._look_up(distinct, clip_skip, loras)
        lengths = [len(prompt) * CONTEXT_TOKENS for prompt in prompts]
        rows = [torch.cat([vectors[chunk] for chunk in prompt]) for prompt in prompts]
        if len(set(lengths)) == 1:
            return Context(torch.stack(rows), None)
        places = torch.arange(max(lengths), device=rows[0].device)
        mask = places < torch.tensor(lengths, device=rows[0].device)[:, None]
        return Context(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), mask)

    def clear(self) -> None:
        """Frees the memory of what is cached."""
        self._cache.clear()
        self._cached_bytes = 0

    def _look_up(
        self, chunks: Iterable[Chunk], clip_skip: int, loras: Hashable
    ) -> dict[Chunk, torch.Tensor]:
        vectors: dict[Chunk, torch.Tensor] = {}
        missing = []
        for chunk in chunks:
            key = (chunk, clip_skip, loras)
            if key in self._cache:
                self._cache.move_to_end(key)
                vectors[chunk] = self._cache[key]
            else:
                missing.append(chunk)
        for at in range(0, len(missing), _CHUNKS_PER_CALL):
            part = missing[at : at + _CHUNKS_PER_CALL]
            for chunk, row in zip(part, self._compute(part, clip_skip), strict=True):
                # A view would keep the vectors of the whole call in memory.
                vectors[chunk] = self._cache[chunk, clip_skip, loras] = row.clone()
                self._cached_bytes += row.nbytes
        while self._cached_bytes > self._cache_bytes:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.nbytes
        return vectors

    def _compute(self, part: Sequence[Chunk], clip_skip: int) -> torch.Tensor:
        """Vectors [chunks, 77, width] in the text encoder's type."""
        device = self._text_encoder.device
        filling = [CHUNK_TOKENS - len(chunk.tokens) for chunk in part]
        rows = [
            (self._start, *chunk.tokens, *[self._end] * (fill + 1))
            for chunk, fill in zip(part, filling, strict=True)
        ]
        output = self._text_encoder(torch.tensor(rows, device=device), output_hidden_states=True)
        # The module tree lost its `text_model` level in transformers 5.6.
        layers = getattr(self._text_encoder, "text_model", self._text_encoder)
        vectors: torch.Tensor = layers.final_layer_norm(output.hidden_states[-clip_skip])
        if all(weight == 1 for chunk in part for weight in chunk.weights):
            return vectors
        weights = [
            (1.0, *chunk.weights, *[1.0] * (fill + 1))
            for chunk, fill in zip(part, filling, strict=True)
        ]
        weighted = _weigh(vectors, torch.tensor(weights, device=device))
        if vectors.isfinite().all() and not weighted.isfinite().all():
            raise errors.JobError("the weights in the prompt cancel each other out")
        return weighted


def _weigh(vectors: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiplies vectors [chunks, 77, width] by weights [chunks, 77], and restores each mean."""
    plain = vectors.float()
    weighted = plain * weights[:, :, None]
    ratio = plain.mean(dim=(1, 2), keepdim=True) / weighted.mean(dim=(1, 2), keepdim=True)
    return (weighted * ratio).to(vectors.dtype)
