"""Layers that are faster than torch's and diffusers' own: group norm, GEGLU, upsampling.

Inductor compiles torch's group norm to kernels that read channels-last tensors group by group, in
pieces of 20 bytes: half of the VAE's time. Here sums are taken per channel first. Uncompiled, torch
copies such tensors to the other order and back, and each addition and activation is one more pass:
a third of the UNet's time. On a GPU with Triton, which torch's compiler needs as well, `programs`
are ready within a second and take all of it in two passes.

Nearest-neighbour upsampling by two and a 3x3 convolution are one convolution of the input: each of
the four output pixels per input pixel needs a 2x2 kernel of sums of the nine weights. That saves
5 % of the UNet's work and 15 % of the VAE's.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from diffusers.models.upsampling import Upsample2D
from torch import Tensor
from torch.nn import Conv2d, GroupNorm, Module

from imagefleet.telemetry.logs import log

try:
    from worker.engine.kernels import programs
except ImportError:  # torch for CPUs comes without Triton
    programs = None  # type: ignore[assignment]


AnyNetwork = TypeVar("AnyNetwork", bound=Module)

#: Pixels per partial sum: enough sums to keep a GPU busy, few compared with the tensor.
_PIXELS = 256

#: Of one program of `programs.py`: its partial sums' pixels and channels, and what it writes.
_SUMMED_PIXELS = 128
_SUMMED_CHANNELS = 128
_WRITTEN = 4096


def time_convolutions(*, lasting: bool) -> None:
    """Sets whether cuDNN times all its kernels for each new shape of a convolution.

    It takes seconds for all of a network's; others get the kernel that it expects to be fastest.
    """
    torch.backends.cudnn.benchmark = lasting


class ChannelsLastGroupNorm(GroupNorm):
    """GroupNorm with the same parameters; on a GPU, its sums are ordered by channel.

    torch's own kernel leaves most of a GPU idle for one image, and reorders it twice.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        is_image = input.dim() == 4  # noqa: PLR2004 - rows, channels, height, width
        if is_image and runs_programs(input):
            return normalise_and_activate(input, self)
        is_large = is_image and input.shape[2] * input.shape[3] >= _PIXELS
        if is_large and input.is_cuda and torch.compiler.is_compiling():
            return normalise(input, self)
        return super().forward(input)


