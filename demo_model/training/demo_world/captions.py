"""Words for scenes: plain sentences and AUTOMATIC1111-like lists, with weights and filler."""

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from demo_world.shapes import SHAPES
from demo_world.world import COLOURS, Scene, Thing

CHUNK_TOKENS = 75
CHUNK_LENGTH = CHUNK_TOKENS + 2
BEGIN_TOKEN, END_TOKEN = 49406, 49407

NOUNS: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "ball"), "square": ("square", "box"), "sun": ("sun",),
    "house": ("house", "home", "cottage"), "boat": ("boat", "sailboat", "ship"),
    "car": ("car", "automobile"), "cup": ("cup", "mug"), "cat": ("cat", "kitten", "cat face"),
    "moon": ("moon", "crescent moon"), "rope": ("rope", "jump rope", "skipping rope"),
    "fish": ("fish",), "mushroom": ("mushroom", "toadstool"), "heart": ("heart",),
    "rocket": ("rocket", "space rocket"),
}  # fmt: skip
_PLURALS = {
    "fish": "fish",
    "leaf": "leaves",
    "butterfly": "butterflies",
    "box": "boxes",
}
_SIZE_WORDS = {
    "small": ("small", "tiny", "little"),
    "large": ("large", "big", "huge", "giant"),
}
_TEXTURE_WORDS = {
    "striped": ("striped", "stripy"), "dotted": ("dotted", "spotted", "polka dot"),
    "checkered": ("checkered",),
}  # fmt: skip
_COUNT_WORDS = {2: ("two", "2", "a pair of"), 3: ("three", "3")}
_POSITION_WORDS = {
    "left": ("on the left", "on the left side", "at the left"),
    "right": ("on the right", "on the right side", "at the right"),
    "top": ("at the top", "in the upper part", "on top"),
    "bottom": ("at the bottom", "in the lower part"),
    "centre": ("in the centre", "in the center", "in the middle", "centered"),
}
_RELATION_WORDS = {
    "left of": ("to the left of", "left of"), "right of": ("to the right of", "right of"),
    "above": ("above", "over", "on top of"), "below": ("below", "under", "beneath"),
    "and": ("and", "next to", "beside", "with"),
}  # fmt: skip
BACKGROUND_WORDS: dict[str, tuple[str, ...]] = {
    "plain": ("plain background", "simple background", "on a plain background", "studio backdrop"),
    "night": ("at night", "night sky", "under the stars", "night background", "starry night"),
    "forest": ("in a forest", "in the forest", "in the woods", "forest background",
               "forest scenery", "forest scenery, vines"),
    "sea": ("at sea", "by the sea", "on the ocean", "sea background", "ocean waves", "in the sea"),
    "desert": ("in the desert", "in a desert", "desert background", "sand dunes"),
    "snow": ("in the snow", "snow background", "in winter", "snowy landscape"),
    "meadow": ("in a meadow", "on a green field", "meadow background", "grassy hills"),
    "city": ("in the city", "in a city", "city background", "city skyline"),
}  # fmt: skip
_OPENINGS = (
    "", "", "", "", "a picture of", "a photo of", "photo of", "an illustration of", "a drawing of",
    "illustration of", "an image of", "a painting of", "picture of", "cute",
)  # fmt: skip
QUALITY_WORDS: tuple[str, ...] = (
    "masterpiece", "best quality", "high quality", "8k", "4k", "uhd", "highly detailed",
    "detailed", "digital art", "trending on artstation", "trending on cgsociety", "octane render",
    "8k octane render", "sharp focus", "ultra sharp", "volumetric light", "soft light", "shadows",
    "cinematic", "beautiful", "amazing", "magical", "ethereal", "intricate", "intricate design",
    "most amazing artwork in the world", "soft balanced colours", "cooler colors", "vivid colors",
    "no humans", "simple", "flat design", "vector art", "sticker", "icon", "children's book",
    "professional", "award winning", "concept art", "fantasy", "whimsical", "cute style",
    "studio lighting", "wallpaper", "hd", "realistic", "artwork", "render", "art", "elegant",
    "unreal engine", "dramatic", "stunning", "perfect composition",
)  # fmt: skip
NEGATIVE_WORDS: tuple[str, ...] = (
    "blurry", "ugly", "deformed", "distorted", "disfigured", "bad anatomy", "wrong anatomy",
    "extra limb", "missing limb", "floating limbs", "mutated hands and fingers",
    "disconnected limbs", "mutation", "mutated", "disgusting", "amputation", "human", "man",
    "woman", "low quality", "worst quality", "jpeg artifacts", "watermark", "text", "signature",
    "oversaturation", "oversaturated colours", "poorly drawn", "distorted iris", "cropped", "bad",
    "noise", "grainy", "duplicate", "out of frame", "lowres", "username", "logo", "error",
)  # fmt: skip


