"""Enlarges images: between the passes of hires fix as in AUTOMATIC1111, and as its extras do.

Latent upscalers interpolate the latents. Others enlarge the decoded image, which is encoded again;
it is resized to the exact size with Lanczos, as often as AUTOMATIC1111 does. What exceeds a target
of another shape is cut off at both sides.

Upscalers of files are networks, kept on the device while jobs use them and run in tiles. They get
the image as BGR, as AUTOMATIC1111 gives it.
"""

import contextlib
import functools
import importlib.util
import math
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
from numpy.typing import NDArray
from PIL import Image
from PIL.Image import Resampling
from torch import Tensor

from imagefleet.errors import JobError
from imagefleet.files.safetensors import Identity, UnusableError, identify
from imagefleet.job.sizes import Size
from imagefleet.telemetry.logs import log
from worker.engine import errors as engine_errors
from worker.engine.contract import HiresPass, ImageRequest, Pixels, Upscale
from worker.engine.files import safetensors
from worker.engine.files.safetensors import ReadOnce
from worker.engine.passes.begin import levels_of

#: Enlarges an RGB image by a factor, or by its own if it has one. Called on the stager's thread.
Enlarge = Callable[[Pixels, float], Pixels]

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


def _resample(how: Resampling, pixels: Pixels, scale: float) -> Pixels:
    height, width = pixels.shape[:2]
    return _resize(pixels, int(width * scale), int(height * scale), how)


#: Upscalers of images; any other, such as "None", is Lanczos in a single step.
IMAGE_UPSCALERS: Mapping[str, Enlarge] = {
    "Lanczos": functools.partial(_resample, Resampling.LANCZOS),
    "Nearest": functools.partial(_resample, Resampling.NEAREST),
}


