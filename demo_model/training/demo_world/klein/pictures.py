"""Pictures of the drawn world as latents on the device that trains, more while they are drawn."""

import json
import multiprocessing
import os
import signal
from multiprocessing.pool import AsyncResult, Pool, ThreadPool
from pathlib import Path
from typing import NamedTuple

import torch
from diffusers import AutoencoderKLFlux2
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2TokenizerFast

from demo_world import captions
from demo_world.klein import drawing, networks
from demo_world.klein.drawing import Block, CaptionWriter, Drawing
from demo_world.training import schedule, train_vae

#: Of CLIP: words that mean nothing in this world are taken from it.
_VOCABULARY = Path(__file__).parents[4] / "imagefleet/job/clip_tokenizer/vocab.json"

#: Blocks of the first drawing that are drawn before those of the others.
_FIRST_BLOCKS = 40


class Batch(NamedTuple):
    """Latents [B, IMAGE_TOKENS, CHANNELS], token ids [B, LONG_TOKENS], labels of each patch."""

    latents: Tensor
    ids: Tensor
    labels: Tensor
    """[B, 2, IMAGE_TOKENS, 4]: object and colour of its 2x2 cells."""


def caption_writer(tokenizer: Qwen2TokenizerFast) -> CaptionWriter:
    prefix, suffix = networks.chat_text("\0").split("\0")
    said = captions.world_words() | set(captions.NEGATIVE_WORDS)
    vocabulary = json.loads(_VOCABULARY.read_text("utf-8"))
    known = (each.removesuffix("</w>") for each in vocabulary if each.endswith("</w>"))
    words = [word for word in known if word.isalpha() and word.isascii()]
    return CaptionWriter(
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        prefix=prefix,
        suffix=suffix,
        pad=tokenizer.pad_token_id,
        words=tuple(w for w in words if len(w) >= 3 and w not in said),
    )


