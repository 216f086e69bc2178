"""Draws many scenes at once, on every CPU core, into memory shared between the processes."""

import mmap
import multiprocessing
import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from demo_world import world
from demo_world.captions import CHUNK_LENGTH, CaptionWriter
from demo_world.world import SceneOptions

BLOCK_SCENES = 250


@dataclass(frozen=True, slots=True)
class Pictures:
    """Drawn scenes with their captions; N is the number of scenes.

    images: [N, 128, 128, 3] uint8; labels: [N, 2, 32, 32] uint8 (object, colour; 0 = none);
    tokens_1, weights_1: [N, 77]; tokens_2, weights_2: [N, 154]; strengths: [N] float32.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    tokens_1: NDArray[np.uint16]
    weights_1: NDArray[np.float16]
    tokens_2: NDArray[np.uint16]
    weights_2: NDArray[np.float16]
    strengths: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PictureSet:
    """What to draw: `count` scenes that take turns through `options`."""

    count: int
    options: tuple[SceneOptions, ...]
    seed: int


# Workers are forked, so they find these here instead of receiving copies.
_sets: dict[str, tuple[PictureSet, Pictures, CaptionWriter]] = {}


def _shared(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[np.generic]:
    size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size_bytes), dtype=dtype).reshape(shape)


def _empty_pictures(count: int) -> Pictures:
    size_px, cells = world.IMAGE_PX, world.LABEL_PX
    return Pictures(
        images=_shared((count, size_px, size_px, 3), np.uint8),
        labels=_shared((count, 2, cells, cells), np.uint8),
        tokens_1=_shared((count, CHUNK_LENGTH), np.uint16),
        weights_1=_shared((count, CHUNK_LENGTH), np.float16),
        tokens_2=_shared((count, 2 * CHUNK_LENGTH), np.uint16),
        weights_2=_shared((count, 2 * CHUNK_LENGTH), np.float16),
        strengths=_shared((count,), np.float32),
    )


def _draw_block(name: str, start: int) -> None:
    wanted, pictures, writer = _sets[name]
    rng = random.Random(f"{wanted.seed}/{start}")
    for index in range(start, min(start + BLOCK_SCENES, wanted.count)):
        scene = world.sample_scene(rng, wanted.options[index % len(wanted.options)])
        pictures.images[index] = np.asarray(world.draw_scene(scene))
        pictures.labels[index] = world.draw_labels(scene)
        pictures.tokens_1[index], pictures.weights_1[index] = writer.write(
            scene, rng, 1
        )
        pictures.tokens_2[index], pictures.weights_2[index] = writer.write(
            scene, rng, 2
        )
        pictures.strengths[index] = scene.strength


class Studio:
    """Draws several sets in the background, in the order given, while the GPU trains.

    Create it before anything touches the GPU: a forked process cannot use it.
    """

    def __init__(
        self, sets: dict[str, PictureSet], writer: CaptionWriter, processes: int
    ) -> None:
        for name, wanted in sets.items():
            _sets[name] = (wanted, _empty_pictures(wanted.count), writer)
        self._pool = multiprocessing.get_context("fork").Pool(processes)
        self._drawing = {
            name: self._pool.starmap_async(
                _draw_block,
                [(name, start) for start in range(0, wanted.count, BLOCK_SCENES)],
                chunksize=1,
            )
            for name, wanted in sets.items()
        }

    def pictures(self, name: str) -> Pictures:
        """Waits until the set is drawn; each set can be taken once."""
        self._drawing.pop(name).get()
        _, pictures, _ = _sets.pop(name)
        if not self._drawing:
            self._pool.terminate()
        return pictures