def normalise(x: Tensor, norm: GroupNorm) -> Tensor:
    """Group norm of x [rows, channels, height, width], in float32 inside.

    The variance is E[x^2] - E[x]^2: in float32 accurate to 1e-4 while a group's mean is less than
    thirty times its standard deviation.
    """
    (rows, channels, height, width) = x.shape
    groups = norm.num_groups
    # Of enough parts to keep a GPU busy with their sums.
    pixels = math.gcd(height * width, _PIXELS)
    values = x.permute(0, 2, 3, 1).reshape(rows, -1, pixels, channels).float()

    def mean_of_groups(sums: Tensor) -> Tensor:
        in_group = height * width * channels // groups
        return sums.view(rows, -1, groups, channels // groups).sum((1, 3)) / in_group

    sums = values.sum(2)
    squares = (values * values).sum(2)
    mean = mean_of_groups(sums)
    variance = (mean_of_groups(squares) - mean * mean).clamp(min=0)
    weight = norm.weight.float().view(groups, -1)
    scale = (variance + norm.eps).rsqrt()[:, :, None] * weight
    bias = norm.bias.float().view(groups, -1)
    shift = bias - mean[:, :, None] * scale
    shape = (rows, channels, 1, 1)
    normed = x.float() * scale.reshape(shape) + shift.reshape(shape)
    return normed.to(x.dtype)


def normalise_and_activate(
    x: Tensor,
    norm: GroupNorm,
    *,
    added: Tensor | None = None,
    activates: bool = False,
) -> Tensor:
    """The group norm of x [rows, channels, height, width] plus *added* [rows, channels].

    Its SiLU, if it *activates*. In float32 inside; the variance is E[x^2] - E[x]^2, accurate to
    1e-4 while a group's mean is less than thirty times its standard deviation.
    """
    if not runs_programs(x):
        if added is not None:
            x = x + added[:, :, None, None]
        normed: Tensor = norm(x)
        if activates:
            return F.silu(normed)
        return normed
    (rows, channels, height, width) = x.shape
    groups = norm.num_groups
    x = x.contiguous(memory_format=torch.channels_last)
    pixels = height * width
    shifts = x if added is None else added.contiguous()
    has_added = added is not None
    parts = programs.cdiv(pixels, _SUMMED_PIXELS)
    sums = x.new_empty(2, rows, parts, channels, dtype=torch.float32)
    grid = (parts, rows, programs.cdiv(channels, _SUMMED_CHANNELS))
    programs.add_up[grid](
        x, shifts, sums, pixels, channels, sums[0].numel(), has_added,
        _SUMMED_PIXELS, _SUMMED_CHANNELS,
    )  # fmt: skip
    by_group = sums.view(2, rows, parts, groups, -1).sum((2, 4)) * (
        groups / (pixels * channels)
    )
    mean, square = by_group.unbind()
    scale = (square - mean * mean).clamp(min=0).add_(norm.eps).rsqrt_()
    out = torch.empty_like(x)
    write = (programs.cdiv(pixels * channels, _WRITTEN), rows)
    programs.normalise[write](
        x, shifts, out, mean, scale, norm.weight, norm.bias, pixels * channels, channels,
        channels // groups, has_added, activates, _WRITTEN,
    )  # fmt: skip
    return out


def gate(x: Tensor) -> Tensor:
    """GEGLU: the first half of the last dimension times the second half's GELU."""
    if not runs_programs(x):
        values, gates = x.chunk(2, dim=-1)
        return values * F.gelu(gates)
    x, width = x.contiguous(), x.shape[-1] // 2
    gated = x.new_empty(*x.shape[:-1], width)
    grid = (programs.cdiv(gated.numel(), _WRITTEN),)
    programs.gate[grid](x, gated, gated.numel(), width, _WRITTEN)
    return gated


def runs_programs(x: Tensor) -> bool:
    """True if Triton's programs run for *x*, and not torch's kernels."""
    return not torch.compiler.is_compiling() and builds_programs(x.device)


@functools.cache
def builds_programs(device: torch.device) -> bool:
    """True if Triton can build kernels: it needs a C compiler, as torch's own compiler does."""
    if programs is None or device.type != "cuda":
        return False
    try:
        gated = torch.zeros(2, device=device)
        programs.gate[(1,)](gated, gated, 1, 1, _WRITTEN)
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything
        log.warning(
            f"no fused kernels: {error}", exc_info=error, action="compile_failed"
        )
        return False
    return True


def channels_last(x: Tensor) -> Tensor:
    """The images in the order in which a GPU convolves them; on a CPU as they are."""
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x


def group_norm(norm: Module) -> ChannelsLastGroupNorm | None:
    """A replacement of an affine group norm with its parameters, for `replace_modules`."""
    if type(norm) is not GroupNorm or not norm.affine:
        return None
    with torch.device("meta"):
        ours = ChannelsLastGroupNorm(norm.num_groups, norm.num_channels, norm.eps)
    ours.weight = norm.weight
    ours.bias = norm.bias
    return ours.train(norm.training)


def fold(weight: Tensor) -> Tensor:
    """The four kernels [4 * out, in, 2, 2] for one kernel [out, in, 3, 3]; rounded once.

    In the order of the output pixels around a corner where four input pixels meet.
    """

    def fold_dim(three: Tensor, dim: int) -> Tensor:
        first, middle, last = three.unbind(dim)
        after = torch.stack([first + middle, last], dim)
        return torch.stack([after, torch.stack([first, middle + last], dim)])

    by_column = fold_dim(weight.float(), 3)
    by_row = fold_dim(by_column, 3)
    return by_row.flatten(0, 2).to(weight.dtype)


def convolve(conv: Conv2d, x: Tensor, *, tiles: bool) -> Tensor:
    """The convolution; of an image that *tiles*, its padding is what is at the other side.

    As `apply_circular` (AUTOMATIC1111 1.10), for kernels of one or three pixels.
    """
    if not tiles or conv.padding == (0, 0):
        convolved: Tensor = conv(x)
        return convolved
    return F.conv2d(_wrapped(x), conv.weight, conv.bias, conv.stride)


def _wrapped(x: Tensor) -> Tensor:
    """X [rows, channels, height, width] with a border of the pixels at its other side."""
    return F.pad(x, (1, 1, 1, 1), mode="circular")


def tiling(network: AnyNetwork) -> AnyNetwork:
    """The network for images that tile: another one of the same tensors."""
    own = {id(each): each for each in (*network.parameters(), *network.buffers())}
    twin = copy.deepcopy(network, own)
    for module in twin.modules():
        if isinstance(module, Conv2d):
            module.padding_mode = "circular"
    return twin


def upsample(
    x: Tensor,
    folded: Tensor,
    bias: Tensor | None,
    *,
    tiles: bool = False,
) -> Tensor:
    """The convolution of x [rows, in, height, width] upsampled by two: [rows, out, 2h, 2w]."""
    corners = F.conv2d(_wrapped(x), folded) if tiles else F.conv2d(x, folded, padding=1)
    corners = corners.permute(0, 2, 3, 1)
    # [rows, height + 1, 2, width + 1, 2, out]: the output pixels around each corner.
    pixels = corners.reshape(*corners.shape[:3], 2, 2, -1).transpose(2, 3)
    pixels = pixels.flatten(3, 4).flatten(1, 2)[:, 1:-1, 1:-1]
    if bias is not None:
        pixels = pixels + bias
    return pixels.permute(0, 3, 1, 2)


class Upsampler(Module):
    """diffusers' Upsample2D with a convolution; the same parameters."""

    folded: Tensor | None

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.conv = original.conv
        self.register_buffer("folded", None, persistent=False)

    def fold(self) -> None:
        """Folds the weights; call again whenever they change."""
        folded = fold(self.conv.weight.detach())
        if self.folded is None:
            self.folded = channels_last(folded)
        else:
            self.folded.copy_(folded)

    def forward(
        self,
        x: Tensor,
        output_size: torch.Size | None = None,
        *,
        tiles: bool = False,
    ) -> Tensor:
        """Upsamples x [rows, channels, height, width] by two, and cuts it to *output_size*.

        As AUTOMATIC1111 (`TorchHijackForUnet`, 1.10), where a side of an odd number of rows had
        been halved: nearest-neighbour resizing leaves out the last of one too many.
        """
        tiles = tiles or self.conv.padding_mode == "circular"
        if self.folded is not None:
            doubled = upsample(x, self.folded, self.conv.bias, tiles=tiles)
        else:
            # diffusers' own forward copies to another memory format from 64 rows on.
            doubled = convolve(
                self.conv, F.interpolate(x, scale_factor=2.0), tiles=tiles
            )
        if output_size is None:
            return doubled
        height, width = output_size
        return doubled[..., :height, :width]


def upsampler(original: Module) -> Upsampler | None:
    """A folded replacement of diffusers' Upsample2D with a convolution, for `replace_modules`."""
    if (
        not isinstance(original, Upsample2D)
        or not original.use_conv
        or original.norm is not None
    ):
        return None
    ours = Upsampler(original)
    ours.fold()
    return ours


def replace_modules(network: Module, *finds: Callable[[Module], Module | None]) -> None:
    """Replaces each submodule by what one of *finds* returns for it; None keeps the module."""
    for parent, find in itertools.product(list(network.modules()), finds):
        for name, child in list(parent.named_children()):
            if (replacement := find(child)) is not None:
                setattr(parent, name, replacement)
