"""Prompts to embeddings, against a slow reference implementation of the rules.

A BREAK outside brackets ends a chunk. A chunk has 75 tokens; if one of its last 20 is a comma, what
follows that comma goes into the next. Chunks are filled up with end tokens and encoded alone.
Vectors are multiplied by their weights, and each chunk's mean is restored.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from imagefleet import errors
from imagefleet.job.prompt import weighted_parts
from worker.engine import text

ROOT = Path(__file__).parents[3]
COMMA = 267
START = 49406
END = 49407

Array = npt.NDArray[np.float64]
Chunks = list[list[tuple[int, float]]]


def chunks_by_the_rules(clip: Any, prompt: str) -> Chunks:
    found = []
    sections = weighted_parts(prompt)
    for section in sections:
        tokens = []
        for part in section:
            ids = clip.tokenizer(
                part.text, add_special_tokens=False, verbose=False
            ).input_ids
            tokens += [(id_, part.weight) for id_ in ids]
        while len(tokens) > 75:
            commas = [at for at in range(55, 75) if tokens[at][0] == COMMA]
            end = commas[-1] + 1 if commas and tokens[75][0] != COMMA else 75
            found.append(tokens[:end])
            tokens = tokens[end:]
        found.append(tokens)
    return found[:-1] if len(sections) > 1 and not found[-1] else found


def vectors_by_the_rules(clip: Any, prompt: str, clip_skip: int) -> Array:
    """[tokens, width], one chunk at a time."""
    encoded = []
    layers = getattr(clip.text_encoder, "text_model", clip.text_encoder)
    for chunk in chunks_by_the_rules(clip, prompt):
        filling = [END] * (76 - len(chunk))
        ids = torch.tensor([[START, *(id_ for id_, _ in chunk), *filling]])
        with torch.inference_mode():
            states = clip.text_encoder(ids, output_hidden_states=True).hidden_states
            vectors = layers.final_layer_norm(states[-clip_skip])[0].double().numpy()
        weights = np.array(
            [1.0, *(weight for _, weight in chunk), *[1.0] * len(filling)]
        )
        weighted = vectors * weights[:, None]
        encoded.append(weighted * (vectors.mean() / weighted.mean()))
    return np.concatenate(encoded)


WORDS = (
    "castle",
    "forest",
    "(sunset)",
    "((storm))",
    "[fog]",
    "(red:1.3)",
    "(blue sky:0.7)",
    "8k",
    "river",
    ":",
    "night,",
    "photo,",
    "digital art,",
    "(masterpiece)",
    "(best (quality)),",
    "[[dark]]",
    "(oak:1.15)",
    "\\(artist\\)",
    "fishing-boat",
    "naïve",
    "東京",
    "it's",
    "a\n",
    "of the,",
    ",",
    ",",
    "(b) c) d",
    "e] f",
    "uhd :1.2)",
)


def a_prompt(number: int) -> str:
    """Up to some 250 tokens, with nested emphasis, BREAKs and unclosed brackets."""
    dice = random.Random(number)
    words = dice.choices(WORDS, k=dice.choice([0, 3, 20, 60, 61, 62, 63, 64, 90, 180]))
    for _ in range(dice.choice([0, 0, 1, 2])):
        words.insert(dice.randrange(len(words) + 1), "BREAK")
    for _ in range(len(words) // 8):
        start, end = sorted(dice.choices(range(len(words)), k=2))
        opening, closing = dice.choice(
            [("(", ")"), ("(", ":1.2)"), ("[", "]"), ("(", "")]
        )
        words[start] = opening + words[start]
        words[end] = words[end] + closing
    return dice.choice([" ", " ", ", "]).join(words)


PROMPTS = [a_prompt(number) for number in range(80)]


def test_prompts_are_chunked_by_the_rules(clip, tokenizer: text.Tokenizer):
    for prompt in PROMPTS:
        expected = chunks_by_the_rules(clip, prompt)
        found = [
            list(zip(one.tokens, one.weights, strict=True))
            for one in tokenizer.chunks(prompt)
        ]
        assert found == expected


@torch.inference_mode()
def test_prompts_are_encoded_by_the_rules(clip, tokenizer: text.Tokenizer):
    encoder = text.Encoder([text.Reader(clip.text_encoder)], START, END)
    for first, clip_skip in ((0, 1), (10, 2), (20, 1)):
        prompts = PROMPTS[first : first + 10]
        context = encoder.encode(
            [tokenizer.chunks(prompt) for prompt in prompts], clip_skip
        )
        for prompt, row, mask in zip(
            prompts, context.vectors, context.mask, strict=True
        ):
            expected = vectors_by_the_rules(clip, prompt, clip_skip)
            length = len(expected)
            assert mask.tolist() == [True] * length + [False] * (len(mask) - length)
            largest = np.abs(row[:length].double().numpy() - expected).max()
            assert largest / np.abs(expected).max() < 1e-5, prompt


def test_the_reference_message_has_77_and_70_tokens(tokenizer: text.Tokenizer):
    job = json.loads(
        (ROOT / "imagefleet" / "files" / "reference-job.json").read_text(
            encoding="utf-8"
        )
    )
    tag = "<lora:magic-fantasy-forest-v2:0.35>"
    assert tag in job["prompt"]
    prompt = tokenizer.chunks(job["prompt"].replace(tag, ""))
    negative = tokenizer.chunks(job["negative_prompt"])
    assert [len(chunk.tokens) for chunk in prompt] == [75, 2]
    assert [len(chunk.tokens) for chunk in negative] == [70]


def test_a_prompt_has_32_chunks_at_most(tokenizer: text.Tokenizer):
    assert len(tokenizer.chunks("cat " * 2400)) == 32
    with pytest.raises(errors.JobError, match="33 chunks of 75 tokens; 32 at most"):
        tokenizer.chunks("cat " * 2401)


def test_neighbours_of_equal_weight_are_tokenised_together(
    tokenizer: text.Tokenizer,
):
    (apart,) = tokenizer.chunks("light(house:1.2)")
    (joined,) = tokenizer.chunks("light(house:1.0)")
    assert len(apart.tokens) == 2
    assert joined == tokenizer.chunks("lighthouse")[0]
