"""Textual inversion embeddings: where prompts name them, what is drawn, and which are refused."""

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from drawing import assert_alike, difference, draw, draw_alone, make_request
from imagefleet import errors
from imagefleet.job import prompt
from imagefleet.job.clip import Chunk
from worker.engine import contract, embeddings, text

START = 49406
END = 49407

WIDTHS = {"clip_l": 8}
SDXL = {"clip_l": 8, "clip_g": 12}

Write = Callable[..., contract.Embedding]


def vectors(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((count, width), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def write(tmp_path) -> Write:
    """Writes a file; returns the embedding as a request has it."""

    def to_file(
        name: str, content: bytes | dict[str, torch.Tensor]
    ) -> contract.Embedding:
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content if isinstance(content, bytes) else save(content))
        return contract.Embedding(
            name, path, hashlib.sha256(path.read_bytes()).hexdigest()
        )

    return to_file


def embedding(
    name: str, count: int, width: int = 8, seed: int = 0
) -> embeddings.Embedding:
    found = vectors(count, width, seed)
    return embeddings.Embedding(name, f"{name} {seed}", {"clip_l": found})


# Where they are found.


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("EasyNegative", ["EasyNegative"]),
        ("ugly, (easynegative:1.2)", ["EasyNegative"]),
        ("a EASYNEGATIVE, bad-hands-5 b", ["EasyNegative", "bad-hands-5"]),
        ("EasyNegativeV2", ["EasyNegativeV2"]),
        ("easynegative v2", ["EasyNegative"]),
        ("uneasynegative easynegatives", []),
        ("easy negative", []),
        ("easy(negative:1.1)", []),
        ("bad-hands-5, bad-hands-", ["bad-hands-5", "bad-hands-"]),
        ("bad   PROMPT 3", ["bad prompt"]),
        (r"cube \(v1\)", ["cube (v1)"]),
        ("cube (v1)", []),
    ],
)
def test_names_are_found_by_their_tokens_the_longest_first(
    tokenizer: text.Tokenizer, words: str, found: list[str]
):
    names = (
        "EasyNegative",
        "EasyNegativeV2",
        "bad prompt",
        "bad-hands-",
        "bad-hands-5",
    )
    known = (*names, "cube (v1)")
    assert list(tokenizer.find_names([words], known)) == found
    (chunk,) = tokenizer.chunks(words, [embedding(name, 2) for name in found])
    assert [each.embedding.name for each in chunk.inserts] == found  # type: ignore[attr-defined]


def test_both_prompts_are_searched_and_a_new_list_of_names_is_used(
    tokenizer: text.Tokenizer,
):
    prompts = ["a tree", prompt.read_negative_prompt("ugly, [mist]")]
    assert tokenizer.find_names(prompts, ("mist", "tree")) == ("tree", "mist")
    assert tokenizer.find_names(prompts, ("mist",)) == ("mist",)
    assert tokenizer.find_names(prompts, ()) == ()


def ids(tokenizer: text.Tokenizer, words: str) -> tuple[int, ...]:
    (chunk,) = tokenizer.chunks(words)
    return chunk.tokens


def test_vectors_take_the_weight_of_their_bracket(tokenizer: text.Tokenizer):
    mist = embedding("mist", 3)
    (chunk,) = tokenizer.chunks("a cat, (ugly mist:1.5), mist", [mist])
    a, cat, comma, ugly = ids(tokenizer, "a cat, ugly")
    assert chunk.tokens == (a, cat, comma, ugly, 0, 0, 0, comma, 0, 0, 0)
    assert chunk.weights == (*[1.0] * 3, *[1.5] * 4, *[1.0] * 4)
    assert [(each.at, each.embedding) for each in chunk.inserts] == [
        (4, mist),
        (8, mist),
    ]


