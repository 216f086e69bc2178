"""Pictures of the drawn world with captions, drawn on all CPU cores while the training runs."""

import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from multiprocessing.pool import AsyncResult, Pool, ThreadPool

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from demo_world import captions, world
from demo_world.cascade import networks
from demo_world.world import SceneOptions

#: Scenes that a process draws at once.
BLOCK_SCENES = 250

#: Captions of a picture: other words for the same scene.
CAPTIONS_EACH = 2

#: Captions with words that say nothing of the scene, as people write them.
_FILLER_SHARE = 0.15

#: Emphasis means nothing to T5.
_SCENES = SceneOptions(emphasis_share=0)
_HELD_OUT = SceneOptions(emphasis_share=0, held_out=True)

Block = tuple[NDArray[np.uint8], list[str]]


def held_out_scenes(count: int, seed: int) -> Iterator[tuple[world.Scene, str]]:
    """Scenes of combinations that training never shows, and their captions."""
    rng = random.Random(seed)
    for _ in range(count):
        scene = world.sample_scene(rng, _HELD_OUT)
        yield scene, captions.plain_caption(scene, rng)


def _caption(scene: world.Scene, rng: random.Random) -> str:
    words = [captions.plain_caption(scene, rng)]
    if rng.random() < _FILLER_SHARE:
        words += rng.sample(captions.QUALITY_WORDS, rng.randint(1, 4))
    return ", ".join(words)


def draw_block(seed: int, block: int, count: int) -> Block:
    """Pictures [count, side, side, 3] and `CAPTIONS_EACH` captions of each."""
    rng = random.Random(f"{seed}/{block}")
    side = networks.SIDES["sr"]
    images = np.empty((count, side, side, 3), np.uint8)
    texts = []
    for index in range(count):
        scene = world.sample_scene(rng, _SCENES)
        images[index] = np.asarray(
            world.draw_scene(scene).reduce(world.IMAGE_PX // side)
        )
        texts += [_caption(scene, rng) for _ in range(CAPTIONS_EACH)]
    return images, texts


def _open_pool(processes: int) -> Pool:
    if not processes:
        return ThreadPool(1)
    # Not forked: a forked process cannot use a GPU that its parent has used.
    context = multiprocessing.get_context("spawn")
    return context.Pool(processes, initializer=_leave_ctrl_c_to_parent)


def _leave_ctrl_c_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Pictures:
    """Pictures that become more while they are drawn, on the device that trains."""

    def __init__(
        self, count: int, seed: int, device: torch.device, processes: int | None = None
    ) -> None:
        """Begins to draw, in so many processes; with 0, in a thread of this one."""
        side = networks.SIDES["sr"]
        self._device = device
        self._tokenizer = networks.build_tokenizer()
        self._images = torch.empty(
            (count, 3, side, side), dtype=torch.uint8, device=device
        )
        self._ids = torch.zeros(
            (count, CAPTIONS_EACH, networks.TOKENS), dtype=torch.int16, device=device
        )
        #: Pictures that can be trained on.
        self.ready = 0
        self._pool: Pool | None = _open_pool(
            os.cpu_count() or 1 if processes is None else processes
        )
        sizes = [
            min(BLOCK_SCENES, count - first) for first in range(0, count, BLOCK_SCENES)
        ]
        self._drawn: list[AsyncResult[Block]] = [
            self._pool.apply_async(draw_block, (seed, block, size))
            for block, size in enumerate(sizes)
        ]

    def take(self, *, wait: bool) -> None:
        """Takes what is drawn; *wait* for one block at least, if there are any to come."""
        while self._drawn and (wait or self._drawn[0].ready()):
            images, texts = self._drawn.pop(0).get()
            rows = slice(self.ready, self.ready + len(images))
            self._images[rows] = (
                torch.from_numpy(images).permute(0, 3, 1, 2).to(self._device)
            )
            ids = networks.tokenize(self._tokenizer, texts).to(torch.int16)
            self._ids[rows] = ids.unflatten(0, (-1, CAPTIONS_EACH)).to(self._device)
            self.ready += len(images)
            wait = False
        if not self._drawn:
            self.close()

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Pictures [size, 3, side, side] in 0..255 and the token ids of captions [size, TOKENS]."""
        chosen = torch.randint(self.ready, (size,), device=self._device)
        caption = torch.randint(CAPTIONS_EACH, (size,), device=self._device)
        return self._images[chosen], self._ids[chosen, caption].long()

    def close(self) -> None:
        """Ends the drawing."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()
            self._pool = None