@dataclass(frozen=True)
class Upscaling:
    """Upscaling of a first pass' latents to those a second pass starts from. Sizes in pixels."""

    #: Width and height of the second pass.
    target: Size
    #: The size before the rest is cut off. SDXL is told this size.
    size: Size
    #: None for upscalers of images.
    latent_mode: tuple[str, bool] | None
    enlarge: Enlarge | None

    def enlarge_latents(self, latents: Tensor, factor: int) -> Tensor:
        """Latents [4, height, width] in the size; *factor*: pixels for each of their rows."""
        if self.latent_mode is None:
            raise RuntimeError("this upscaler is for images")
        mode, antialias = self.latent_mode
        width, height = self.size
        return F.interpolate(
            latents[None],
            size=(height // factor, width // factor),
            mode=mode,
            antialias=antialias,
        )[0]

    def enlarge_pixels(self, pixels: Pixels) -> Pixels:
        width, height = self.size
        scale = max(width / pixels.shape[1], height / pixels.shape[0])
        if self.enlarge is not None and scale > 1:
            aligned = (
                int(side * scale // _ALIGNMENT * _ALIGNMENT)
                for side in pixels.shape[1::-1]
            )
            pixels = _apply(self.enlarge, pixels, scale, *aligned)
        return _resize(pixels, width, height)

    def crop(self, latents: Tensor, factor: int) -> Tensor:
        """Cuts latents [4, height, width] of the size down to the target.

        Of an odd excess, a side's end loses more.
        """
        kept = []
        for size, target in zip(self.size, self.target, strict=True):
            excess = (size - target) // factor
            kept.append(slice(excess // 2, size // factor - (excess + 1) // 2))
        columns, rows = kept
        return latents[:, rows, columns]


def enlarge(pixels: Pixels, upscale: Upscale, upscalers: Sequence[Enlarge]) -> Pixels:
    """An image as AUTOMATIC1111's extras enlarge it, by one or both of the *upscalers*.

    One that is large enough is only resized, but by a network at a scale of 1, which may restore.
    """
    height, width = pixels.shape[:2]
    is_smaller = width < upscale.whole[0] or height < upscale.whole[1]
    if is_smaller or upscale.scale == 1:
        found = [
            _apply(upscaler, pixels, upscale.scale, *upscale.whole)
            for upscaler in upscalers
        ]
    else:
        found = [_resize(pixels, *upscale.whole)]
    image, *others = map(Image.fromarray, found)
    for other in others:
        image = Image.blend(image, other, upscale.blend)
    left, upper = (
        whole // 2 - kept // 2
        for whole, kept in zip(
            upscale.whole, (upscale.width, upscale.height), strict=True
        )
    )
    return np.asarray(
        image.crop((left, upper, left + upscale.width, upper + upscale.height))
    )


def find(hires: HiresPass, load: Callable[[Path], Enlarge]) -> Upscaling:
    """The upscaling of a first pass; *load* reads upscalers' files, and raises JobError."""
    target = hires.width, hires.height
    size = hires.whole or target
    if hires.upscaler_path is not None:
        return Upscaling(target, size, None, load(hires.upscaler_path))
    name = hires.upscaler
    return Upscaling(
        target, size, LATENT_UPSCALERS.get(name), IMAGE_UPSCALERS.get(name)
    )


def _apply(
    enlarge: Enlarge, pixels: Pixels, scale: float, width: int, height: int
) -> Pixels:
    """Enlarges an image as often as it takes to reach the size, then resizes it to exactly that."""
    for _ in range(_MOST_TIMES):
        before = pixels.shape
        pixels = enlarge(pixels, scale)
        if pixels.shape == before or (
            pixels.shape[0] >= height and pixels.shape[1] >= width
        ):
            break
    return _resize(pixels, width, height)


def _resize(
    pixels: Pixels,
    width: int,
    height: int,
    resampling: Resampling = Resampling.LANCZOS,
) -> Pixels:
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), resampling))


#: Enlarges a tile; returns levels from 0 to 1, and beyond where the network does.
Network = Callable[[Pixels], NDArray[np.float32]]

#: AUTOMATIC1111's settings `ESRGAN_tile`, `DAT_tile`, `SWIN_tile` and their `_tile_overlap`: pixels
#: on a tile's side, and those that two tiles share at least.
TILE = 192
OVERLAP = 8

#: Architectures whose tiles are averaged where they lie upon each other, by their tile there.
AVERAGED: Mapping[str, int] = {"SwinIR": TILE, "SCUNet": 256}


def in_tiles(
    network: Network,
    pixels: Pixels,
    scale: int,
    tile: int,
    *,
    averaged: bool = False,
) -> Pixels:
    """An image [height, width, 3] through a network that enlarges tiles *scale* times.

    As `upscale_with_model` of `modules/upscaler_utils.py` (1.10) with `images.split_grid` and
    `combine_grid`: tiles lie evenly spread, beyond a small image is black, and the first pixels of
    a tile fade in over the one before. *averaged*: as `tiled_upscale_2` there.
    """
    height, width = pixels.shape[:2]
    tile = min(tile, height, width) if averaged else tile
    image = Image.fromarray(pixels)
    tops = _starts(height, tile, averaged)
    lefts = _starts(width, tile, averaged)
    levels = (lambda part: part) if averaged else _pixels
    rows = [
        [
            levels(network(np.asarray(image.crop((x, y, x + tile, y + tile)))))
            for x in lefts
        ]
        for y in tops
    ]
    if averaged:
        total = np.zeros((height * scale, width * scale, 4), np.float32)
        for y, row in zip(tops, rows, strict=True):
            for x, part in zip(lefts, row, strict=True):
                place = total[
                    y * scale : (y + tile) * scale, x * scale : (x + tile) * scale
                ]
                place += np.dstack([part, np.ones(part.shape[:2])])
        return _pixels(total[..., :3] / total[..., 3:])
    joined = [_joined(row, lefts, width, scale).transpose(1, 0, 2) for row in rows]
    return np.ascontiguousarray(_joined(joined, tops, height, scale).transpose(1, 0, 2))


def _pixels(levels: NDArray[np.floating[Any]]) -> Pixels:
    return np.around(levels.clip(0, 1) * 255).astype(np.uint8)


def _starts(length: int, tile: int, averaged: bool) -> list[int]:
    """Start positions of tiles along a side; below 0 where the side is shorter than a tile."""
    if averaged:
        return [*range(0, length - tile, tile - OVERLAP), length - tile]
    count = math.ceil((length - OVERLAP) / (tile - OVERLAP))
    step = (length - tile) / (count - 1) if count > 1 else 0.0
    return [min(int(at * step), length - tile) for at in range(count)]


def _joined(
    parts: Sequence[Pixels], starts: Sequence[int], length: int, scale: int
) -> Pixels:
    """Parts [height, tile, 3] beside each other in [height, length * scale, 3]."""
    height = len(parts[0])
    shared = OVERLAP * scale
    ramp = (np.arange(shared, dtype=np.float32) * 255 / shared).astype(np.uint8)
    mask = Image.fromarray(np.tile(ramp, (height, 1)))
    whole = Image.new("RGB", (length * scale, height))
    for start, part in zip(starts, map(Image.fromarray, parts), strict=True):
        if start == 0:
            whole.paste(part)
            continue
        whole.paste(part.crop((0, 0, shared, height)), (start * scale, 0), mask)
        whole.paste(
            part.crop((shared, 0, part.width, height)), (start * scale + shared, 0)
        )
    return np.asarray(whole)


#: Networks on the device: the usual ones have 33 MiB in float16.
KEPT = 3

#: Pixels on the smallest side of a tile: halved while the memory is short, which changes the image
#: a little, and doubled again for the next one.
LEAST_TILE = 48

_RGB = 3

#: spandrel asks for torchvision, which has to be built for the very torch that is installed. Only
#: two of its architectures use it, and neither enlarges images: modules that it imports, and what
#: those two import from the last one.
_MODULES = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.functional",
)
_FUNCTIONS = ("InterpolationMode", "normalize", "rotate")