@pytest.mark.parametrize(
    ("words", "lengths", "places"),
    [
        ("cat " * 72 + "mist", [75], [(0, 72)]),
        # It is moved as a whole, and a comma before it does not move what is between.
        ("cat " * 73 + "mist dog", [73, 4], [(1, 0)]),
        ("cat " * 60 + ", " + "cat " * 12 + "mist dog", [73, 4], [(1, 0)]),
        # A full chunk's words behind its last comma move; an embedding's vectors stay behind.
        ("cat " * 60 + ", mist " + "cat " * 11 + "dog", [61, 15], [(0, 61)]),
        (
            "cat " * 60 + ", dog mist " + "cat " * 10 + "mist",
            [61, 17],
            [(0, 62), (1, 14)],
        ),
        ("mist " * 26, [75, 3], [*((0, at) for at in range(0, 75, 3)), (1, 0)]),
        ("cat BREAK mist", [1, 3], [(1, 0)]),
    ],
)
def test_an_embedding_is_never_cut_at_a_chunks_end(
    tokenizer: text.Tokenizer,
    words: str,
    lengths: list[int],
    places: list[tuple[int, int]],
):
    chunks = tokenizer.chunks(words, [embedding("mist", 3)])
    assert [len(chunk.tokens) for chunk in chunks] == lengths
    assert [len(chunk.weights) for chunk in chunks] == lengths
    found = [
        (number, one.at) for number, chunk in enumerate(chunks) for one in chunk.inserts
    ]
    assert found == places


# What is encoded.


@torch.inference_mode()
def test_vectors_that_stay_behind_a_comma_are_in_place_of_the_padding(
    clip, tokenizer: text.Tokenizer, encoder: text.Encoder
):
    """AUTOMATIC1111 moves the words and their weights, and forgets the vectors."""
    mist = embedding("mist", 2, clip.text_encoder.config.hidden_size)
    words = "cat " * 60 + ", (mist:1.2) " + "cat " * 12 + "dog"
    found = encoder.encode([tokenizer.chunks(words, [mist])], 1).vectors[0]
    network = copy.deepcopy(clip.text_encoder)
    network.get_input_embeddings().weight[[1000, 2000]] = mist.vectors["clip_l"]
    cat, comma, dog = ids(tokenizer, "cat, dog")
    first = [START, *[cat] * 60, comma, 1000, 2000, *[END] * 13]
    assert torch.allclose(
        found[:77], network(torch.tensor([first])).last_hidden_state[0], 1e-4
    )
    second = text.Chunk((0, 0, *[cat] * 12, dog), (1.2, 1.2, *[1.0] * 13))
    assert torch.equal(found[77:], encoder.encode([[second]], 1).vectors[0])


@torch.inference_mode()
def test_another_file_of_the_same_name_is_another_encoding(
    clip, tokenizer: text.Tokenizer, encoder: text.Encoder
):
    width = clip.text_encoder.config.hidden_size
    one, other = (embedding("mist", 2, width, seed) for seed in (1, 2))

    def encode(*known: embeddings.Embedding) -> torch.Tensor:
        return encoder.encode([tokenizer.chunks("a mist", known)], 1).vectors

    first = encode(one)
    plain = encode()
    assert not torch.allclose(encode(other), first)
    assert not torch.allclose(plain, first)
    assert torch.equal(encode(one), first)
    assert torch.equal(encode(), plain), "the text encoder is as it was"
    kept = [key[0] for key in encoder._cache]  # type: ignore[index]
    assert not [
        chunk for chunk in kept if isinstance(chunk, Chunk) and chunk.inserts
    ], "the cache keeps no vectors alive that no job has"


# What is drawn.


def test_jobs_with_embeddings_loras_and_without_are_drawn_together_as_alone(
    slot_engine,
    engine,
    styles: list[contract.Lora],
    write: Write,
):
    width = slot_engine.checkpoint.text_encoder.config.hidden_size
    one, other = (
        write(name, {"v": 3 * vectors(4, width, len(name))}) for name in ("mist", "ash")
    )
    long = "a (mist:1.3), " * 12
    requests = [
        make_request(prompt="a mist", steps=2),
        make_request(
            prompt="a mist", steps=2, embeddings=(one,), loras=(styles[0],), clip_skip=2
        ),
        make_request(
            prompt=long, negative_prompt="ash", steps=2, embeddings=(one, other)
        ),
    ]
    together = draw(slot_engine, *requests)
    assert_alike(together, draw_alone(engine, requests))
    for image in together[1:]:
        assert difference(image, together[0]) > 2


# Files.

