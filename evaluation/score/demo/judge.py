"""The judge: says what a picture of the drawn world shows, without its training code.

A small convolutional network labels each of 32x32 cells of a picture with an object and a
colour; what is in the picture, where and how large follows from counting cells.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Conv2d, GroupNorm, Module, Sequential, SiLU, functional

WEIGHTS_FILE = Path(__file__).parent / "judge.safetensors"
IMAGE_PX = 128


def _block(channels_in: int, channels_out: int, stride: int = 1) -> Sequential:
    return Sequential(
        Conv2d(channels_in, channels_out, 3, stride, 1),
        GroupNorm(8, channels_out),
        SiLU(),
    )


class Judge(Module):
    """Images [B, 3, 128, 128] in 0..1 -> object logits [B, 1 + objects, 32, 32], colour logits."""

    def __init__(self, shapes: tuple[str, ...], colours: tuple[str, ...]) -> None:
        super().__init__()
        self.shapes = shapes
        self.colours = colours
        self.to_32 = Sequential(_block(3, 24, 2), _block(24, 40, 2), _block(40, 40))
        self.to_16 = Sequential(_block(40, 64, 2), _block(64, 64))
        self.to_8 = Sequential(_block(64, 80, 2), _block(80, 80), _block(80, 80))
        self.up_16 = _block(64 + 80, 64)
        self.up_32 = _block(40 + 64, 48)
        self.object_head = Conv2d(48, 1 + len(shapes), 1)
        self.colour_head = Conv2d(48, len(colours), 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        _, at_32 = self.maps(images)
        return self.object_head(at_32), self.colour_head(at_32)

    def maps(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The features that the labels follow from: [B, 80, 8, 8] and [B, 48, 32, 32]."""
        at_32 = self.to_32(images * 2 - 1)
        at_16 = self.to_16(at_32)
        at_8 = self.to_8(at_16)
        at_16 = self.up_16(
            torch.cat([at_16, functional.interpolate(at_8, scale_factor=2)], 1)
        )
        at_32 = self.up_32(
            torch.cat([at_32, functional.interpolate(at_16, scale_factor=2)], 1)
        )
        return at_8, at_32


def load_judge(path: Path = WEIGHTS_FILE, device: str = "cpu") -> Judge:
    with safe_open(path, framework="pt") as file:
        names = file.metadata()
    judge = Judge(tuple(names["shapes"].split(",")), tuple(names["colours"].split(",")))
    judge.load_state_dict(
        {name: value.float() for name, value in load_file(path).items()}
    )
    return judge.eval().to(device)
