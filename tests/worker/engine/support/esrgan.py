"""Upscaler files: an ESRGAN of one block with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from worker.engine import contract
from worker.engine.passes import upscaling


def build(path: Path, scale: int = 4, channels: int = 3) -> tuple[Path, Any]:
    """Writes the file; returns it and its network."""
    upscaling.import_spandrel()
    from spandrel.architectures.ESRGAN.__arch.RRDB import RRDBNet

    torch.manual_seed(0)
    network = RRDBNet(in_nc=channels, out_nc=channels, num_filters=8, num_blocks=1, scale=scale)
    save_file(network.state_dict(), path)
    return path, network.eval()


def enlarge(network: Any, pixels: contract.Pixels) -> contract.Pixels:
    """The whole image at once, in float32."""
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None] / 255
    with torch.no_grad():
        enlarged = network(image)[0].clamp(0, 1)
    levels: contract.Pixels = (enlarged * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return levels
