"""Embeddings: cached, batched at any length, and masked exactly."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from imagefleet import errors
from worker.engine import text

START = 49406
END = 49407


def test_a_wide_comma_and_curly_quotes_are_the_tokens_that_automatic1111_reads(
    tokenizer: text.Tokenizer,
):
    assert tokenizer.chunks("1girl\uff0cit\u2019s &amp;") == tokenizer.chunks(
        "1girl,it's &"
    )
    (first, second) = tokenizer.chunks("cat " * 60 + "\uff0c" + "dog " * 20)
    assert (len(first.tokens), len(second.tokens)) == (61, 20), "cut after the comma"
    assert tokenizer.find_names(["a bad\u2019s"], ["bad's"]) == ("bad's",)


class CountingEncoder:
    """Wraps the text encoder and counts the chunks."""

    def __init__(self, text_encoder: Any) -> None:
        self._text_encoder = text_encoder
        self.chunks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text_encoder, name)

    def __call__(self, ids: torch.Tensor, **settings: Any) -> Any:
        self.chunks += len(ids)
        return self._text_encoder(ids, **settings)


def counting(clip: Any, **settings: Any) -> tuple[text.Encoder, CountingEncoder]:
    counter = CountingEncoder(clip.text_encoder)
    return text.Encoder([text.Reader(counter)], START, END, **settings), counter  # type: ignore[arg-type]


@torch.inference_mode()
def test_a_chunk_is_encoded_once_for_all_prompts_that_have_it(
    clip, tokenizer: text.Tokenizer
):
    encoder, counter = counting(clip)
    negative = tokenizer.chunks("blurry, ugly")
    first = encoder.encode([tokenizer.chunks("a cat"), negative, negative], 1).vectors
    assert counter.chunks == 2
    again = encoder.encode([tokenizer.chunks("a dog BREAK a cat"), negative], 1).vectors
    assert counter.chunks == 3
    assert torch.equal(again[1, :77], first[1])
    assert torch.equal(again[0, 77:], first[0])


@torch.inference_mode()
def test_the_cache_key_has_everything_that_changes_the_vectors(
    clip, tokenizer: text.Tokenizer
):
    encoder, counter = counting(clip)
    variants = [
        ("a cat", 1, ()),
        ("a (cat:1.2)", 1, ()),
        ("a cat", 2, ()),
        ("a cat", 1, (("path", 1, 2), 0.5)),
        ("a cat", 1, (("path", 1, 2), 0.8)),
        ("a cat", 1, (("path", 3, 2), 0.5)),
    ]
    for _ in range(2):
        for prompt, clip_skip, loras in variants:
            encoder.encode([tokenizer.chunks(prompt)], clip_skip, loras)
    assert counter.chunks == len(variants)


@torch.inference_mode()
def test_more_chunks_at_once_than_fit_the_cache_are_encoded(
    clip, tokenizer: text.Tokenizer
):
    encoder, _ = counting(
        clip, cache_bytes=77 * clip.text_encoder.config.hidden_size * 4
    )
    prompts = [tokenizer.chunks(letter) for letter in "abc"]
    assert encoder.encode(prompts, 1).vectors.shape[0] == 3
    assert encoder._cache.currsize <= encoder._cache.maxsize


class OpposedEncoder:
    """Returns vectors whose weighted mean can become 0."""

    device = torch.device("cpu")

    def final_layer_norm(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors

    def __call__(self, ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        vectors = torch.ones((*ids.shape, 2))
        vectors[:, 0] = -1
        return SimpleNamespace(hidden_states=(vectors,))


def test_weights_that_cancel_out_are_a_job_error():
    encoder = text.Encoder([text.Reader(OpposedEncoder())], START, END)  # type: ignore[arg-type]
    nothing = text.Chunk((320,) * 75, (0.0,) * 75)
    with pytest.raises(errors.JobError, match="cancel each other out"):
        encoder.encode([[nothing]], 1)


def test_text_like_control_tokens_does_not_end_the_prompt(
    tokenizer: text.Tokenizer,
):
    (chunk,) = tokenizer.chunks("one <|endoftext|> two")
    assert len(chunk.tokens) == 3
