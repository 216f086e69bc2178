from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet import console, prompt
from imagefleet.files import demo
from imagefleet.job import clip

Imagefleet = Callable[..., "subprocess.CompletedProcess[str]"]  # the fixture of conftest.py


def test_the_reference_message_has_77_and_70_tokens(in_process: Imagefleet) -> None:
    job = json.loads(demo.REFERENCE_MESSAGE)

    result = in_process("prompt", job["prompt"], "--negative", job["negative_prompt"], "--json")

    read = json.loads(result.stdout)
    assert (read["prompt"]["tokens"], read["negative"]["tokens"]) == (77, 70)
    assert [len(chunk["ids"]) for chunk in read["prompt"]["chunks"]] == [75, 2]
    assert len(read["negative"]["chunks"]) == 1
    assert read["prompt"]["loras"] == [
        {"name": "magic-fantasy-forest-v2", "text_encoder_weight": 0.35, "unet_weight": 0.35}
    ]
    assert read["negative"]["loras"] == []
    last = read["prompt"]["chunks"][1]
    assert (last["tokens"], last["weights"]) == ([",</w>", "detailed</w>"], [1.0, 1.1])


def test_the_text_output_shows_weights_words_and_loras(in_process: Imagefleet) -> None:
    result = in_process("prompt", "a (red:1.3) [castle] BREAK sea <lora:night:0.5:0.8>")

    assert result.returncode == console.EXIT_DONE
    assert [line.strip() for line in result.stdout.splitlines()] == [
        "prompt: 4 tokens in 2 chunks",
        "chunk 1, 3 tokens",
        "1      a",
        "1.3    red",
        "0.9091 castle",
        "chunk 2, 1 token",
        "1      sea",
        "LoRA night: 0.8 on the UNet, 0.5 on the text encoder",
        "negative: 0 tokens in 1 chunk",
        "chunk 1, 0 tokens",
    ]


def test_the_output_shows_the_prompts_own_weight_and_no_comments(in_process: Imagefleet) -> None:
    result = in_process("prompt", "a cat # of mine\n:1.3")

    assert [line.strip() for line in result.stdout.splitlines()][:4] == [
        "prompt: 2 tokens in 1 chunk",
        "chunk 1, 2 tokens",
        "1      a cat",
        "weight of the prompt as a whole: 1.3",
    ]
    read = json.loads(in_process("prompt", "a cat:0.5", "--negative", "a dog:2", "--json").stdout)
    assert (read["prompt"]["weight"], read["negative"]["weight"]) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["a [cat:dog:0.5]"], "prompt: the prompt uses prompt editing"),
        (["a cat AND a dog"], "prompt: the prompt joins prompts with AND"),
        (["a cat", "--negative", "[a|b]"], "negative: the prompt uses alternation"),
        (["word " * 5000], "prompt: the prompt has 67 chunks of 75 tokens"),
    ],
)
def test_unsupported_syntax_is_named_with_exit_code_2(
    in_process: Imagefleet, arguments: list[str], reason: str
) -> None:
    for flags in ([], ["--json"]):
        result = in_process("prompt", *arguments, *flags)

        assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
        assert reason in result.stderr
    read = json.loads(result.stdout)
    assert sum(reason.partition(": ")[2] in str(one["unsupported"]) for one in read.values()) == 1


def test_a_lora_in_a_negative_prompt_is_text_with_a_note(
    in_process: Imagefleet,
) -> None:
    result = in_process("prompt", "a cat", "--negative", "<lora:night:0.5>")

    assert result.returncode == console.EXIT_DONE
    assert "LoRA night" not in result.stdout
    assert "a LoRA tag in a negative prompt is plain text" in result.stdout


def test_a_models_tokenizer_is_used_and_a_missing_one_reported(
    in_process: Imagefleet, tmp_path: Path
) -> None:
    spelled = tmp_path / "model" / "tokenizer"
    spelled.mkdir(parents=True)
    letters = [*"cat", *(f"{letter}</w>" for letter in "cat"), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    (spelled / "vocab.json").write_text(json.dumps(vocabulary))
    (spelled / "merges.txt").write_text("#version: 0.2\n")

    result = in_process("prompt", "cat", "--json", "--model", str(spelled.parent))
    assert json.loads(result.stdout)["prompt"]["chunks"][0]["tokens"] == ["c", "a", "t</w>"]

    result = in_process("prompt", "cat", "--model", str(tmp_path / "nowhere"))
    assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert "nowhere" in result.stderr
    (spelled / "merges.txt").write_text("one\n")
    result = in_process("prompt", "cat", "--model", str(spelled.parent))
    assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert "is not a CLIP tokenizer" in result.stderr


def test_a_checkpoint_without_a_tokenizer_has_clips_if_its_vocabulary_fits(
    in_process: Imagefleet, tmp_path: Path
) -> None:
    single = tmp_path / "model.safetensors"
    single.touch()
    for model in (single, demo.TRAINED):
        result = in_process("prompt", "a cat", "--model", str(model))
        assert result.stdout.startswith("prompt: 2 tokens in 1 chunk")
    config = tmp_path / "other" / "text_encoder" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text('{"vocab_size": 514}')

    result = in_process("prompt", "a cat", "--model", str(tmp_path / "other"))

    assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert "no tokenizer in" in result.stderr


def test_torch_is_not_imported() -> None:
    program = """
import sys
from fleet import main
sys.argv = ["imagefleet", "prompt", "a cat"]
try:
    main.main()
except SystemExit:
    pass
print("loaded:", sorted({"torch", "transformers", "diffusers"} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "loaded: []" in result.stdout


@pytest.fixture(scope="module")
def both_tokenizers() -> tuple[object, object]:
    transformers = pytest.importorskip("transformers")
    reference = transformers.CLIPTokenizer.from_pretrained(clip.TOKENIZER, local_files_only=True)
    return prompt._load_tokenizer(clip.TOKENIZER), reference


@settings(max_examples=200, deadline=None)
@given(text=st.one_of(st.text(), st.text(alphabet="aé'sd 1,<|endoftx>\n\t\u00a0ß東😀-_")))
def test_tokens_equal_the_workers(both_tokenizers: tuple[object, object], text: str) -> None:
    ours, workers = both_tokenizers
    tokens = ours.encode(text, add_special_tokens=False).ids  # type: ignore[attr-defined]
    reference = workers(text, add_special_tokens=False, verbose=False)  # type: ignore[operator]
    assert tokens == reference["input_ids"]


def test_console_and_worker_share_the_limit_of_chunks() -> None:
    def tokenise(texts: object) -> list[list[int]]:
        return [[1] * (clip.CHUNK_TOKENS * clip.MAX_CHUNKS)]

    assert len(clip.cut_into_chunks("x", tokenise, None)) == clip.MAX_CHUNKS
