"""Networks that judge images: files NAME.safetensors or NAME.onnx, whose name is their score's.

An ONNX network takes images [n, 3, side, side] of 0 to 1, and if it has a second input, CLIP's
tokens [n, 77] of their prompts; it gives each image a score, the higher the better. It runs on the
CPU. The others are CLIP in the names of transformers, and heads on its embedding of an image; they
run between the ticks of the engine (`worker.engine.judges`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from imagefleet.errors import JobError, MissingFileError
from imagefleet.files import kinds
from imagefleet.validation import JSONDict
from worker.engine.contract import Pixels
from worker.files.library import FileLibrary, Source
from worker.inputs import detectors
from worker.judges import pixels
from worker.judges.preparation import Channels, Features, clip_crop, normalised

#: The network whose embedding of an image heads judge.
CLIP = "clip"

#: OpenAI's, out of 255, which others kept.
_MEAN = (122.7709383, 116.7460125, 104.0937362)
_STD = (68.5005327, 66.6321579, 70.3231631)

_AXES = 4


class Drawn(NamedTuple):
    """An image to be judged, and the words of its prompt."""

    pixels: Pixels
    words: str


#: Calls a function where the GPU may be used.
OnEngine = Callable[[Callable[[], list[float]]], Awaitable[list[float]]]


@dataclass(eq=False)
class Judges:
    """Scores images by the networks of `judges/` in the storage, or of a folder."""

    source: Source
    device: str
    folder: Path | None = None
    on_engine: OnEngine = asyncio.to_thread
    _networks: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        # A name may have a file of each suffix: here suffixes are part of the names.
        kind = replace(kinds.JUDGE, suffixes=("",), has_header=False)
        self._library = FileLibrary(self.source, kind, self.folder)
        self._files: dict[str, str] = {}  # of scores, as they were found

    async def find(self, name: str) -> Path | None:
        """The file of a score's network; None for a score that needs none.

        Raises MissingFileError if there is none, else as `FileLibrary.resolve`.
        """
        if name in pixels.SCORES:
            return None
        missing: list[str] = []
        files = [f"{name}{suffix}" for suffix in kinds.JUDGE.suffixes]
        known = self._files.get(name)
        for file in sorted(files, key=lambda file: file != known):
            try:
                path = await self._library.resolve(file)
            except MissingFileError as error:
                missing.append(error.message)
            else:
                self._files[name] = file
                return path
        raise MissingFileError(
            f"keep: the score {name!r} is neither {' nor '.join(pixels.SCORES)}, and has no"
            f" network: {'; '.join(missing)}"
        )

    async def scores(self, name: str, drawn: Sequence[Drawn]) -> list[float]:
        """The score *name* of each image; raises as `find`, and JobError for an unfit network."""
        path = await self.find(name)
        if path is None:
            score = pixels.SCORES[name]
            return await asyncio.to_thread(
                lambda: [score(each.pixels) for each in drawn]
            )
        if self._files[name].endswith(kinds.ONNX):
            session = await asyncio.to_thread(
                detectors.session,
                path,
                f"the judge {name!r}",
                self._library.identity(path),
            )
            return await asyncio.to_thread(_run, session, name, drawn)
        clip = path if name == CLIP else await self.find(CLIP)
        if clip is None or self._files[CLIP].endswith(kinds.ONNX):
            raise JobError(f"the judge {name!r} is a head of CLIP: clip.safetensors")
        score_all = await asyncio.to_thread(self._prepared, clip, path, drawn)
        return await self.on_engine(score_all)

    def _prepared(
        self, clip: Path, path: Path, drawn: Sequence[Drawn]
    ) -> Callable[[], list[float]]:
        """What is left to be done where the GPU may be used."""
        from worker.engine import judges  # which needs torch

        if self._networks is None:
            self._networks = judges.Networks(self.device)
        images = _prepared(drawn, judges.side(clip), _MEAN, _STD)
        tokens = judges.tokens([each.words for each in drawn])
        return partial(self._networks.scores, clip, path, images, tokens)


def _prepared(
    drawn: Sequence[Drawn], side: int, mean: Channels, std: Channels
) -> Features:
    images = [clip_crop(Image.fromarray(each.pixels), side) for each in drawn]
    return normalised(images, mean, std)


def _run(session: Any, name: str, drawn: Sequence[Drawn]) -> list[float]:
    """An ONNX network's scores; raises JobError if it is none that judges images."""
    inputs = session.get_inputs()
    side = inputs[0].shape[-1]
    if len(inputs[0].shape) != _AXES or not isinstance(side, int):
        raise JobError(
            f"the judge {name!r} should take images [n, 3, side, side] with a fixed side"
        )
    images = _prepared(drawn, side, (0.0,) * 3, (255.0,) * 3)
    given: JSONDict = {inputs[0].name: images}
    if len(inputs) > 1:
        from worker.engine import judges  # which needs transformers

        given[inputs[1].name] = judges.tokens([each.words for each in drawn])
    try:
        found = np.reshape(session.run(None, given)[0], -1)
    except Exception as error:  # noqa: BLE001 - onnxruntime's own errors share no class
        raise JobError(
            f"the judge {name!r} does not take the images: {str(error)[:200]}"
        ) from None
    if len(found) != len(drawn):
        raise JobError(
            f"the judge {name!r} gives {len(found)} scores for {len(drawn)} images"
        )
    return [float(score) for score in found]
