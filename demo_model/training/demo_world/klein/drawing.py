"""Draws pictures of the world with captions and labels, in other processes than the training's."""

import random
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from demo_world import captions, world
from demo_world.captions import Phrase
from demo_world.world import Scene, SceneOptions

#: Scenes that a process draws at once.
BLOCK_SCENES = 250

#: Captions of a picture: two as people write them, and one that is long.
CAPTIONS_EACH = 3
SHORT_CAPTIONS = 2

#: Tokens of a short caption and of a long one, the chat's own among them.
SHORT_TOKENS, LONG_TOKENS = 64, 192

#: Of a picture, each way, that say which object and colour is there: 2x2 in a patch.
LABEL_CELLS = 16

#: Short captions with words that say nothing of the scene.
_FILLER_SHARE = 0.2
_LEAST_LONG_WORDS, _MOST_LONG_WORDS = 4, 40
_CAPITAL_SHARE = 0.1

_SCENES = SceneOptions(emphasis_share=0)
_HELD_OUT = SceneOptions(emphasis_share=0, held_out=True)


@dataclass(frozen=True, slots=True)
class Drawing:
    """What is drawn: *count* pictures of *seed*, with a style or without."""

    count: int
    seed: int
    style: str | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """N scenes.

    images: [N, 128, 128, 3]; ids: [N, CAPTIONS_EACH, LONG_TOKENS], padded; labels: [N, 2,
    LABEL_CELLS, LABEL_CELLS], object and colour, 0 for none.
    """

    images: NDArray[np.uint8]
    ids: NDArray[np.int16]
    labels: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CaptionWriter:
    """Turns scenes into token ids of klein's chat."""

    tokenizer: str
    """As JSON."""
    prefix: str
    suffix: str
    pad: int
    words: tuple[str, ...]
    """That mean nothing in this world."""

    def open(self) -> "OpenCaptionWriter":
        return OpenCaptionWriter(self, Tokenizer.from_str(self.tokenizer))


@dataclass(frozen=True, slots=True)
class OpenCaptionWriter:
    settings: CaptionWriter
    tokenizer: Tokenizer

    def write(self, scene: Scene, rng: random.Random) -> NDArray[np.int16]:
        """Token ids [CAPTIONS_EACH, LONG_TOKENS]."""
        ids = np.full((CAPTIONS_EACH, LONG_TOKENS), self.settings.pad, np.int16)
        for row in range(CAPTIONS_EACH):
            is_short = row < SHORT_CAPTIONS
            limit = SHORT_TOKENS if is_short else LONG_TOKENS
            words = rng.randint(_LEAST_LONG_WORDS, _MOST_LONG_WORDS)
            if is_short:
                words = rng.choice((1, 2, 4, 8)) if rng.random() < _FILLER_SHARE else 0
            tokens = self.encode(self._caption(scene, rng, words))
            if len(tokens) > limit:
                tokens = self.encode(self._caption(scene, rng, 0))
            ids[row, : len(tokens)] = tokens[:limit]
        return ids

    def encode(self, text: str) -> list[int]:
        own = self.settings
        tokens: list[int] = self.tokenizer.encode(own.prefix + text + own.suffix).ids
        return tokens

    def _caption(self, scene: Scene, rng: random.Random, words: int) -> str:
        groups = captions.describe_scene(scene, rng)
        fillers = captions.filler(rng, words, list(self.settings.words))
        split = rng.choice((0, 0, 1, len(fillers), rng.randint(0, len(fillers))))
        listed = (
            [[f] for f in fillers[:split]] + groups + [[f] for f in fillers[split:]]
        )
        text = ", ".join(map(_joined, listed))
        return text[0].upper() + text[1:] if rng.random() < _CAPITAL_SHARE else text


def _joined(group: list[Phrase]) -> str:
    return " ".join(phrase.text for phrase in group)


def draw_block(
    drawing: Drawing, writer: CaptionWriter, block: int, count: int
) -> Block:
    rng = random.Random(f"{drawing.seed}/{block}")
    opened = writer.open()
    side = world.IMAGE_PX
    images = np.empty((count, side, side, 3), np.uint8)
    ids = np.empty((count, CAPTIONS_EACH, LONG_TOKENS), np.int16)
    labels = np.empty((count, 2, LABEL_CELLS, LABEL_CELLS), np.uint8)
    every = world.LABEL_PX // LABEL_CELLS
    for index in range(count):
        scene = world.sample_scene(rng, _SCENES)
        scene = replace(scene, style=drawing.style, strength=1.0)
        images[index] = np.asarray(world.draw_scene(scene))
        labels[index] = world.draw_labels(scene)[:, ::every, ::every]
        ids[index] = opened.write(scene, rng)
    return Block(images, ids, labels)


def held_out_scenes(count: int, seed: int) -> list[tuple[Scene, str]]:
    """Scenes of combinations that training never shows, and their captions."""
    rng = random.Random(seed)
    scenes = [world.sample_scene(rng, _HELD_OUT) for _ in range(count)]
    return [(scene, captions.plain_caption(scene, rng)) for scene in scenes]
