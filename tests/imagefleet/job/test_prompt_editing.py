from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from imagefleet import errors
from imagefleet.job import prompt, prompt_editing


@pytest.mark.parametrize(
    "text",
    [
        "[a:b:0.5]",
        "a [cat:dog:10] on a hill",
        "[cat:0.3]",
        "[cat::0.3]",
        "[:cat: 5 ]",
        "[:0.5]",
        "[a:b:-1.5e3]",
        "[a (red:1.2) cat:dog:.5]",
        "([a:b:0.5])",
        "(a [b:0.5] c:1.2)",
        "[[a:0.5]:0.7]",
        "[a:\nb:0.5\n]",
        "(open [a:b:0.5]",
        "] [a:b:0.5] [",
        r"[a\:b:0.5]",
    ],
)
def test_prompt_editing_is_refused_and_never_drawn_as_words(text: str) -> None:
    for read in (prompt.read_prompt, prompt.read_negative_prompt):
        with pytest.raises(errors.JobError, match=r"prompt editing .* is not supported: '\["):
            read(text)


@pytest.mark.parametrize(
    "text",
    ["[a|b]", "[a|b|c]", "[|a]", "[a|]", "a [red|(blue:1.3)] cat", "([a|b]:1.2)", r"[a\|b|c]"],
)
def test_alternation_is_refused_and_never_drawn_as_words(text: str) -> None:
    for read in (prompt.read_prompt, prompt.read_negative_prompt):
        with pytest.raises(errors.JobError, match=r"alternation .* is not supported: '\["):
            read(text)


@pytest.mark.parametrize(
    "text",
    [
        "[a]",
        "[a:b]",
        "[a:b:c]",
        "[a:0.5:b]",
        "[a:b:c:0.5]",
        "[a:b:0.5",
        "a:b:0.5]",
        "a: b | c",
        "(a|b)",
        "(a:1.2) [b]",
        "[(a:1.2)]",
        "[a|b:0.5]",
        "[(a|b):0.5]",
        r"\[a:b:0.5\]",
        r"[a\:0.5]",
        r"[a\|b]",
        "[(a:b:0.5]",
        "[a:b:0.5)",
        "[a:0.5 b]",
    ],
)
def test_what_automatic1111_takes_for_words_is_words(text: str) -> None:
    assert prompt.read_prompt(text).text == text


@pytest.mark.parametrize(
    "text", ["a cat AND a dog", "a cat AND a dog :1.2", "AND", "a\nAND\nb", "a,AND,b"]
)
def test_prompts_joined_with_and_are_refused(text: str) -> None:
    with pytest.raises(errors.JobError, match="AND, which is not supported"):
        prompt.read_prompt(text)


@pytest.mark.parametrize("text", ["ANDY", "hand", "a and b", "SAND", "And", "AND_1"])
def test_and_inside_another_word_is_that_word(text: str) -> None:
    assert prompt.read_prompt(text).text == text


def test_and_in_a_negative_prompt_is_a_word_as_in_automatic1111() -> None:
    assert prompt.read_negative_prompt("cats AND dogs").text == "cats AND dogs"


def test_a_tag_is_gone_before_editing_is_looked_for() -> None:
    assert prompt.read_prompt("[<lora:x:0.5>]").text == "[]"
    with pytest.raises(errors.JobError, match="prompt editing"):
        prompt.read_prompt("[<lora:x:0.5>:0.5]")


def test_a_long_one_is_shown_in_part() -> None:
    with pytest.raises(errors.JobError) as refusal:
        prompt_editing.refuse(f"[{'cat ' * 1000}:0.5]")
    assert len(refusal.value.message) < 200


@given(st.text(), st.text(alphabet="[]():|\\ a.5"))
@example("", "")
def test_editing_that_is_there_is_found_between_any_words(before: str, inside: str) -> None:
    """Whatever stands before it, unless that opens it to be something else."""
    plain = "".join(letter for letter in before if letter not in "[]():|\\")
    with pytest.raises(errors.JobError):
        prompt_editing.refuse(f"{plain}[a:b:0.5]{inside}")


@given(st.text(alphabet="[](){}:|\\ a.5\n"))
def test_no_text_raises_anything_but_a_refusal(text: str) -> None:
    with contextlib.suppress(errors.JobError):
        prompt_editing.refuse(text)
