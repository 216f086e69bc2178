"""Prompt editing: the words of `[from:to:when]` and `[one|other]` at each step.

As AUTOMATIC1111 1.10 reads them (`prompt_parser.get_learned_conditioning_prompt_schedules`, whose
grammar an Earley parser reads); here one scan finds the brackets.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from imagefleet.errors import JobError

#: Different texts of a prompt in the course of its steps: all are encoded before the first one.
MAX_TEXTS = 64

#: Edits in options of others.
_MAX_DEPTH = 32

_SIGN = re.compile(r"(\\.|[()\[\]:|])")
_OPENED_BY = {")": "(", "]": "["}
_ESCAPES_NOTHING = re.compile(r"(?<!\\)(?:\\\\)*\\(?!.)")
_WHEN = re.compile(r"\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*")

#: The signs in brackets that are emphasis.
_OF_EMPHASIS = {"(": ("", ":"), "[": ("",)}


class _Edit(NamedTuple):
    """`[from:to:when]` or, without a *when*, `[one|other]`."""

    options: Sequence[Sequence[_Piece]]
    when: str | None


#: A piece of a text: words, one of the signs, or an edit, whose options are pieces as well.
_Piece = str | _Edit


def schedule(text: str, steps: int, first_steps: int) -> list[tuple[int, str]]:
    """A text's words: steps, counted from 1, until which it has them, in order.

    Some entries have the words of the one before. *first_steps* are the first pass' for a second
    one, else 0. Raises JobError for too many texts.
    """
    pieces = _read(text)
    whens = {edit.when for edit in _edits(pieces)}
    switches = {when: _last_step(when, steps, first_steps) for when in whens if when}
    every = range(1, steps + 1) if None in whens else ()
    ends = {steps, *every, *filter(None, switches.values())}
    texts: dict[str, str] = {}
    found = []
    for step in sorted(ends):
        words = "".join(_words_at(pieces, step, switches))
        found.append((step, texts.setdefault(words, words)))
        refuse_more(len(texts))
    return found


def refuse_more(texts: int) -> None:
    """Raises JobError for a prompt of more *texts* than may be encoded."""
    if texts > MAX_TEXTS:
        raise JobError(
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


def _edits(pieces: Iterable[_Piece], depth: int = 0) -> Iterator[_Edit]:
    """The edits of a text, and those in their options."""
    for edit in pieces:
        if isinstance(edit, str):
            continue
        if depth == _MAX_DEPTH:
            raise JobError(
                f"the prompt has prompt editing in itself, more than {depth} deep"
            )
        yield edit
        for option in edit.options:
            yield from _edits(option, depth + 1)


def _words_at(
    pieces: Iterable[_Piece], step: int, switches: Mapping[str, int]
) -> Iterator[str]:
    for piece in pieces:
        if isinstance(piece, str):
            yield piece
            continue
        last = switches.get(piece.when or "")
        chosen = (step - 1) % len(piece.options) if last is None else int(step > last)
        yield from _words_at(piece.options[chosen], step, switches)


def _read(text: str) -> Sequence[_Piece]:
    """The pieces of a text.

    Brackets that are neither emphasis nor an edit are words, and so are those around them. A bar or
    a backslash that belongs to nothing makes words of the whole text.
    """
    if not (":" in text or "|" in text) or _ESCAPES_NOTHING.search(text):
        return [text]
    pieces: list[_Piece] = []
    # Of each open bracket, the places of itself and of its colons and bars.
    opened = []
    bars = 0
    for piece in _SIGN.split(text):
        if piece in _OF_EMPHASIS:
            opened.append([len(pieces)])
        elif piece in {":", "|"}:
            bars += piece == "|"
            if opened:
                opened[-1].append(len(pieces))
        elif piece in _OPENED_BY and opened:
            places = opened.pop()
            opening, *between = (str(pieces[place]) for place in places)
            signs = "".join(between)
            if opening == _OPENED_BY[piece] and signs in _OF_EMPHASIS[opening]:
                pass
            elif opening + piece == "[]" and (edit := _edit(pieces, places, signs)):
                bars -= len(edit.options) - 1 if edit.when is None else 0
                pieces[places[0] :] = [edit]
                continue
            else:
                opened.clear()
        pieces.append(piece)
    return [text] if bars else pieces


def _edit(pieces: Sequence[_Piece], places: Sequence[int], signs: str) -> _Edit | None:
    """The edit in square brackets with signs, which are at these places; None for words."""
    options = [
        pieces[one + 1 : other]
        for one, other in itertools.pairwise([*places, len(pieces)])
    ]
    if ":" not in signs:
        return _Edit(options, None)
    number = _WHEN.fullmatch("".join(map(str, options.pop())))
    if signs not in {":", "::"} or number is None:
        return None
    return _Edit(options if signs == "::" else [[], *options], number[1])
