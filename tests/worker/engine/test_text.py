from __future__ import annotations

from typing import Any

import pytest
import torch

from worker.engine import text


@pytest.fixture
def tokenizer(engine: Any) -> text.Tokenizer:
    return text.Tokenizer(engine._checkpoint.tokenizer)


@pytest.mark.parametrize(("letters", "chunks"), [(0, 1), (1, 1), (75, 1), (76, 2), (151, 3)])
def test_a_prompt_is_cut_every_75_tokens(
    tokenizer: text.Tokenizer, engine: Any, letters: int, chunks: int
) -> None:
    clip = engine._checkpoint.tokenizer
    cut = tokenizer.chunks("a" * letters)
    assert len(cut) == chunks
    assert {len(chunk) for chunk in cut} == {77}
    assert {chunk[0] for chunk in cut} == {clip.bos_token_id}
    assert {chunk[-1] for chunk in cut} == {clip.eos_token_id}
    assert sum(id_ < clip.bos_token_id for chunk in cut for id_ in chunk) == letters


def test_a_short_prompt_is_tokenised_as_clip_does(tokenizer: text.Tokenizer, engine: Any) -> None:
    reference = engine._checkpoint.tokenizer("A photo!", padding="max_length").input_ids
    assert tokenizer.chunks("A photo!") == (tuple(reference),)


def test_words_that_look_like_control_tokens_do_not_end_the_prompt(
    tokenizer: text.Tokenizer, engine: Any
) -> None:
    (chunk,) = tokenizer.chunks("one <|endoftext|> two")
    assert len(chunk) == 77


@torch.inference_mode()
def test_prompts_of_any_length_stand_side_by_side(tokenizer: text.Tokenizer, engine: Any) -> None:
    encoder = engine._checkpoint.text_encoder
    short, long = tokenizer.chunks("short"), tokenizer.chunks("long " * 40)
    both = text.encode(encoder, [short, long], clip_skip=1)
    assert both.shape == (2, 231, 32)
    torch.testing.assert_close(both[0, :77], text.encode(encoder, [short], 1)[0])
    torch.testing.assert_close(both[0, 77:154], text.encode(encoder, [tokenizer.chunks("")], 1)[0])
    torch.testing.assert_close(both[1, 154:], text.encode(encoder, [long[2:]], 1)[0])


@torch.inference_mode()
def test_clip_skip_1_is_the_encoders_last_word(tokenizer: text.Tokenizer, engine: Any) -> None:
    encoder = engine._checkpoint.text_encoder
    (chunk,) = tokenizer.chunks("a photo")
    output = encoder(torch.tensor([chunk]), output_hidden_states=True)
    torch.testing.assert_close(text.encode(encoder, [[chunk]], 1), output.last_hidden_state)
    torch.testing.assert_close(
        text.encode(encoder, [[chunk]], 2), encoder.final_layer_norm(output.hidden_states[-2])
    )
