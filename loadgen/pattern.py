"""A template's patterns: placeholders, weighted draws, rendering.

A placeholder `{noun}` is one entry of the list `noun`, the same everywhere in a job; `{noun:2}` is
a second draw. Entries may contain placeholders. `{{` and `}}` are braces.

Draws use SHAKE-256 (FIPS 202): job n is a function of the seed and n, on every version of Python.
`random.Random` guarantees that for `random()` only, from the start of its sequence.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from imagefleet import errors
from loadgen.template import Choice

#: Two numbers in [0, 1) for one slot: which choice, and a LoRA's strength in its range.
Draw = tuple[float, float]

_TOKEN = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*(?::[0-9]+)?)\}|[{}]")


@dataclass(frozen=True, slots=True)
class _Word:
    """A choice, ready to render: literal text and, as numbers, slots."""

    parts: tuple[str | int, ...]
    lora: str | None
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class _Slot:
    """One draw of a job; *cumulative* are the running sums of the weights."""

    cumulative: tuple[float, ...]
    words: tuple[_Word, ...]

    def pick(self, fraction: float) -> _Word:
        total = self.cumulative[-1]
        # Rounding may lift the product up to the last sum, so that is not searched.
        place = bisect.bisect_right(self.cumulative, fraction * total, 0, len(self.words) - 1)
        return self.words[place]

    def fraction_of(self, word: int) -> float:
        """A number that picks word *word*, modulo their number."""
        word %= len(self.words)
        below = self.cumulative[word - 1] if word else 0.0
        return (below + self.cumulative[word]) / 2 / self.cumulative[-1]


class Patterns:
    """All slots of a template: `slot` adds one, `draw` draws for all, `render` gives the text."""

    def __init__(self, lists: Mapping[str, Sequence[Choice]]) -> None:
        self._lists = lists
        self._slots: list[_Slot] = []
        self._numbers: dict[str, int] = {}
        self._open: list[str] = []

    def slot(self, choices: Sequence[Choice], place: str) -> int:
        """Adds a slot with these choices and returns its number.

        Raises:
            SetupError: an unknown list, a single brace, or lists that refer to each other in a
                circle.
        """
        words = tuple(self._word(choice, place) for choice in choices)
        cumulative = tuple(itertools.accumulate(choice.weight for choice in choices))
        self._slots.append(_Slot(cumulative, words))
        return len(self._slots) - 1

    @property
    def longest(self) -> int:
        return max(len(slot.words) for slot in self._slots)

    def draw(self, seed: int, index: int) -> list[Draw]:
        size = len(self._slots)
        stream = hashlib.shake_256(struct.pack(">QQ", seed, index)).digest(16 * size)
        # A float has 53 bits.
        numbers = [number / 2**53 for number in _top_53_bits(stream, 2 * size)]
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def draw_in_turn(self, turn: int) -> list[Draw]:
        """Every slot at its choice *turn*: `longest` turns cover each word of each list."""
        return [(slot.fraction_of(turn), 0.5) for slot in self._slots]

    def render(self, slot: int, draws: Sequence[Draw]) -> str:
        fraction, within = draws[slot]
        word = self._slots[slot].pick(fraction)
        text = "".join(
            [part if isinstance(part, str) else self.render(part, draws) for part in word.parts]
        )
        if word.lora is None:
            return text
        strength = word.lowest + (word.highest - word.lowest) * within
        tag = f"<lora:{word.lora}:{strength:.2f}>"
        return f"{tag}, {text}" if text else tag

    def _word(self, choice: Choice, place: str) -> _Word:
        parts = tuple(self._parts(choice.text, place))
        return _Word(parts, choice.lora, *choice.strength)

    def _parts(self, text: str, place: str) -> list[str | int]:
        parts: list[str | int] = []
        end = 0
        for token in _TOKEN.finditer(text):
            parts.append(text[end : token.start()])
            parts.append(self._part(token, place))
            end = token.end()
        parts.append(text[end:])
        return [part for part in parts if part != ""]

    def _part(self, token: re.Match[str], place: str) -> str | int:
        placeholder = token[1]
        if placeholder is not None:
            return self._placeholder(placeholder, place)
        if len(token[0]) == 1:
            raise errors.SetupError(
                f"{place}: a single {token[0]!r} near {token.string[:60]!r};"
                " a placeholder is {name}, a literal brace is {{ or }}"
            )
        return token[0][0]

    def _placeholder(self, placeholder: str, place: str) -> int:
        if placeholder in self._numbers:
            return self._numbers[placeholder]
        name = placeholder.partition(":")[0]
        if name not in self._lists:
            known = ", ".join(sorted(self._lists)) or "none"
            raise errors.SetupError(
                f"{place}: there is no list for {{{placeholder}}}; lists: {known}"
            )
        if name in self._open:
            raise errors.SetupError(f"{place}: circular lists: {' -> '.join([*self._open, name])}")
        self._open.append(name)
        number = self.slot(self._lists[name], f"lists.{name}")
        self._open.pop()
        self._numbers[placeholder] = number
        return number


def _top_53_bits(stream: bytes, count: int) -> list[int]:
    return [number >> 11 for number in struct.unpack(f">{count}Q", stream)]