class Tokenizer(Protocol):
    def __call__(
        self, text: str, *, add_special_tokens: bool
    ) -> dict[str, list[int]]: ...


@dataclass(frozen=True, slots=True)
class Phrase:
    """A piece of a prompt and its emphasis, as `(text:weight)` would give it."""

    text: str
    weight: float = 1.0


def _nouns(shape: str) -> tuple[str, ...]:
    return NOUNS.get(shape, (shape,))


def _plural(noun: str) -> str:
    return _PLURALS.get(noun, noun + "s")


def _article(words: str) -> str:
    return "an" if words[0] in "aeiou" else "a"


def describe_thing(thing: Thing, rng: random.Random, count: int = 1) -> list[Phrase]:
    """`a small striped red star`, in one of several wordings; emphasis is on it or its noun."""
    noun = (
        rng.choice(_nouns(thing.shape))
        if rng.random() < 0.4
        else _nouns(thing.shape)[0]
    )
    if thing.shape == "rope" and rng.random() < 0.4:
        noun = "jump rope"
    if count > 1:
        noun = _plural(noun)
    adjectives = []
    if thing.size_word:
        adjectives.append(rng.choice(_SIZE_WORDS[thing.size_word]))
    if thing.texture:
        adjectives.append(rng.choice(_TEXTURE_WORDS[thing.texture]))
    trailing = ""
    if thing.says_colour:
        if rng.random() < 0.12:
            trailing = f"that {'are' if count > 1 else 'is'} {thing.colour}"
        else:
            adjectives.insert(rng.randrange(len(adjectives) + 1), thing.colour)
    lead = " ".join(adjectives)
    if count > 1:
        lead = f"{rng.choice(_COUNT_WORDS[count])} {lead}".strip()
    elif rng.random() < 0.75:
        lead = f"{_article(lead or noun)} {lead}".strip()
    if rng.random() < 0.5:
        phrases = [Phrase(f"{lead} {noun} {trailing}".strip(), thing.emphasis)]
    else:
        phrases = [Phrase(lead), Phrase(noun, thing.emphasis), Phrase(trailing)]
    return [phrase for phrase in phrases if phrase.text]


def describe_scene(scene: Scene, rng: random.Random) -> list[list[Phrase]]:
    """The groups of phrases that a comma or a space may separate."""
    first = scene.things[0]
    count = len(scene.things) if scene.relation is None else 1
    subject = describe_thing(first, rng, count)
    if scene.relation is not None:
        second = describe_thing(scene.things[1], rng)
        if scene.relation in ("left of", "right of") and rng.random() < 0.25:
            sides = ("on the left", "on the right")
            here, there = sides if scene.relation == "left of" else sides[::-1]
            subject += [Phrase(f"{here} and"), *second, Phrase(there)]
        else:
            subject += [Phrase(rng.choice(_RELATION_WORDS[scene.relation])), *second]
    groups = [subject]
    if scene.position:
        groups.append([Phrase(rng.choice(_POSITION_WORDS[scene.position]))])
    if scene.says_background:
        groups.append([Phrase(rng.choice(BACKGROUND_WORDS[scene.background]))])
        if rng.random() < 0.08:
            groups.reverse()
    opening = rng.choice(_OPENINGS)
    if opening and groups[0] is subject:
        subject.insert(0, Phrase(opening))
    return groups


def plain_caption(scene: Scene, rng: random.Random) -> str:
    """A caption without weights or filler, as a person would type it."""
    return ", ".join(
        " ".join(phrase.text for phrase in group)
        for group in describe_scene(scene, rng)
    )


def _words_of(texts: Iterable[str]) -> set[str]:
    return {word.strip(",") for text in texts for word in text.split()}


def scene_words() -> set[str]:
    """All words, without commas, that tell what a scene shows."""
    nouns = {noun for shape in SHAPES for noun in _nouns(shape)}
    said = [*nouns, *map(_plural, nouns), *COLOURS, "that is are"]
    for words in (
        *(_SIZE_WORDS, _TEXTURE_WORDS, _COUNT_WORDS),
        *(_POSITION_WORDS, _RELATION_WORDS, BACKGROUND_WORDS),
    ):
        said += [each for group in words.values() for each in group]
    return _words_of(said)


