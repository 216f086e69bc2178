"""The words at each step, against an independent reading of AUTOMATIC1111 1.10's grammar.

Its grammar is ambiguous where brackets or colons belong to nothing (`a: [b:c:0.5]`). Its parser
(lark 1.1.2) then takes any of the readings, another one with another hash seed of Python. Both
readings here take the one that most prompts have there: what can be editing is.
"""

import random
import re

import pytest

from imagefleet import errors
from imagefleet.job import editing

NUMBER = re.compile(r"\s*([-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?)\s*(?=])", re.ASCII)
NUMBERS = [
    "0.5",
    "5",
    ".25",
    "1.5",
    "3",
    "0",
    "-1",
    "+2",
    "12",
    "1.",
    "1.75",
    "1e1",
    "0.0",
    "99",
]
WORDS = re.compile(r"(?:[^\\()\[\]:|]|\\.)+")


class Reading:
    """Tries each rule at each place, and remembers what came of it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.known: dict[int, tuple[object, int] | None] = {}
        self.tree: list[object] = []
        at = 0
        while at < len(text):
            item, at = self.item(at) or (text[at], at + 1)
            self.tree.append(item)
        if not {"|", "\\"}.isdisjoint(
            item for item in self.tree if isinstance(item, str)
        ):
            self.tree = [text]

    def item(self, at: int) -> tuple[object, int] | None:
        if at not in self.known:
            words = WORDS.match(self.text, at)
            self.known[at] = (words[0], words.end()) if words else self.bracket(at)
        return self.known[at]

    def prompt(self, at: int) -> tuple[list[object], int]:
        items = []
        while found := self.item(at):
            items.append(found[0])
            at = found[1]
        return items, at

    def bracket(self, at: int) -> tuple[object, int] | None:
        text, opening = self.text, self.text[at : at + 1]
        if opening not in {"(", "["}:
            return None
        first, end = self.prompt(at + 1)
        sign = text[end : end + 1]
        if sign == (")" if opening == "(" else "]"):
            return [opening, *first, sign], end + 1
        if opening == "(":
            second, close = self.prompt(end + 1)
            is_closed = sign == ":" and text[close : close + 1] == ")"
            return (["(", *first, ":", *second, ")"], close + 1) if is_closed else None
        return self.alternation(first, end) if sign == "|" else self.edit(first, end)

    def alternation(self, first: list[object], end: int) -> tuple[object, int] | None:
        options = [first]
        while self.text[end : end + 1] == "|":
            option, end = self.prompt(end + 1)
            options.append(option)
        return (("|", options), end + 1) if self.text[end : end + 1] == "]" else None

    def edit(self, first: list[object], end: int) -> tuple[object, int] | None:
        options = [[], first]
        number = (
            NUMBER.match(self.text, end + 1)
            if self.text[end : end + 1] == ":"
            else None
        )
        if not number and self.text[end : end + 1] == ":":
            second, end = self.prompt(end + 1)
            options = [first, second]
            number = (
                NUMBER.match(self.text, end + 1)
                if self.text[end : end + 1] == ":"
                else None
            )
        return ((number[1], options), number.end() + 1) if number else None

    def schedule(self, base: int, hires: int | None) -> list[tuple[int, str]]:
        steps = base if hires is None else hires
        changes = {steps}

        def switch(number: str) -> int:
            of_pass = float(number) - (
                0 if hires is None else (1 if "." in number else base)
            )
            return min(steps, int(of_pass * steps if "." in number else of_pass))

        def visit(node: object) -> None:
            if isinstance(node, tuple):
                kind, options = node
                changes.update(range(1, steps + 1) if kind == "|" else {switch(kind)})
                visit(options)
            elif isinstance(node, list):
                for child in node:
                    visit(child)

        def write(node: object, step: int) -> str:
            if isinstance(node, str):
                return node
            if isinstance(node, tuple):
                kind, options = node
                at = (
                    (step - 1) % len(options)
                    if kind == "|"
                    else int(step > switch(kind))
                )
                return write(options[at], step)
            assert isinstance(node, list)
            return "".join(write(child, step) for child in node)

        visit(self.tree)
        return [(step, write(self.tree, step)) for step in sorted(changes) if step >= 1]


class Author:
    """Writes prompts with every construct, in each other and damaged."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def prompt(self, depth: int) -> str:
        return "".join(self.piece(depth) for _ in range(self.random.randint(0, 3)))

    def piece(self, depth: int) -> str:
        chosen, inside = self.random, depth - 1
        kind = chosen.randint(0, 9) if depth else 9
        number = chosen.choice(NUMBERS)
        number = chosen.choice(["", "", " "]) + number + chosen.choice(["", "", "\n"])
        if kind <= 2:
            return f"[{self.prompt(inside)}:{self.prompt(inside)}:{number}]"
        if kind == 3:
            return f"[{self.prompt(inside)}:{number}]"
        if kind in {4, 5}:
            options = [self.prompt(inside) for _ in range(chosen.randint(2, 4))]
            return f"[{'|'.join(options)}]"
        if kind == 6:
            return f"({self.prompt(inside)}:{number})"
        if kind == 7:
            return chosen.choice(["({})", "[{}]"]).format(self.prompt(inside))
        return chosen.choice(
            [
                "a",
                "red fox",
                " ",
                "x, y",
                r"\[",
                r"\(",
                r"\:",
                r"\|",
                " c",
                "5",
                ".5",
                "é",
                "BREAK",
            ]
        )

    def damaged(self, text: str) -> str:
        for _ in range(self.random.choice([0, 0, 0, 1, 2])):
            at = self.random.randint(0, len(text))
            taken = self.random.randint(0, 1)
            text = (
                text[:at]
                + self.random.choice(["", *"[]():|\\ 5."])
                + text[at + taken :]
            )
        return text


@pytest.mark.parametrize("seed", range(4))
def test_no_prompt_is_read_otherwise_than_by_the_grammar(seed: int) -> None:
    author, edited = Author(seed), 0
    for _ in range(5_000):
        text = author.damaged(author.prompt(author.random.randint(1, 3)))
        base, hires = (
            author.random.choice([1, 5, 12]),
            author.random.choice([None, None, 1, 4, 10]),
        )
        expected = Reading(text).schedule(base, hires)
        steps, first_steps = (base, 0) if hires is None else (hires, base)
        assert editing.schedule(text, steps, first_steps) == expected, text
        edited += len({words for _, words in expected}) > 1
    assert edited > 1_000


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
) -> None:
    assert editing.schedule(text, 10, 0) == expected


def test_alternation_has_an_entry_for_each_step() -> None:
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
) -> None:
    """Of 6 steps, after 20."""
    found = editing.schedule(f"[a:b:{when}]", 6, 20)
    assert found == ([(last, "a")] if last else []) + ([(6, "b")] if last < 6 else [])


def test_too_many_texts_are_refused_and_not_written_down_first() -> None:
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


def test_editing_in_itself_has_a_limit() -> None:
    def nested(depth: int) -> str:
        return "[" * depth + "a" + ":b:2]" * depth

    assert editing.schedule(nested(32), 4, 0) == [(2, "a"), (4, "b")]
    with pytest.raises(errors.JobError, match="more than 32 deep"):
        editing.schedule(nested(33), 4, 0)
    with pytest.raises(errors.JobError, match="more than 32 deep"):
        editing.schedule(nested(10_000), 4, 0)
