"""Prompt editing: the words of `[from:to:when]` and `[one|other]` at each step.

As AUTOMATIC1111 1.10 reads them (`prompt_parser.get_learned_conditioning_prompt_schedules`, whose
grammar an Earley parser reads); here one scan finds the brackets.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from imagefleet import errors

#: Different texts of a prompt in the course of its steps: all are encoded before the first one.
MAX_TEXTS = 64

#: Edits in options of others.
_MAX_DEPTH = 32

_SIGN = re.compile(r"\\.|[()\[\]:|]")
_OPENED_BY = {")": "(", "]": "["}
_ESCAPES_NOTHING = re.compile(r"(?<!\\)(?:\\\\)*\\(?!.)")
_WHEN = re.compile(r"\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*")

#: The signs in brackets that are emphasis.
_OF_EMPHASIS = {"(": ("", ":"), "[": ("",)}


class _Edit(NamedTuple):
    """`[from:to:when]` or, without a *when*, `[one|other]`."""

    start: int
    end: int
    options: Sequence[tuple[int, int]]
    """Start and end of each option in the text."""
    inside: Sequence[_Edit]
    when: str | None


@dataclass(slots=True)
class _Open:
    start: int
    edits: int
    """Number of edits found before it."""
    signs: list[re.Match[str]] = field(default_factory=list)
    """Its colons and bars."""


def schedule(text: str, steps: int, first_steps: int) -> list[tuple[int, str]]:
    """A text's words: steps, counted from 1, until which it has them, in order.

    Some entries have the words of the one before. *first_steps* are the first pass' for a second
    one, else 0. Raises JobError for too many texts.
    """
    edits = _find(text)
    whens = {edit.when for edit in _all_edits(edits)}
    switches = {when: _last_step(when, steps, first_steps) for when in whens if when}
    every = range(1, steps + 1) if None in whens else ()
    ends = {steps, *every, *filter(None, switches.values())}
    texts: dict[str, str] = {}
    found = []
    for step in sorted(ends):
        words = "".join(_words_at(text, edits, (0, len(text)), step, switches))
        found.append((step, texts.setdefault(words, words)))
        refuse_more(len(texts))
    return found


def refuse_more(texts: int) -> None:
    """Raises JobError for a prompt of more *texts* than may be encoded."""
    if texts > MAX_TEXTS:
        raise errors.JobError(
            f"the prompt has more than {MAX_TEXTS} different texts in the course of its steps:"
            " write fewer [from:to:when] and [one|other]"
        )


def _last_step(when: str, steps: int, first_steps: int) -> int:
    """The last step of what an edit begins with; 0 for none.

    A number with a point is a share of the steps. In a second pass, shares begin with 1, and steps
    count on from those of the first pass.
    """
    number = float(when)
    if "." in when:
        number = (number - (first_steps > 0)) * steps
    else:
        number -= first_steps
    return int(max(0.0, min(steps, number)))


def _all_edits(edits: Sequence[_Edit], depth: int = 1) -> Iterator[_Edit]:
    if edits and depth > _MAX_DEPTH:
        raise errors.JobError(
            f"the prompt has prompt editing in itself, more than {depth - 1} deep"
        )
    for edit in edits:
        yield edit
        yield from _all_edits(edit.inside, depth + 1)


def _words_at(
    text: str,
    edits: Sequence[_Edit],
    span: tuple[int, int],
    step: int,
    switches: Mapping[str, int],
) -> Iterator[str]:
    at, end = span
    for edit in edits:
        if at <= edit.start < end:
            yield text[at : edit.start]
            last = switches.get(edit.when or "")
            chosen = (
                (step - 1) % len(edit.options) if last is None else int(step > last)
            )
            yield from _words_at(
                text, edit.inside, edit.options[chosen], step, switches
            )
            at = edit.end
    yield text[at:end]


def _find(text: str) -> list[_Edit]:
    """The edits of a text, in order; those in others are in these.

    Brackets that are neither emphasis nor an edit are words, and so are those around them. A bar or
    a backslash that belongs to nothing makes words of the whole text.
    """
    found: list[_Edit] = []
    if not (":" in text or "|" in text) or _ESCAPES_NOTHING.search(text):
        return found
    opened: list[_Open] = []
    bars = 0
    for match in _SIGN.finditer(text):
        sign = match[0]
        if sign in _OF_EMPHASIS:
            opened.append(_Open(match.start(), len(found)))
        elif sign in {":", "|"}:
            bars += sign == "|"
            if opened:
                opened[-1].signs.append(match)
        elif sign in _OPENED_BY and opened:
            bracket = opened.pop()
            signs, opening = (
                "".join(each[0] for each in bracket.signs),
                text[bracket.start],
            )
            if opening != _OPENED_BY[sign]:
                opened.clear()
            elif signs in _OF_EMPHASIS[opening]:
                continue
            elif opening == "[" and (
                edit := _read(text, bracket, match, found[bracket.edits :])
            ):
                bars -= len(edit.options) - 1 if edit.when is None else 0
                found[bracket.edits :] = [edit]
            else:
                opened.clear()
    return [] if bars else found


def _read(
    text: str, bracket: _Open, end: re.Match[str], inside: list[_Edit]
) -> _Edit | None:
    """Reads square brackets with signs as an edit with those *inside* it; None for words."""
    signs = "".join(each[0] for each in bracket.signs)
    cuts = [bracket.start, *(each.start() for each in bracket.signs), end.start()]
    when = None
    if ":" in signs:
        number = _WHEN.fullmatch(text, cuts[-2] + 1, cuts[-1])
        if signs not in {":", "::"} or number is None:
            return None
        when = number[1]
        cuts.pop()
    options = [(one + 1, other) for one, other in itertools.pairwise(cuts)]
    if signs == ":":
        options.insert(0, (0, 0))
    return _Edit(bracket.start, end.end(), options, inside, when)