_importing = threading.Lock()


class Upscaler:
    """A network that enlarges images by a whole factor."""

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
        architecture = network.architecture.id
        self._is_averaged = architecture in AVERAGED
        self._usual_tile = AVERAGED.get(architecture, TILE)
        self._tile = self._least_tile = self._usual_tile

    def enlarge(self, pixels: Pixels, _scale: float = 1.0) -> Pixels:
        """The image, enlarged by the network's own factor; see `Enlarge`.

        Raises TransientError if the memory is too short even for small tiles, and NodeError if the
        GPU itself is broken.
        """
        while True:
            try:
                enlarged = in_tiles(
                    self._run,
                    pixels,
                    self.scale,
                    self._tile,
                    averaged=self._is_averaged,
                )
            except Exception as error:
                if (
                    not engine_errors.is_out_of_memory(error)
                    or self._tile <= LEAST_TILE
                ):
                    raise engine_errors.classify(error) from error
            else:
                # Others' need of memory comes and goes.
                self._tile = min(2 * self._tile, self._usual_tile)
                return enlarged
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

    @torch.inference_mode()
    def _run(self, tile: Pixels) -> NDArray[np.float32]:
        image = levels_of(tile[..., ::-1], self._device)
        levels = self._network(image.to(self._dtype) / 255)[0].float()
        found: NDArray[np.float32] = levels.permute(1, 2, 0).cpu().numpy()[..., ::-1]
        return found


@dataclass(frozen=True)
class PreparedUpscale:
    """A request that only enlarges an image, which is done."""

    request: ImageRequest
    pixels: Pixels


class UpscalerCache:
    """The upscalers used last; thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept = ReadOnce[Upscaler](KEPT)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._enlarging = threading.Lock()

    def prepare(self, request: ImageRequest) -> PreparedUpscale:
        """Enlarges a request's image, one at a time if networks do, beside the ticks.

        Raises JobError if an upscaler's file cannot be used, or one colour is left, TransientError
        if a file could not be read or the memory is too short, and NodeError for a broken GPU.
        """
        upscale = request.upscale
        init = request.init
        if upscale is None or init is None:
            raise RuntimeError("only requests with an image to enlarge")
        found = [
            self.get(path).enlarge if path else IMAGE_UPSCALERS[name]
            for name, path in upscale.upscalers
        ]
        if any(path for _, path in upscale.upscalers):
            with self._enlarging, torch.cuda.stream(self._stream):
                return PreparedUpscale(request, enlarge(init.pixels, upscale, found))
        enlarged = enlarge(init.pixels, upscale, found)
        if (enlarged == enlarged[0, 0]).all():
            # As it always will be: the engine is not at fault.
            raise JobError("what is left of the image is all one colour")
        return PreparedUpscale(request, enlarged)

    def get(self, path: Path) -> Upscaler:
        """Reads a file, unless it is kept; raises as `read_upscaler`."""
        with safetensors.named(f"the upscaler {path.stem!r}"):
            identity = identify(path)
            return self._kept.get(
                identity, lambda: read_upscaler(identity, self._device)
            )


def read_upscaler(identity: Identity, device: torch.device) -> Upscaler:
    """Reads and checks a file, for `safetensors.named`; raises JobError without spandrel."""
    name = Path(identity[0]).stem
    try:
        spandrel = import_spandrel()
    except ImportError as error:
        raise JobError(
            f"the upscaler {name!r} needs what `pip install '.[upscalers]'` installs ({error})"
        ) from error
    tensors = {
        key: each.float() for key, each in safetensors.tensors_of(identity).items()
    }
    safetensors.refuse_damaged(tensors)
    tensors = spandrel.canonicalize_state_dict(tensors)
    try:
        network = spandrel.MAIN_REGISTRY.load(tensors)
    except spandrel.UnsupportedModelError as error:
        raise UnusableError(
            "has an architecture that spandrel does not know"
        ) from error
    except Exception as error:  # spandrel's architectures raise what they like
        raise UnusableError(
            f"has tensors that do not fit its architecture ({error})"[:300]
        ) from (error)
    channels = {network.input_channels, network.output_channels}
    if not isinstance(network, spandrel.ImageModelDescriptor) or channels != {_RGB}:
        raise UnusableError(
            f"is {network.architecture.name}, which does not enlarge RGB images"
        )
    if network.tiling is spandrel.ModelTiling.INTERNAL:
        raise UnusableError(
            f"is {network.architecture.name}, which works on whole images only"
        )
    return Upscaler(name, network, device)


def import_spandrel() -> Any:
    """Imports spandrel, slowly the first time, also without torchvision; raises ImportError."""
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
