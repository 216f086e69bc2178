"""Upscaler files: read, checked, kept on the device while jobs use them, run in tiles.

A network gets the image as RGB, as these networks were trained; AUTOMATIC1111 gives it as BGR, so
its colours differ a little.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from imagefleet import errors
from worker.engine import contract
from worker.engine import errors as engine_errors
from worker.engine.files import safetensors
from worker.engine.files.safetensors import ReadOnce, UnusableError

#: Pixels of the image on each side that two tiles share: across them, one fades into the other.
OVERLAP = 32


def spans(length: int, tile: int, overlap: int = OVERLAP) -> list[tuple[int, int]]:
    """The places where tiles begin and end along a side, evenly spread; all are of the same length.

    A tile is longer than what it shares.
    """
    if tile >= length:
        return [(0, length)]
    count = -(-(length - overlap) // (tile - overlap))
    starts = [round(index * (length - tile) / (count - 1)) for index in range(count)]
    return [(start, start + tile) for start in starts]


def run_in_tiles(
    network: Callable[[torch.Tensor], torch.Tensor],
    image: torch.Tensor,
    scale: int,
    tile: int,
) -> torch.Tensor:
    """The network's output [3, height * scale, width * scale] in float32 for [3, height, width].

    *network* takes and returns batches of one. Sides of more than *tile* pixels are cut, and put
    together in the host's memory: 2048x2048 four times as wide and high takes a gigabyte.
    """
    _, height, width = image.shape
    rows, columns = spans(height, tile), spans(width, tile)
    if len(rows) == len(columns) == 1:
        return network(image[None])[0].float()
    total = torch.zeros(3, height * scale, width * scale)
    weights = torch.zeros(height * scale, width * scale)
    for down, top, bottom in _weighted(rows, scale):
        for across, left, right in _weighted(columns, scale):
            part = network(image[None, :, top:bottom, left:right])[0].float().cpu()
            weight = down[:, None] * across
            place = (slice(top * scale, bottom * scale), slice(left * scale, right * scale))
            total[:, *place] += part * weight
            weights[place] += weight
    return total.div_(weights)


def _weighted(spans_: list[tuple[int, int]], scale: int) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Each span with its weights [pixels of the output]: 1, and less across what is shared.

    They are above 0 everywhere, so that no pixel is without weight.
    """
    for index, (start, end) in enumerate(spans_):
        weight = torch.ones((end - start) * scale)
        if index:
            shared = (spans_[index - 1][1] - start) * scale
            weight[:shared] *= (torch.arange(shared) + 0.5) / shared
        if index < len(spans_) - 1:
            shared = (end - spans_[index + 1][0]) * scale
            weight[-shared:] *= ((torch.arange(shared) + 0.5) / shared).flip(0)
        yield weight, start, end


log = logging.getLogger(__name__)

#: Networks on the device: the usual ones have 33 MiB in float16.
KEPT = 3

#: Pixels on a tile's side at first, and the least: halved while the memory is short, and doubled
#: again for the next image. ESRGAN needs some 2.5 GB for 512 in float16.
TILE, LEAST_TILE = 512, 64

_RGB = 3

#: spandrel asks for torchvision, which has to be built for the very torch that is installed. Only
#: two of its architectures use it, and neither enlarges images: modules that it imports, and what
#: those two import from the last one.
_MODULES = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
_FUNCTIONS = ("InterpolationMode", "normalize", "rotate")

_importing = threading.Lock()


