"""Networks that judge images: files NAME.safetensors or NAME.onnx, whose name is their score's.

An ONNX network takes images [n, 3, side, side] of 0 to 1, and if it has a second input, CLIP's
tokens [n, 77] of their prompts; it gives each image a score, the higher the better. It runs on the
CPU. The others are CLIP in the names of transformers, and heads on its embedding of an image; they
run between the ticks of the engine (`worker.engine.judges`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from PIL import Image

from imagefleet.errors import JobError, MissingFileError
from imagefleet.files import kinds
from imagefleet.files.safetensors import Identity
from imagefleet.keeping.rule import DIGITS
from imagefleet.validation import JSONDict
from worker.engine.contract import Pixels
from worker.files.library import FileLibrary, Source
from worker.inputs import detectors
from worker.judges import pixels
from worker.judges.preparation import (
    CLIP_MEAN,
    CLIP_STD,
    Channels,
    Features,
    clip_crop,
    normalised,
)

#: The network whose embedding of an image heads judge.
CLIP = "clip"


class Drawn(NamedTuple):
    """An image to be judged, and the words of its prompt."""

    pixels: Pixels
    words: str


#: Scores of images, by the scores' names.
_Scores = Mapping[str, Sequence[float]]


@dataclass(eq=False)
class Judges:
    """Scores images by their pixels, or by the networks of `judges/` in the storage."""

    source: Source
    device: str
    #: Calls a function where the GPU may be used.
    on_engine: Callable[[Callable[[], _Scores]], Awaitable[_Scores]] = asyncio.to_thread

    def __post_init__(self) -> None:
        # A name may have a file of each suffix: here suffixes are part of the names.
        kind = replace(kinds.JUDGE, suffixes=("",), has_header=False)
        self._library = FileLibrary(self.source, kind)
        self._files: dict[str, str] = {}  # of scores, as they were found

    async def find(self, name: str) -> Identity:
        """The file of a score's network.

        Raises MissingFileError if there is none, or a head's CLIP is missing, JobError if that is
        in ONNX, else as `FileLibrary.resolve`.
        """
        missing: list[str] = []
        files = [f"{name}{suffix}" for suffix in kinds.JUDGE.suffixes]
        for file in dict.fromkeys((self._files.get(name, files[0]), *files)):
            try:
                path = await self._library.resolve(file)
            except MissingFileError as error:
                missing.append(error.message)
            else:
                self._files[name] = file
                if name != CLIP and kinds.ONNX not in file:
                    await self.find(CLIP)
                    if kinds.ONNX in self._files[CLIP]:
                        raise JobError(
                            f"keep: {file} judges by CLIP's embedding: it needs"
                            f" {CLIP}.safetensors beside it, not {self._files[CLIP]}"
                        )
                return self._library.identity(path)
        raise MissingFileError(
            f"keep: the score {name!r} is neither {' nor '.join(pixels.SCORES)}, and has no"
            f" network: {'; '.join(missing)}"
        )

    async def scores(
        self, names: Sequence[str], drawn: Sequence[Drawn]
    ) -> list[dict[str, float]]:
        """The scores of each image; raises as `find`, and JobError for an unfit network."""
        found: dict[str, Sequence[float]] = {}
        on_clip: dict[str, Identity] = {}
        for name in names:
            run = _of_pixels
            if name not in pixels.SCORES:
                file = await self.find(name)
                if kinds.ONNX not in self._files[name]:
                    on_clip[name] = file
                    continue
                run = partial(_run, file)
            found[name] = await asyncio.to_thread(run, name, drawn)
        if on_clip:
            clip = on_clip.get(CLIP) or await self.find(CLIP)
            score = await asyncio.to_thread(self._prepared, clip, on_clip, drawn)
            found.update(await self.on_engine(score))
        return [
            {name: round(found[name][at], DIGITS) for name in names}
            for at in range(len(drawn))
        ]

    def _prepared(
        self, clip: Identity, on_clip: Mapping[str, Identity], drawn: Sequence[Drawn]
    ) -> Callable[[], _Scores]:
        """What is left to be done where the GPU may be used."""
        from worker.engine import judges  # which needs torch

        model = judges.read_clip(clip)
        heads = {
            name: None if file == clip else judges.read_head(file)
            for name, file in on_clip.items()
        }
        side = model.config.vision_config.image_size
        images = _images(drawn, side, CLIP_MEAN, CLIP_STD)
        tokens = judges.tokens([each.words for each in drawn])
        return partial(judges.scores, self.device, model, heads, images, tokens)


def _of_pixels(name: str, drawn: Sequence[Drawn]) -> list[float]:
    return [pixels.SCORES[name](each.pixels) for each in drawn]


def _run(file: Identity, name: str, drawn: Sequence[Drawn]) -> list[float]:
    """An ONNX network's scores; raises JobError if it is none that judges images."""
    from worker.engine import judges  # which needs torch

    what = f"the judge {name!r}"
    session = detectors.session(file, what)
    try:
        first, *others = session.get_inputs()
        side = int(first.shape[-1])
        given: JSONDict = {first.name: _images(drawn, side, (0.0,) * 3, (255.0,) * 3)}
        for other in others:
            given[other.name] = judges.tokens([each.words for each in drawn])
        return np.reshape(session.run(None, given)[0], len(drawn)).tolist()
    except Exception as error:  # noqa: BLE001 - onnxruntime's own errors share no class
        raise JobError(
            f"{what} takes no images [n, 3, side, side], or does not score each:"
            f" {str(error)[:200]}"
        ) from None


def _images(
    drawn: Sequence[Drawn], side: int, mean: Channels, std: Channels
) -> Features:
    """The images [n, 3, side, side] as a network takes them."""
    cropped = [clip_crop(Image.fromarray(each.pixels), side) for each in drawn]
    return normalised(cropped, mean, std)
