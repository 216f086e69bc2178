"""The words at each step, as an independent reading of AUTOMATIC1111 1.10's grammar has them.

Its grammar is ambiguous where brackets or colons belong to nothing (`a: [b:c:0.5]`). Its parser
(lark 1.1.2) then takes any of the readings, another one with another hash seed of Python. Both
readings here take the one that most prompts have there: what can be editing is.
"""

import json
from pathlib import Path

import pytest

from imagefleet import errors
from imagefleet.job import editing

#: Prompts with every construct, in each other and damaged; steps, steps of a first pass, and the
#: words until each step.
CASES = Path(__file__).with_name("editing.jsonl")


def test_no_prompt_is_read_otherwise_than_by_the_grammar():
    lines = CASES.read_text().split("\n")
    for text, steps, first_steps, expected in map(json.loads, filter(None, lines)):
        found = editing.schedule(text, steps, first_steps)
        assert [[until, words] for until, words in found] == expected, text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a [b:3]", [(3, "a "), (10, "a b")]),
        ("a [b:.5] c", [(5, "a  c"), (10, "a b c")]),
        ("[a::0.3]b", [(3, "ab"), (10, "b")]),
        ("[:a:4]b", [(4, "b"), (10, "ab")]),
        ("a[b:[c:d:2]:1]e", [(1, "abe"), (2, "ace"), (10, "ade")]),
        ("[(a:1.2) b: c : 2 ]", [(2, "(a:1.2) b"), (10, " c ")]),
        ("a [[[b]]:2]", [(2, "a "), (10, "a [[b]]")]),
        ("((a][:b:c [d:3]", [(3, "((a][:b:c "), (10, "((a][:b:c d")]),
        ("[a:b:0]", [(10, "b")]),
        ("[a:b:99]", [(10, "a")]),
        ("[a:b:1.0]", [(10, "a")]),
        ("[a:b:1]", [(1, "a"), (10, "b")]),
        ("[a|b:0.5]", [(10, "[a|b:0.5]")]),
        ("a | [b:c:5]", [(10, "a | [b:c:5]")]),
        ("[a:b:5] \\", [(10, "[a:b:5] \\")]),
        (r"\[a:b:5\]", [(10, r"\[a:b:5\]")]),
        (r"[a\|b:c:5]", [(5, r"a\|b"), (10, "c")]),
        ("[a:b:\u0665]", [(10, "[a:b:\u0665]")]),  # an Arabic digit
        ("[a:b:1e999]", [(10, "a")]),
    ],
)
def test_words_change_after_the_steps_they_are_given(
    text: str, expected: list[tuple[int, str]]
):
    assert editing.schedule(text, 10, 0) == expected


def test_alternation_has_an_entry_for_each_step():
    assert editing.schedule("[fe|]male", 4, 0) == [
        (1, "female"),
        (2, "male"),
        (3, "female"),
        (4, "male"),
    ]


@pytest.mark.parametrize(
    ("when", "last"),
    [("0.5", 0), ("5", 0), ("1.5", 3), ("22", 2), ("1.0", 0), ("3.0", 6)],
)
def test_a_second_pass_has_shares_from_1_and_steps_after_those_of_the_first(
    when: str, last: int
):
    """Of 6 steps, after 20."""
    found = editing.schedule(f"[a:b:{when}]", 6, 20)
    assert found == ([(last, "a")] if last else []) + ([(6, "b")] if last < 6 else [])


def test_too_many_texts_are_refused_and_not_written_down_first():
    of_8 = "".join(f"[{letter}|{letter}{letter}]" for letter in "abcdefgh")
    assert len(editing.schedule(of_8, 150, 0)) == 150
    primes = "[a|b|c|d|e|f|g][h|i|j|k|l|m|n|o|p|q|r]"
    assert len(editing.schedule(primes, 60, 0)) == 60
    with pytest.raises(errors.JobError, match="more than 64 different texts"):
        editing.schedule(primes, 70, 0)
    with pytest.raises(errors.JobError, match="more than 64 different texts"):
        editing.schedule(
            primes + "[a|b]" * 10_000, 150, 0
        )  # of minutes, if all were written


def test_editing_in_itself_has_a_limit():
    def nested(depth: int) -> str:
        return "[" * depth + "a" + ":b:2]" * depth

    assert editing.schedule(nested(32), 4, 0) == [(2, "a"), (4, "b")]
    with pytest.raises(errors.JobError, match="more than 32 deep"):
        editing.schedule(nested(33), 4, 0)
    with pytest.raises(errors.JobError, match="more than 32 deep"):
        editing.schedule(nested(10_000), 4, 0)