class Upscaler:
    """A network that enlarges RGB images by a whole factor."""

    def __init__(self, name: str, network: Any, device: torch.device) -> None:
        """*network* is spandrel's `ImageModelDescriptor`."""
        self.name = name
        self.scale: int = network.scale
        on_gpu = device.type == "cuda"
        self._dtype = torch.float32
        if on_gpu and network.supports_half:
            self._dtype = torch.float16
        elif on_gpu and network.supports_bfloat16:
            self._dtype = torch.bfloat16
        self._network = network.eval().to(device, self._dtype)
        self._device = device
        self._tile = self._least_tile = TILE

    @torch.inference_mode()
    def enlarge(self, pixels: contract.Pixels) -> contract.Pixels:
        """The image, enlarged by the network's own factor.

        Raises TransientError if the memory is too short even for small tiles, and NodeError if the
        GPU itself is broken.
        """
        image = torch.from_numpy(pixels.copy()).to(self._device).permute(2, 0, 1)
        image = image.to(self._dtype) / 255
        enlarged = None
        while enlarged is None:
            try:
                enlarged = run_in_tiles(self._network, image, self.scale, self._tile)
                continue
            except Exception as error:
                if not engine_errors.is_out_of_memory(error) or self._tile <= LEAST_TILE:
                    raise engine_errors.classify(error) from error
            # Outside the handler, where the error's traceback no longer holds any tensors.
            self._tile //= 2
            torch.cuda.empty_cache()
            if self._tile < self._least_tile:
                self._least_tile = self._tile
                log.warning(
                    "the upscaler %s ran out of memory: it goes on in tiles of %d pixels",
                    self.name,
                    self._tile,
                    extra={"action": "upscaler_tiles"},
                )
        self._tile = min(2 * self._tile, TILE)  # others' need of memory comes and goes
        levels = enlarged.clamp_(0, 1).mul_(255).round_().to(torch.uint8)
        found: contract.Pixels = levels.permute(1, 2, 0).cpu().numpy()
        return np.ascontiguousarray(found)


class UpscalerCache:
    """The upscalers used last; thread-safe."""

    def __init__(self, device: torch.device, kept: int = KEPT) -> None:
        self._device = device
        self._kept = ReadOnce[Upscaler](kept)

    def load(self, path: Path) -> Callable[[contract.Pixels, float], contract.Pixels]:
        """`get`, as a function that takes and ignores a factor: the network has its own."""
        upscaler = self.get(path)
        return lambda pixels, _: upscaler.enlarge(pixels)

    def get(self, path: Path) -> Upscaler:
        """Reads a file, unless it is kept; raises as `read_upscaler`."""
        with safetensors.named(f"the upscaler {path.stem!r}"):
            identity = safetensors.identify(path)
            return self._kept.get(identity, lambda: read_upscaler(path, self._device))


def read_upscaler(path: Path, device: torch.device) -> Upscaler:
    """Reads and checks one file, of a network that enlarges RGB images; for `safetensors.named`.

    Raises JobError if this worker has no spandrel.
    """
    try:
        spandrel = import_spandrel()
    except ImportError as error:
        raise errors.JobError(
            f"the upscaler {path.stem!r} needs what `pip install '.[upscalers]'` installs ({error})"
        ) from error
    tensors = {key: each.float() for key, each in safetensors.tensors_of(path).items()}
    safetensors.refuse_damaged(tensors)
    tensors = spandrel.canonicalize_state_dict(tensors)
    try:
        network = spandrel.MAIN_REGISTRY.load(tensors)
    except spandrel.UnsupportedModelError as error:
        raise UnusableError("has an architecture that spandrel does not know") from error
    except Exception as error:  # spandrel's architectures raise what they like for such a file
        raise UnusableError(f"has tensors that do not fit its architecture ({error})"[:300]) from (
            error
        )
    channels = (network.input_channels, network.output_channels)
    if not isinstance(network, spandrel.ImageModelDescriptor) or channels != (_RGB, _RGB):
        raise UnusableError(f"is {network.architecture.name}, which does not enlarge RGB images")
    if network.tiling is spandrel.ModelTiling.INTERNAL:
        raise UnusableError(f"is {network.architecture.name}, which works on whole images only")
    return Upscaler(path.stem, network, device)


def import_spandrel() -> Any:
    """Imports spandrel where there is no torchvision, too; slow the first time.

    Raises ImportError if it is not installed.
    """
    with _importing, _without_torchvision():
        import spandrel

        return spandrel


@contextlib.contextmanager
def _without_torchvision() -> Iterator[None]:
    """Empty modules in its place if it is missing, taken away again before others look for it."""
    if "spandrel" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        yield
        return
    stand_ins = {name: ModuleType(name) for name in _MODULES}
    for function in _FUNCTIONS:
        setattr(stand_ins[_MODULES[-1]], function, None)
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
