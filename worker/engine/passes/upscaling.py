"""Enlarges images: between the passes of hires fix as in AUTOMATIC1111, and as its extras do.

Latent upscalers interpolate the latents. Others enlarge the decoded image, which is encoded again;
it is resized to the exact size with Lanczos, as often as AUTOMATIC1111 does. What exceeds a target
of another shape is cut off at both sides.

Upscalers of files are networks, kept on the device while jobs use them and run in tiles. They get
the image as RGB, as they were trained; AUTOMATIC1111 gives it as BGR, so its colours differ a
little.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from PIL import Image

from imagefleet import errors
from imagefleet.files.safetensors import Identity, identify
from imagefleet.telemetry import logs
from worker.engine import contract
from worker.engine import errors as engine_errors
from worker.engine.files import safetensors
from worker.engine.files.safetensors import ReadOnce, UnusableError

log = logs.EventLog(__name__)

Enlarge = Callable[[contract.Pixels, float], contract.Pixels]
"""Enlarges an RGB image by a factor, or by its own if it has one. Called on the stager's thread."""

#: The mode of torch's `interpolate`, and whether it is antialiased.
LATENT_UPSCALERS: Mapping[str, tuple[str, bool]] = {
    "Latent": ("bilinear", False),
    "Latent (antialiased)": ("bilinear", True),
    "Latent (bicubic)": ("bicubic", False),
    "Latent (bicubic antialiased)": ("bicubic", True),
    "Latent (nearest)": ("nearest", False),
    "Latent (nearest-exact)": ("nearest-exact", False),
}

#: Applications of an upscaler that enlarges too little.
_MOST_TIMES = 3

#: AUTOMATIC1111's upscalers make sides that are multiples of this.
_ALIGNMENT = 8


def _resampled(resampling: Image.Resampling) -> Enlarge:
    def enlarge(pixels: contract.Pixels, scale: float) -> contract.Pixels:
        height, width = pixels.shape[:2]
        return _resize(pixels, int(width * scale), int(height * scale), resampling)

    return enlarge


#: Upscalers of images; None is Lanczos in a single step.
IMAGE_UPSCALERS: Mapping[str, Enlarge | None] = {
    "None": None,
    "Lanczos": _resampled(Image.Resampling.LANCZOS),
    "Nearest": _resampled(Image.Resampling.NEAREST),
}