class Studio:
    """Draws in the background; open it before anything touches the GPU, since it forks."""

    def __init__(
        self,
        drawings: dict[str, Drawing],
        writer: CaptionWriter,
        processes: int | None = None,
    ) -> None:
        """Begins to draw, in so many processes; with 0, in a thread of this one."""
        self._pool: Pool
        if processes == 0:
            self._pool = ThreadPool(1)
        else:
            count = processes or max(1, (os.cpu_count() or 1) - 1)
            context = multiprocessing.get_context("fork")
            self._pool = context.Pool(count, initializer=_begin_to_draw)
        self._drawn: dict[str, list[AsyncResult[Block]]] = {
            name: [] for name in drawings
        }
        names = list(drawings)
        for name in names[:1]:
            self._submit(name, drawings[name], writer, _FIRST_BLOCKS)
        for name in (*names[1:], *names[:1]):
            self._submit(name, drawings[name], writer)

    def _submit(
        self, name: str, wanted: Drawing, writer: CaptionWriter, most: int | None = None
    ) -> None:
        size = drawing.BLOCK_SCENES
        drawn = self._drawn[name]
        blocks = range(-(-wanted.count // size))[:most]
        for block in blocks[len(drawn) :]:
            count = min(size, wanted.count - block * size)
            drawn.append(
                self._pool.apply_async(
                    drawing.draw_block, (wanted, writer, block, count)
                )
            )

    def next_block(self, name: str, *, wait: bool) -> Block | None:
        """The next that is drawn; None if there is none yet, or none is left."""
        drawn = self._drawn[name]
        if drawn and (wait or drawn[0].ready()):
            return drawn.pop(0).get()
        return None

    def is_finished(self, name: str) -> bool:
        return not self._drawn[name]

    def close(self) -> None:
        """Ends the drawing."""
        self._pool.terminate()
        self._pool.join()


def _begin_to_draw() -> None:
    # The training's own thread goes first, and signals are the parent's.
    os.nice(5)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Pictures:
    """Latents of one drawing; the earlier pictures stay while more are drawn."""

    def __init__(
        self, studio: Studio, name: str, count: int, vae: AutoencoderKLFlux2
    ) -> None:
        device = vae.device
        self._studio, self._name, self._vae = studio, name, vae
        self._latents = torch.empty(
            (count, networks.IMAGE_TOKENS, networks.CHANNELS),
            dtype=torch.float16,
            device=device,
        )
        self._ids = torch.empty(
            (count, drawing.CAPTIONS_EACH, drawing.LONG_TOKENS),
            dtype=torch.int16,
            device=device,
        )
        self._labels = torch.empty(
            (count, 2, networks.IMAGE_TOKENS, 4), dtype=torch.uint8, device=device
        )
        self.ready = 0
        """Pictures that can be trained on."""

    def take(self, least: int) -> None:
        """Takes what is drawn; waits until *least* are, or all."""
        least = min(least, len(self._latents))
        while block := self._studio.next_block(self._name, wait=self.ready < least):
            rows = slice(self.ready, self.ready + len(block.images))
            self._latents[rows] = encode(self._vae, torch.from_numpy(block.images))
            self._ids[rows] = torch.from_numpy(block.ids).to(self._ids.device)
            self._labels[rows] = _by_patch(torch.from_numpy(block.labels)).to(
                self._labels.device
            )
            self.ready += len(block.images)

    def batch(self, size: int, *, long_share: float = 0.0) -> Batch:
        """Latents normalised, with one caption each, of which a share may be a long one."""
        device = self._latents.device
        chosen = torch.randint(self.ready, (size,), device=device)
        caption = torch.randint(drawing.SHORT_CAPTIONS, (size,), device=device)
        is_long = torch.rand(size, device=device) < long_share
        caption = torch.where(is_long, drawing.CAPTIONS_EACH - 1, caption)
        mean, deviation = networks.statistics(self._vae)
        latents = (self._latents[chosen].float() - mean) / deviation
        ids = self._ids[chosen, caption].long()
        return Batch(latents, ids, self._labels[chosen].long())

    def measure_statistics(self) -> None:
        """Sets the autoencoder's statistics to those of the pictures that are there."""
        values = self._latents[: self.ready].float().flatten(0, 1)
        self._vae.bn.running_mean.copy_(values.mean(0))
        self._vae.bn.running_var.copy_(values.var(0))


def _by_patch(labels: Tensor) -> Tensor:
    """[N, 2, LABEL_CELLS, LABEL_CELLS] -> [N, 2, IMAGE_TOKENS, 4]."""
    side = networks.CELLS
    cells = labels.unflatten(3, (side, -1)).unflatten(2, (side, -1))
    return cells.transpose(3, 4).flatten(4).flatten(2, 3)


@torch.no_grad()
def encode(vae: AutoencoderKLFlux2, images: Tensor) -> Tensor:
    """Pictures [N, 128, 128, 3] of 0..255 -> tokens of latents, not normalised."""
    pictures = train_vae.to_signed(images.to(vae.device))
    pictures = pictures.contiguous(memory_format=torch.channels_last)
    with schedule.autocast(vae.device):
        latents = vae.encode(pictures).latent_dist.mean
    return networks.to_tokens(latents.float())


@torch.no_grad()
def decode(vae: AutoencoderKLFlux2, tokens: Tensor) -> Tensor:
    """Normalised tokens -> pictures [N, 3, 128, 128] of 0..1."""
    mean, deviation = networks.statistics(vae)
    latents = networks.to_latents(tokens.float() * deviation + mean)
    with schedule.autocast(vae.device):
        pictures = vae.decode(latents).sample
    return (pictures.float() / 2 + 0.5).clamp(0, 1)


def token_ids(tokenizer: Qwen2TokenizerFast, texts: list[str]) -> Tensor:
    """Ids [texts, LONG_TOKENS] of prompts in klein's chat."""
    rows = [
        torch.tensor(tokenizer(networks.chat_text(text)).input_ids) for text in texts
    ]
    rows = [row[: drawing.LONG_TOKENS] for row in rows]
    padded = [
        functional.pad(
            row, (0, drawing.LONG_TOKENS - len(row)), value=tokenizer.pad_token_id
        )
        for row in rows
    ]
    return torch.stack(padded)
