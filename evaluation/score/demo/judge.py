"""The judge: says what a picture of the drawn world shows, without its training code.

A small convolutional network labels each of 32x32 cells of a picture with an object and a
colour; what is in the picture, where and how large follows from counting cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

WEIGHTS_FILE = Path(__file__).parent / "judge.safetensors"
IMAGE_PX = 128
CELLS = 32
#: Fewer cells than this (of 32x32) are taken for a stray mark, not for an object.
LEAST_CELLS = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of object in a picture; x and y run from -1 to 1, area is a share of the picture."""

    shape: str
    colour: str
    x: float
    y: float
    area: float


def _block(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride, 1),
        nn.GroupNorm(8, channels_out),
        nn.SiLU(),
    )


class Judge(nn.Module):
    """Images [B, 3, 128, 128] in 0..1 -> object logits [B, 1 + objects, 32, 32], colour logits."""

    def __init__(self, shapes: tuple[str, ...], colours: tuple[str, ...]) -> None:
        super().__init__()
        self.shapes = shapes
        self.colours = colours
        self.to_32 = nn.Sequential(_block(3, 24, 2), _block(24, 40, 2), _block(40, 40))
        self.to_16 = nn.Sequential(_block(40, 64, 2), _block(64, 64))
        self.to_8 = nn.Sequential(_block(64, 80, 2), _block(80, 80), _block(80, 80))
        self.up_16 = _block(64 + 80, 64)
        self.up_32 = _block(40 + 64, 48)
        self.object_head = nn.Conv2d(48, 1 + len(shapes), 1)
        self.colour_head = nn.Conv2d(48, len(colours), 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        _, at_32 = self.maps(images)
        return self.object_head(at_32), self.colour_head(at_32)

    def maps(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The features that the labels follow from: [B, 80, 8, 8] and [B, 48, 32, 32]."""
        at_32 = self.to_32(images * 2 - 1)
        at_16 = self.to_16(at_32)
        at_8 = self.to_8(at_16)
        at_16 = self.up_16(torch.cat([at_16, functional.interpolate(at_8, scale_factor=2)], 1))
        at_32 = self.up_32(torch.cat([at_32, functional.interpolate(at_16, scale_factor=2)], 1))
        return at_8, at_32

    @torch.no_grad()
    def find(self, images: Tensor) -> list[list[Finding]]:
        """What each picture shows, largest first."""
        object_logits, colour_logits = self(_at_native_size(images))
        cell_objects = object_logits.argmax(1)
        grid = (torch.arange(CELLS, device=images.device) + 0.5) / CELLS * 2 - 1
        pictures = []
        for cells, colours in zip(cell_objects, colour_logits.log_softmax(1), strict=True):
            findings = []
            for number, shape in enumerate(self.shapes, start=1):
                mask = cells == number
                count = int(mask.sum())
                if count < LEAST_CELLS:
                    continue
                colour = self.colours[int(colours[:, mask].sum(1).argmax())]
                x = float((mask.sum(0) * grid).sum()) / count
                y = float((mask.sum(1) * grid).sum()) / count
                findings.append(Finding(shape, colour, x, y, count / CELLS**2))
            pictures.append(sorted(findings, key=lambda finding: -finding.area))
        return pictures

    @torch.no_grad()
    def object_scores(self, images: Tensor) -> Tensor:
        """[B, objects]: the share of the picture that the judge gives to each object, 0 to 1."""
        object_logits, _ = self(_at_native_size(images))
        shares: Tensor = object_logits.softmax(1)[:, 1:].mean((2, 3))
        return shares


def _at_native_size(images: Tensor) -> Tensor:
    if images.shape[-2:] == (IMAGE_PX, IMAGE_PX):
        return images.float()
    return functional.interpolate(images.float(), (IMAGE_PX, IMAGE_PX), mode="area")


def load_judge(path: Path = WEIGHTS_FILE, device: str = "cpu") -> Judge:
    with safe_open(path, framework="pt") as file:
        names = file.metadata()
    judge = Judge(tuple(names["shapes"].split(",")), tuple(names["colours"].split(",")))
    judge.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    return judge.eval().to(device)
