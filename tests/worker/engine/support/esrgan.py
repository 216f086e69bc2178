"""Upscaler files: an ESRGAN of one block with random weights."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from worker.engine import contract
from worker.engine.passes import upscaling


def build(path: Path, scale: int = 4, channels: int = 3) -> tuple[Path, Any]:
    """Writes the file; returns it and its network."""
    upscaling.import_spandrel()
    from spandrel.architectures.ESRGAN.__arch.RRDB import RRDBNet

    torch.manual_seed(0)
    network = RRDBNet(
        in_nc=channels, out_nc=channels, num_filters=8, num_blocks=1, scale=scale
    )
    save_file(network.state_dict(), path)
    return path, network.eval()


def picture(height: int, width: int) -> contract.Pixels:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def enlarge(network: Any, pixels: contract.Pixels) -> contract.Pixels:
    """The whole image as BGR at once, as AUTOMATIC1111 does: black before what lacks to a tile."""
    height, width = pixels.shape[:2]
    missing = [max(0, upscaling.TILE - side) for side in (height, width)]
    padded = np.pad(pixels[..., ::-1], [(side, 0) for side in (*missing, 0)])
    with torch.no_grad():
        enlarged = network(
            torch.from_numpy(padded.copy()).permute(2, 0, 1)[None] / 255
        )[0]
    levels = (
        (enlarged.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    )
    scale = levels.shape[0] // padded.shape[0]
    return levels[missing[0] * scale :, missing[1] * scale :, ::-1]
