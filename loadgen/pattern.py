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

_TOKEN = re.compile(r"(\{\{|\}\}|\{[A-Za-z_][A-Za-z0-9_]*(?::[0-9]+)?\}|[{}])")


#: Lists that name each other twice double the text at each level; a prompt holds 65,536 characters.
_MAX_CHARACTERS = 1_000_000
_MAX_DEPTH = 50


@dataclass(frozen=True, slots=True)
class _Word:
    """A choice, ready to render: literal text and, as numbers, slots."""

    parts: tuple[str | int, ...]
    choice: Choice


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
        self._sizes: list[int] = []

    def slot(self, choices: Sequence[Choice], place: str) -> int:
        """Adds a slot with these choices and returns its number.

        Raises:
            SetupError: an unknown list, a single brace, or lists that refer to each other in a
                circle, or so often that their text is endless.
        """
        words = tuple(_Word(self._parts(choice.text, place), choice) for choice in choices)
        size = max(sum(map(self._size, word.parts)) for word in words)
        if size > _MAX_CHARACTERS:
            raise errors.SetupError(
                f"{place}: its placeholders make a text of more than {_MAX_CHARACTERS:,} characters"
            )
        self._sizes.append(size)
        cumulative = tuple(itertools.accumulate(choice.weight for choice in choices))
        self._slots.append(_Slot(cumulative, words))
        return len(self._slots) - 1

    @property
    def longest(self) -> int:
        return max(len(slot.words) for slot in self._slots)

    def slot_of(self, name: str) -> int | None:
        """The slot of the placeholder `{name}`, if there is one."""
        return self._numbers.get(name)

    def with_word(self, draws: Sequence[Draw], slot: int, word: int) -> list[Draw]:
        """*draws*, but with choice *word* in *slot*."""
        changed = list(draws)
        changed[slot] = (self._slots[slot].fraction_of(word), draws[slot][1])
        return changed

    def draw(self, seed: int, index: int) -> list[Draw]:
        size = len(self._slots)
        stream = hashlib.shake_256(struct.pack(">QQ", seed, index)).digest(16 * size)
        # A float has 53 bits.
        numbers = [(number >> 11) / 2**53 for number in struct.unpack(f">{2 * size}Q", stream)]
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
        if word.choice.lora is None:
            return text
        lowest, highest = word.choice.strength
        tag = f"<lora:{word.choice.lora}:{lowest + (highest - lowest) * within:.2f}>"
        return f"{tag}, {text}" if text else tag

    def _size(self, part: str | int) -> int:
        """The most characters a part may have; one for a placeholder itself, which may be empty."""
        return len(part) if isinstance(part, str) else 1 + self._sizes[part]

    def _parts(self, text: str, place: str) -> tuple[str | int, ...]:
        pieces: list[str | int] = [*_TOKEN.split(text)]  # every second piece is a token
        pieces[1::2] = [self._part(str(token), text, place) for token in pieces[1::2]]
        return tuple(piece for piece in pieces if piece != "")

    def _part(self, token: str, text: str, place: str) -> str | int:
        if len(token) == 1:
            raise errors.SetupError(
                f"{place}: a single {token!r} near {text[:60]!r};"
                " a placeholder is {name}, a literal brace is {{ or }}"
            )
        return token[0] if token in {"{{", "}}"} else self._placeholder(token[1:-1], place)

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
        if len(self._open) == _MAX_DEPTH:
            raise errors.SetupError(f"{place}: lists are nested more than {_MAX_DEPTH} deep")
        self._open.append(name)
        number = self.slot(self._lists[name], f"lists.{name}")
        self._open.pop()
        self._numbers[placeholder] = number
        return number
