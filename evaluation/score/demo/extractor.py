"""The judge's features of a picture, and how well a picture fits the words of its caption."""

import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from evaluation.score import extractors
from evaluation.score.demo import judge
from evaluation.score.extractors import ExtractorFacts
from evaluation.score.preparation import Preparation
from evaluation.score.statistics import Features

#: 0 to 1 is what the judge takes.
_PREPARATION = Preparation(judge.IMAGE_PX, (0.0, 0.0, 0.0), (255.0, 255.0, 255.0))


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


class _Judging:
    """Base class of both extractors: loads the judge."""

    kind: ClassVar[str]

    def __init__(self, device: str) -> None:
        self._device = device
        self._judge = judge.load_judge(device=device)
        sha256 = extractors.sha256_of(judge.WEIGHTS_FILE)
        dimensions = self._of(torch.zeros(1, 3, judge.IMAGE_PX, judge.IMAGE_PX)).shape[
            1
        ]
        self.facts = ExtractorFacts("demo", self.kind, sha256, dimensions, _PREPARATION)

    def features(self, images: Sequence[Image.Image]) -> Features:
        return self._of(torch.from_numpy(_PREPARATION.array(images)))

    @torch.inference_mode()
    def _of(self, prepared: Tensor) -> Features:
        found = self._rows(prepared.to(self._device))
        return np.ascontiguousarray(found.float().cpu().numpy(), np.float32)

    def _rows(self, images: Tensor) -> Tensor:
        raise NotImplementedError


class DemoExtractor(_Judging):
    """For FID and KID: the means of the judge's last maps, at both of its resolutions."""

    kind = "judge"

    def _rows(self, images: Tensor) -> Tensor:
        return torch.cat([each.mean((2, 3)) for each in self._judge.maps(images)], 1)


class DemoTextExtractor(_Judging):
    """For the CLIP score and CMMD: the share of the picture of each object in each colour.

    Both sides are square roots of shares, so that their cosine is the Bhattacharyya coefficient of
    what the judge sees and what the caption names.
    """

    kind = "judge's objects and colours"

    def _rows(self, images: Tensor) -> Tensor:
        objects, colours = self._judge(images)
        shown = objects.softmax(1)[:, 1:].flatten(2)
        shares = torch.einsum(
            "bon,bcn->boc", shown, colours.softmax(1).flatten(2)
        ).flatten(1)
        return (shares / shares.sum(1, keepdim=True).clamp_min(1e-12)).sqrt()

    def text_features(self, texts: Sequence[str]) -> Features:
        return np.stack([self._row(text) for text in texts])

    def _row(self, text: str) -> Features:
        objects = self._judge.shapes
        colours = self._judge.colours
        shares = np.zeros((len(objects), len(colours)), np.float32)
        for name, colour in named(text, objects, colours):
            columns = slice(None) if colour is None else colours.index(colour)
            shares[objects.index(name), columns] += (
                1 / len(colours) if colour is None else 1
            )
        if not shares.any():  # it names no object, so that all are alike
            shares[:] = 1
        roots: Features = np.sqrt(shares / shares.sum()).ravel()
        return roots


def named(
    caption: str, objects: Sequence[str], colours: Sequence[str]
) -> list[tuple[str, str | None]]:
    """Each object of a caption, and its colour; None where the caption leaves it open."""
    text = _PLACES.sub(
        lambda found: "moon" if "moon" in found[0] else "", caption.lower()
    )
    return [
        pair
        for part in _PART.split(text)
        for pair in _of_part(
            _WORD.findall(part), frozenset(objects), frozenset(colours)
        )
    ]


def _of_part(
    words: Sequence[str], objects: frozenset[str], colours: frozenset[str]
) -> Iterator[tuple[str, str | None]]:
    colour = None
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
