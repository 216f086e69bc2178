from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import errors, prompt


def test_the_reference_prompt_keeps_its_words_and_gives_its_lora() -> None:
    read = prompt.read_prompt("a jump rope, <lora:magic-fantasy-forest-v2:0.35>, ((no humans))")

    assert read.text == "a jump rope, , ((no humans))"
    assert read.loras == (prompt.LoraTag("magic-fantasy-forest-v2", 0.35, 0.35),)


@pytest.mark.parametrize(
    ("tag", "text_encoder_weight", "unet_weight"),
    [
        ("<lora:x>", 1, 1),
        ("<lora:x:0.5>", 0.5, 0.5),
        ("<lora:x:0.5:0.8>", 0.5, 0.8),
        ("<lora:x:te=0.2:unet=0.9>", 0.2, 0.9),
        ("<lora:x:unet=0.9>", 1, 0.9),
        ("<lora:x:0.4:unet=-0.9>", 0.4, -0.9),
        ("<LYCO:x:0.5>", 0.5, 0.5),
    ],
)
def test_weights_are_read_as_automatic1111_reads_them(
    tag: str, text_encoder_weight: float, unet_weight: float
) -> None:
    assert prompt.read_prompt(tag).loras == (prompt.LoraTag("x", text_encoder_weight, unet_weight),)


def test_loras_keep_their_order() -> None:
    loras = prompt.read_prompt("<lora:b:1> and <lora:a:0.5>").loras

    assert [lora.name for lora in loras] == ["b", "a"]


@pytest.mark.parametrize(
    "name",
    ["../secret", "a/b", "a\\b", ".hidden", "", "a\nb", "naïve", "x" * 129, "%2e%2e", "a\0b"],
)
def test_a_name_that_is_no_plain_file_name_is_refused(name: str) -> None:
    with pytest.raises(errors.JobError, match="is refused"):
        prompt.read_prompt(f"<lora:{name}:1>")


@pytest.mark.parametrize("weight", ["35", "-10.1", "nan", "inf", "-inf", "", "high", "1e9"])
def test_a_weight_that_no_lora_has_is_refused(weight: str) -> None:
    with pytest.raises(errors.JobError, match="between"):
        prompt.read_prompt(f"<lora:x:{weight}>")


@pytest.mark.parametrize("tag", ["<lora:x:1:1:1>", "<lora:x:dyn=1>", "<lora:x:te=1:foo=2>"])
def test_a_malformed_tag_is_refused_with_the_forms_that_are_right(tag: str) -> None:
    with pytest.raises(errors.JobError, match="<lora:name:weight>"):
        prompt.read_prompt(tag)


def test_another_extra_network_is_refused_instead_of_silently_dropped() -> None:
    with pytest.raises(errors.JobError, match="<hypernet:"):
        prompt.read_prompt("a cat <hypernet:style:1>")


def test_angle_brackets_that_are_no_tag_stay_words() -> None:
    assert prompt.read_prompt("a <3 b, x < y > z").text == "a <3 b, x < y > z"


@given(st.text())
def test_no_prompt_raises_anything_but_a_job_error(text: str) -> None:
    with contextlib.suppress(errors.JobError):
        assert prompt.read_prompt(text).text is not None


@given(st.text(alphabet="<>lora:te=.x1-", max_size=60))
def test_what_is_read_holds_safe_names_and_bounded_weights(text: str) -> None:
    try:
        read = prompt.read_prompt(text)
    except errors.JobError:
        return
    for lora in read.loras:
        assert prompt.SAFE_NAME.fullmatch(lora.name)
        assert abs(lora.unet_weight) <= prompt.WEIGHT_LIMIT
        assert abs(lora.text_encoder_weight) <= prompt.WEIGHT_LIMIT