def world_words() -> set[str]:
    """All words, without commas, that plain captions and the quality words are made of."""
    return scene_words() | _words_of([*_OPENINGS, *QUALITY_WORDS, "a an"])


def filler(rng: random.Random, words: int, vocabulary: list[str]) -> list[Phrase]:
    """Words that say nothing about the drawn world, some of them emphasised."""
    phrases = []
    for _ in range(words):
        kind = rng.random()
        if kind < 0.6:
            text = rng.choice(QUALITY_WORDS)
        elif kind < 0.7:
            text = rng.choice(NEGATIVE_WORDS)
        else:
            text = " ".join(rng.choice(vocabulary) for _ in range(rng.randint(1, 3)))
        weight = rng.choice((1.1, 1.21, 1.3, 0.8)) if rng.random() < 0.15 else 1.0
        phrases.append(Phrase(text, weight))
    return phrases


class CaptionWriter:
    """Turns scenes into token rows in the way prompts are cut into chunks of 75 tokens."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: dict[str, int]) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[str, list[int]] = {}
        said = scene_words()
        taken = said | set(map(_plural, said))
        whole_word = re.compile(r"[a-z]{3,}</w>")
        self._noise_words = [
            token.removesuffix("</w>")
            for token in vocabulary
            if whole_word.fullmatch(token) and token.removesuffix("</w>") not in taken
        ]

    def _tokens(self, text: str) -> list[int]:
        tokens = []
        for piece in re.findall(r"[^\s,]+|,", text):
            if piece not in self._pieces:
                encoded = self._tokenizer(piece, add_special_tokens=False)
                self._pieces[piece] = list(encoded["input_ids"])
            tokens += self._pieces[piece]
        return tokens

    def write(
        self, scene: Scene, rng: random.Random, chunks: int
    ) -> tuple[NDArray[np.uint16], NDArray[np.float16]]:
        """Tokens and weights, each [chunks * 77]; one chunk drops filler that does not fit."""
        groups = describe_scene(scene, rng)
        kind = rng.random()
        if kind < 0.03:
            groups = []
        elif kind < 0.09:
            groups = [
                [Phrase(rng.choice(scene.things).colour)]
            ]  # what negative prompts name
        words = (
            rng.randint(12, 34) if chunks > 1 else rng.choice((0, 0, 0, 1, 2, 4, 8, 14))
        )
        fillers = filler(rng, words, self._noise_words)
        if not groups and not fillers:
            fillers = filler(rng, 4, self._noise_words)
        split = rng.choice((0, 0, 1, 2, len(fillers), rng.randint(0, len(fillers))))
        separated = rng.random() < 0.5
        pieces: list[Phrase] = []
        listed = (
            [[f] for f in fillers[:split]] + groups + [[f] for f in fillers[split:]]
        )
        for index, group in enumerate(listed):
            is_last = index == len(listed) - 1
            said = any(group is one for one in groups)
            comma = not is_last and (
                separated or not said or listed[index + 1] not in groups
            )
            pieces += [*group, Phrase(",")] if comma else group
        tokens, weights = self._encode(pieces)
        limit = CHUNK_TOKENS * chunks
        if len(tokens) > limit and chunks == 1:
            tokens, weights = self._encode(
                [phrase for group in groups for phrase in group]
            )
        return pad_chunks(tokens[:limit], weights[:limit], chunks)

    def _encode(self, phrases: list[Phrase]) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        weights: list[float] = []
        for phrase in phrases:
            ids = self._tokens(phrase.text)
            tokens += ids
            weights += [phrase.weight] * len(ids)
        return tokens, weights


def pad_chunks(
    tokens: list[int], weights: list[float], chunks: int
) -> tuple[NDArray[np.uint16], NDArray[np.float16]]:
    """Cuts into chunks of 75, each between a begin and an end token, padded with end tokens."""
    ids = np.full((chunks, CHUNK_LENGTH), END_TOKEN, dtype=np.uint16)
    scales = np.ones((chunks, CHUNK_LENGTH), dtype=np.float16)
    ids[:, 0] = BEGIN_TOKEN
    for chunk in range(chunks):
        part = slice(chunk * CHUNK_TOKENS, (chunk + 1) * CHUNK_TOKENS)
        length = len(tokens[part])
        ids[chunk, 1 : 1 + length] = tokens[part]
        scales[chunk, 1 : 1 + length] = weights[part]
    return ids.reshape(-1), scales.reshape(-1)