BROKEN: dict[str, tuple[Any, str]] = {
    "of SDXL": (
        {"clip_l": torch.ones(2, 768), "clip_g": torch.ones(2, 1280)},
        "made for SDXL; this model takes vectors of 8 numbers",
    ),
    "of SD2": (
        {"v": torch.ones(2, 1024)},
        "made for SD 2.x; this model takes vectors of 8",
    ),
    "of SDXL's second": (
        {"clip_g": torch.ones(2, 1280)},
        "1,280 numbers: .* SDXL's embeddings",
    ),
    "of any width": (
        {"v": torch.ones(9)},
        "vectors of 9 numbers: those of SD 1.x have 768",
    ),
    "two tensors": (
        {"a": torch.ones(8), "b": torch.ones(8)},
        r"holds 2 tensors \('a', 'b'\)",
    ),
    "no tensor": ({}, "holds 0 tensors"),
    "no number": ({"v": torch.tensor(1.0)}, "shape|vectors of 0 numbers"),
    "three dimensions": (
        {"v": torch.ones(1, 2, 8)},
        r"a tensor of the shape \[1, 2, 8\]",
    ),
    "whole numbers": (
        {"v": torch.ones(2, 8, dtype=torch.int64)},
        "holds whole numbers",
    ),
    "no vectors": ({"v": torch.ones(0, 8)}, "has 0 vectors"),
    "76 vectors": (
        {"v": torch.ones(76, 8)},
        "has 76 vectors; a prompt's chunk holds 75",
    ),
    "NaN": ({"v": torch.tensor([[1.0] * 7 + [float("nan")]])}, "NaN, infinity"),
    "cut off": (save({"v": torch.ones(2, 8)})[:-1], "not a complete .safetensors file"),
}


@pytest.mark.parametrize("content", BROKEN)
def test_what_cannot_be_used_is_refused_by_name(write: Write, content: str):
    data, message = BROKEN[content]
    with pytest.raises(errors.UnusableFileError, match=message) as raised:
        embeddings.read(write("mist", data), WIDTHS, torch.float32)
    assert "'mist'" in raised.value.message


@pytest.mark.parametrize(
    "tensors",
    [
        {"emb_params": torch.ones(2, 8)},
        {"<mist>": torch.ones(8)},
        {"clip_l": torch.ones(2, 8, dtype=torch.bfloat16)},
        {"v": torch.ones(75, 8, dtype=torch.float16)},
    ],
)
def test_files_of_all_known_forms_are_read(
    write: Write, tensors: dict[str, torch.Tensor]
):
    found = embeddings.read(write("mist", tensors), WIDTHS, torch.float32)
    (tensor,) = tensors.values()
    assert found.length == tensor.numel() // 8
    assert torch.equal(found.vectors["clip_l"], torch.ones(found.length, 8))


@pytest.mark.parametrize(
    "names", [("clip_l", "clip_g"), ("text_encoders_0", "text_encoders_1")]
)
def test_sdxls_have_vectors_for_both_text_encoders(
    write: Write, names: tuple[str, str]
):
    both = dict(zip(names, (vectors(2, 8), vectors(2, 12)), strict=True))
    found = embeddings.read(write("mist", both), SDXL, torch.float32)
    assert [tuple(each.shape) for each in found.vectors.values()] == [(2, 8), (2, 12)]
    shorter = {names[0]: vectors(2, 8), names[1]: vectors(3, 12)}
    with pytest.raises(errors.UnusableFileError, match="different numbers of vectors"):
        embeddings.read(write("mist", shorter), SDXL, torch.float32)
    for one in ({"v": vectors(2, 8)}, {"clip_g": vectors(2, 12)}):
        with pytest.raises(
            errors.UnusableFileError, match=r"numbers: those of SD 1\.x have 768"
        ):
            embeddings.read(write("mist", one), SDXL, torch.float32)


def test_numbers_that_overflow_in_the_models_precision_are_refused(
    write: Write,
):
    large = write("mist", {"v": torch.full((2, 8), 1e5)})
    embeddings.read(large, WIDTHS, torch.float32)
    with pytest.raises(errors.UnusableFileError, match="too large for float16"):
        embeddings.read(large, WIDTHS, torch.float16)


def test_a_file_that_changes_or_goes_away_meanwhile_is_tried_again(
    write: Write,
):
    found = write("mist", {"v": torch.ones(2, 8)})
    save_file({"v": torch.zeros(2, 8)}, found.path)
    with pytest.raises(errors.TransientError, match="has just changed"):
        embeddings.read(found, WIDTHS, torch.float32)
    found.path.unlink()
    with pytest.raises(errors.TransientError, match="cannot be read: No such file"):
        embeddings.read(found, WIDTHS, torch.float32)