@dataclass(frozen=True, slots=True)
class Upscaling:
    """How a first pass' latents become those that a second begins with. Sizes in pixels."""

    target: tuple[int, int]
    """Width and height of the second pass."""
    size: tuple[int, int]
    """The size before the rest is cut off, in the first pass' shape. SDXL is told this size."""
    latent_mode: tuple[str, bool] | None
    """None for upscalers of images."""
    enlarge: Enlarge | None

    def enlarge_latents(self, latents: torch.Tensor, factor: int) -> torch.Tensor:
        """Latents [4, height, width] in the size; *factor*: pixels for each of their rows."""
        if self.latent_mode is None:
            raise RuntimeError("this upscaler is for images")
        mode, antialias = self.latent_mode
        width, height = self.size
        sides = height // factor, width // factor
        return F.interpolate(latents[None], size=sides, mode=mode, antialias=antialias)[0]

    def enlarge_pixels(self, pixels: contract.Pixels) -> contract.Pixels:
        """An image in the size."""
        width, height = self.size
        scale = max(width / pixels.shape[1], height / pixels.shape[0])
        if self.enlarge is not None and scale > 1:
            aligned = (int(side * scale // _ALIGNMENT * _ALIGNMENT) for side in pixels.shape[1::-1])
            pixels = _apply(self.enlarge, pixels, scale, *aligned)
        return _resize(pixels, width, height, Image.Resampling.LANCZOS)

    def crop(self, latents: torch.Tensor, factor: int) -> torch.Tensor:
        """Cuts latents [4, height, width] of the size down to the target."""
        columns, rows = (
            _kept((size - target) // factor, size // factor)
            for size, target in zip(self.size, self.target, strict=True)
        )
        return latents[:, rows, columns]


def enlarge(
    pixels: contract.Pixels, upscale: contract.Upscale, upscalers: Sequence[Enlarge]
) -> contract.Pixels:
    """An image as AUTOMATIC1111's extras enlarge it, by one or both of the *upscalers*.

    An image that is large enough is only resized, but for a network at a scale of 1, which may be
    one that restores.
    """
    height, width = pixels.shape[:2]
    is_smaller = width < upscale.whole[0] or height < upscale.whole[1]
    found: list[contract.Pixels] = []
    for upscaler in upscalers:
        if is_smaller or upscale.scale == 1:
            found.append(_apply(upscaler, pixels, upscale.scale, *upscale.whole))
        else:
            found.append(_resize(pixels, *upscale.whole, Image.Resampling.LANCZOS))
    image = Image.fromarray(found[0])
    for other in found[1:]:
        image = Image.blend(image, Image.fromarray(other), upscale.blend)
    left, upper = (
        whole // 2 - kept // 2
        for whole, kept in zip(upscale.whole, (upscale.width, upscale.height), strict=True)
    )
    return np.asarray(image.crop((left, upper, left + upscale.width, upper + upscale.height)))


def find(
    hires: contract.HiresPass, width: int, height: int, load: Callable[[Path], Enlarge]
) -> Upscaling:
    """The upscaling of a first pass of *width* x *height* pixels; *load* reads upscalers' files.

    Raises JobError if there is no such upscaler here, or *load* does.
    """
    target = hires.width, hires.height
    # The shorter way to a size of the same shape that holds the target.
    if width / height < hires.width / hires.height:
        size = hires.width, hires.width * height // width
    else:
        size = hires.height * width // height, hires.height
    if hires.upscaler_path is not None:
        return Upscaling(target, size, None, load(hires.upscaler_path))
    mode = LATENT_UPSCALERS.get(hires.upscaler)
    if mode is None and hires.upscaler not in IMAGE_UPSCALERS:
        raise errors.JobError(
            f"unknown upscaler {hires.upscaler!r}; without a file there are"
            f" {', '.join([*LATENT_UPSCALERS, *IMAGE_UPSCALERS])}"
        )
    return Upscaling(target, size, mode, IMAGE_UPSCALERS.get(hires.upscaler))


def _kept(excess: int, length: int) -> slice:
    """What is left of a side's *length*; of an odd excess, the end loses more."""
    return slice(excess // 2, length - (excess + 1) // 2)


def _apply(
    enlarge: Enlarge, pixels: contract.Pixels, scale: float, width: int, height: int
) -> contract.Pixels:
    """Enlarges an image as often as it takes to reach the size, then resizes it to exactly that."""
    for _ in range(_MOST_TIMES):
        before = pixels.shape
        pixels = enlarge(pixels, scale)
        if pixels.shape == before or (pixels.shape[0] >= height and pixels.shape[1] >= width):
            break
    return _resize(pixels, width, height, Image.Resampling.LANCZOS)


def _resize(
    pixels: contract.Pixels, width: int, height: int, resampling: Image.Resampling
) -> contract.Pixels:
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), resampling))


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
    def enlarge(self, pixels: contract.Pixels, _scale: float = 1.0) -> contract.Pixels:
        """The image, enlarged by the network's own factor; see `Enlarge`.

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
                    f"the upscaler {self.name} ran out of memory: it goes on in tiles of"
                    f" {self._tile} pixels",
                    action="upscaler_tiles",
                )
        self._tile = min(2 * self._tile, TILE)  # others' need of memory comes and goes
        levels = enlarged.clamp_(0, 1).mul_(255).round_().to(torch.uint8)
        found: contract.Pixels = levels.permute(1, 2, 0).cpu().numpy()
        return np.ascontiguousarray(found)


class UpscalerCache:
    """The upscalers used last; thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept = ReadOnce[Upscaler](KEPT)

    def get(self, path: Path) -> Upscaler:
        """Reads a file, unless it is kept; raises as `read_upscaler`."""
        with safetensors.named(f"the upscaler {path.stem!r}"):
            identity = identify(path)
            return self._kept.get(identity, lambda: read_upscaler(identity, self._device))


def read_upscaler(identity: Identity, device: torch.device) -> Upscaler:
    """Reads and checks one file, of a network that enlarges RGB images; for `safetensors.named`.

    Raises JobError if this worker has no spandrel.
    """
    path = Path(identity[0])
    try:
        spandrel = import_spandrel()
    except ImportError as error:
        raise errors.JobError(
            f"the upscaler {path.stem!r} needs what `pip install '.[upscalers]'` installs ({error})"
        ) from error
    tensors = {key: each.float() for key, each in safetensors.tensors_of(path, identity).items()}
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
