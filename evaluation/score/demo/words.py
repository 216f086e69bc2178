"""The objects and colours that a caption of the drawn world names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

#: Other words for an object.
_SYNONYMS = {
    "ball": "circle", "box": "square", "home": "house", "cottage": "house", "sailboat": "boat",
    "ship": "boat", "automobile": "car", "mug": "cup", "kitten": "cat", "crescent": "moon",
    "toadstool": "mushroom", "leaves": "leaf", "butterflies": "butterfly", "boxes": "square",
}  # fmt: skip

#: Places whose words are also those of objects or colours.
_PLACES = re.compile(r"under the stars|on a green field|crescent moon")

_PART = re.compile(r"[,;.]")
_WORD = re.compile(r"[a-z]+")


def named(
    caption: str, objects: Sequence[str], colours: Sequence[str]
) -> list[tuple[str, str | None]]:
    """Each object of a caption, and its colour; None where the caption leaves it open."""
    text = _PLACES.sub(lambda found: "moon" if "moon" in found[0] else "", caption.lower())
    return [
        pair
        for part in _PART.split(text)
        for pair in _of_part(_WORD.findall(part), frozenset(objects), frozenset(colours))
    ]


def _of_part(
    words: Sequence[str], objects: frozenset[str], colours: frozenset[str]
) -> Iterator[tuple[str, str | None]]:
    colour: str | None = None
    for place, word in enumerate(words):
        if word in colours:
            colour = word
            continue
        name = _SYNONYMS.get(word, word)
        name = name if name in objects else name.removesuffix("s")
        name = _SYNONYMS.get(name, name)
        if name not in objects:
            continue
        after = words[place + 1 : place + 4]
        if after[:1] == ["that"] and after[-1] in colours:  # "a star that is red"
            colour = after[-1]
        yield name, colour
        colour = None
