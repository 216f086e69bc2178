import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli import console
from fleet import prompt
from imagefleet.files import demo
from imagefleet.job import clip
from in_process import Imagefleet, assert_refused


def test_the_reference_message_has_77_and_70_tokens(in_process: Imagefleet):
    job = json.loads(demo.REFERENCE_MESSAGE)

    result = in_process(
        "prompt", job["prompt"], "--negative", job["negative_prompt"], "--json"
    )

    read = json.loads(result.stdout)
    ((positive,), (negative,)) = (
        read[name]["texts"] for name in ("prompt", "negative")
    )
    assert (positive["tokens"], negative["tokens"]) == (77, 70)
    assert [len(chunk["ids"]) for chunk in positive["chunks"]] == [75, 2]
    assert len(negative["chunks"]) == 1
    assert read["prompt"]["loras"] == [
        {
            "name": "magic-fantasy-forest-v2",
            "text_encoder_weight": 0.35,
            "unet_weight": 0.35,
        }
    ]
    assert read["negative"]["loras"] == []
    last = positive["chunks"][1]
    assert (last["tokens"], last["weights"]) == ([",</w>", "detailed</w>"], [1.0, 1.1])


def test_the_text_output_shows_weights_words_and_loras(in_process: Imagefleet):
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


def test_the_output_shows_the_prompts_own_weight_and_no_comments(
    in_process: Imagefleet,
):
    result = in_process("prompt", "a cat # of mine\n:1.3")

    assert [line.strip() for line in result.stdout.splitlines()][:5] == [
        "prompt: 2 tokens in 1 chunk",
        "chunk 1, 2 tokens",
        "1      a cat",
        "weight of the prompt as a whole: 1.3",
        "left out: # of mine",
    ]
    read = json.loads(
        in_process("prompt", "a cat:0.5", "--negative", "a dog:2", "--json").stdout
    )
    weights = [read[name]["texts"][0]["weight"] for name in ("prompt", "negative")]
    assert weights == [0.5, 1.0]


def test_the_words_of_each_step_and_of_each_part_are_shown(
    in_process: Imagefleet,
):
    text = "a [red:blue:0.5] house AND [fog|rain] :0.8"
    result = in_process("prompt", text, "--steps", "10", "--negative", "[:mist:4]")

    assert [line.strip() for line in result.stdout.splitlines()] == [
        "prompt, part 1 of 2, steps 1-6: 3 tokens in 1 chunk",
        "chunk 1, 3 tokens",
        "1      a red house",
        "prompt, part 1 of 2, steps 7-10: 3 tokens in 1 chunk",
        "chunk 1, 3 tokens",
        "1      a blue house",
        "prompt, part 2 of 2, steps 1-2, 4, 6, 8, 10: 1 token in 1 chunk",
        "chunk 1, 1 token",
        "1      fog",
        "weight of the prompt as a whole: 0.8",
        "prompt, part 2 of 2, steps 3, 5, 7, 9: 1 token in 1 chunk",
        "chunk 1, 1 token",
        "1      rain",
        "weight of the prompt as a whole: 0.8",
        "negative, steps 1-5: 0 tokens in 1 chunk",
        "chunk 1, 0 tokens",
        "negative, steps 6-10: 1 token in 1 chunk",
        "chunk 1, 1 token",
        "1      mist",
    ]
    read = json.loads(in_process("prompt", text, "--steps", "10", "--json").stdout)
    steps = [(each["part"], each["steps"]) for each in read["prompt"]["texts"]]
    assert steps[0] == (1, [1, 2, 3, 4, 5, 6])
    assert sorted(step for part, some in steps for step in some if part == 2) == [
        *range(1, 11)
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["a AND " * 9], "prompt: the prompt joins 10 prompts"),
        (["a <hypernet:b:1>"], "prompt: the prompt asks for <hypernet:...>"),
        (["word " * 5000], "prompt: the prompt has 67 chunks of 75 tokens"),
    ],
)
def test_unsupported_syntax_is_named_with_exit_code_2(
    in_process: Imagefleet, arguments: list[str], reason: str
):
    for flags in ([], ["--json"]):
        result = in_process("prompt", *arguments, *flags)

        assert_refused(result, reason)
    read = json.loads(result.stdout)
    assert (
        sum(
            reason.partition(": ")[2] in str(one["unsupported"])
            for one in read.values()
        )
        == 1
    )


def test_a_lora_in_a_negative_prompt_is_text_with_a_note(
    in_process: Imagefleet,
):
    result = in_process("prompt", "a cat", "--negative", "<lora:night:0.5>")

    assert result.returncode == console.EXIT_DONE
    assert "LoRA night" not in result.stdout
    assert "a LoRA tag in a negative prompt is plain text" in result.stdout


@pytest.fixture(scope="module")
def both_tokenizers() -> tuple[object, object]:
    transformers = pytest.importorskip("transformers")
    reference = transformers.CLIPTokenizer.from_pretrained(
        clip.TOKENIZER, local_files_only=True
    )
    return prompt.tokenizer(), reference


@settings(max_examples=200)
@given(
    text=st.one_of(st.text(), st.text(alphabet="aé'sd 1,<|endoftx>\n\t\u00a0ß東😀-_"))
)
def test_tokens_equal_the_workers(both_tokenizers: tuple[object, object], text: str):
    ours, workers = both_tokenizers
    tokens = ours.encode(text, add_special_tokens=False).ids  # type: ignore[attr-defined]
    reference = workers(text, add_special_tokens=False, verbose=False)  # type: ignore[operator]
    assert tokens == reference["input_ids"]


def test_console_and_worker_share_the_limit_of_chunks():
    def tokenise(texts: object) -> list[list[int]]:
        return [[1] * (clip.CHUNK_TOKENS * clip.MAX_CHUNKS)]

    assert len(clip.cut_into_chunks("x", tokenise, None)) == clip.MAX_CHUNKS
