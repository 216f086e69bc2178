"""Prompt editing `[from:to:when]` and alternation `[a|b]`: found, so that they can be refused.

They change words from step to step. Drawn as words, they would give a picture that nobody asked
for.
"""

from __future__ import annotations

import re

from imagefleet import errors

_OPENED_BY = {")": "(", "]": "["}
_SIGN = re.compile(r"\\.|[()\[\]:|]")
_WHEN = re.compile(r"\s*[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\s*")


def refuse(text: str) -> None:
    """Looks through a prompt's words.

    Brackets count where they pair up; those that do not, and all around them, are letters.

    Raises:
        JobError: there is prompt editing or alternation in it; shows where.
    """
    if ":" not in text and "|" not in text:
        return
    # For each bracket that is open: where it began, and the signs right inside it.
    starts: list[int] = []
    colons: list[int] = []
    last_colons: list[int] = []
    bars: list[int] = []
    for match in _SIGN.finditer(text, max(0, text.find("[")), text.rfind("]") + 1):
        sign = match[0]
        if sign in {"(", "["}:
            starts.append(match.start())
            colons.append(0)
            last_colons.append(0)
            bars.append(0)
        elif not starts:
            continue
        elif sign == ":":
            colons[-1] += 1
            last_colons[-1] = match.start()
        elif sign == "|":
            bars[-1] += 1
        elif sign in _OPENED_BY:
            span = starts.pop(), match.start()
            if not _is_group(text, span, colons.pop(), last_colons.pop(), bars.pop()):
                for stack in (starts, colons, last_colons, bars):
                    stack.clear()


def _is_group(text: str, span: tuple[int, int], colons: int, last_colon: int, bars: int) -> bool:
    """Whether what lies between two brackets is emphasis; raises JobError where it changes."""
    start, end = span
    if text[start] != _OPENED_BY[text[end]]:
        return False
    if text[start] == "(":
        return not bars and colons <= 1
    changing = None
    if bars and not colons:
        changing = "alternation [a|b]"
    elif not bars and colons in {1, 2}:
        when = _WHEN.match(text, last_colon + 1)
        changing = "prompt editing [from:to:when]" if when and when.end() == end else None
    if changing:
        shown = text[start : min(end + 1, start + 80)]
        raise errors.JobError(f"the prompt uses {changing}, which is not supported: {shown!r}")
    return not bars and not colons
