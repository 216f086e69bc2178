"""Convolutions with shared weights and, beside them, each slot's own low-rank change (LoCon).

A copy of all convolutions would take 1.1 GB per slot, and a grouped convolution, with a group per
slot, is slow. So it is conv(x, W) + up(down(x)); `down` multiplies each pixel by the weights of all
nine taps at once, since a convolution of its own would read its input nine times. Other layers that
slots hold no copy of are treated alike: 1x1 convolutions of resnets, linear layers for the time.
Where few images have such changes, only the first slots can hold them: those of all slots take a
tenth of a tick.
"""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor
from torch.nn import Conv2d, Module

from imagefleet.errors import SetupError
from worker.engine.kernels.layers import Upsampler, convolve
from worker.engine.lora.kinds import Factors
from worker.engine.lora.merge import Shape

#: Memory is planned for changes of this rank.
USUAL_RANK = 32

#: A compiled tick has fixed ranks: powers of two from this one on, so that few are compiled.
_MIN_CAPACITY = 16

_KERNEL = 3

#: Of a block's slots, those that can hold changes while few images have any.
_CHANGING = 0.25


class LowRankChange(Module):
    """Each slot's own change of layers of one shape with the same input."""

    #: [slots, layers * taps * rank, in], of the first slots; None until a job has such a change.
    down: Tensor | None
    #: [slots, layers, rank, out]
    up: Tensor | None

    def __init__(self, layers: Mapping[str, Module]) -> None:
        """*layers* by path."""
        super().__init__()
        self.paths = list(layers)
        weights: list[Any] = [layer.weight for layer in layers.values()]
        ((outputs, inputs, *kernel),) = {tuple(each.shape) for each in weights}
        self.shape = Shape(outputs, inputs, math.prod(kernel))
        self.width: int = len(self.paths) * outputs
        self.register_buffer("down", None, persistent=False)
        self.register_buffer("up", None, persistent=False)

    def add(self, output: Tensor, x: Tensor, slots: int) -> None:
        """Adds to the *output* [rows, width] of x [rows, in], equally many rows per slot."""
        if not slots or self.down is None or self.up is None:
            return
        products = self.narrow(x, slots, self.down)
        by_layer = products.view(*products.shape[:2], len(self.paths), -1)
        by_layer = by_layer.transpose(1, 2)
        # [slots, layers, tokens, rank] by [slots, layers, rank, out]
        changed = torch.matmul(by_layer, self.up[: len(products)])
        changed = changed.transpose(1, 2).flatten(2).flatten(0, 1)
        output[: len(changed)] += changed

    def narrow(self, x: Tensor, slots: int, down: Tensor) -> Tensor:
        """The products [changing slots, tokens, layers * taps * rank] of x [rows, ..., in]."""
        changing = min(slots, len(down))
        rows = len(x) // slots * changing
        tokens = x[:rows].reshape(changing, -1, x.shape[-1])
        return torch.bmm(tokens, down[:changing].transpose(1, 2))


class SlotConv(Module):
    """A convolution, also one that upsamples, with shared weights and each slot's own change."""

    def __init__(self, layer: Module, path: str) -> None:
        """*path* is that of the convolution itself."""
        super().__init__()
        conv = layer.conv if isinstance(layer, Upsampler) else layer
        if not isinstance(conv, Conv2d) or not _is_usual(conv):
            raise SetupError(f"{path} is not one of Stable Diffusion's convolutions")
        self.layer: Any = layer
        self.change = LowRankChange({path: conv})
        self._stride: int = conv.stride[0]

    def forward(
        self,
        x: Tensor,
        slots: int,
        size: torch.Size | None = None,
        *,
        tiles: bool = False,
    ) -> Tensor:
        """*slots* adds each slot's own change, 0 none; *size* is for upsampling.

        *tiles*: see `convolve`.
        """
        output: Tensor
        if isinstance(self.layer, Upsampler):
            output = self.layer(x, size, tiles=tiles)
        else:
            output = convolve(self.layer, x, tiles=tiles)
        if not slots:
            return output
        down = self.change.down
        up = self.change.up
        if down is None or up is None:
            return output
        products = self.change.narrow(x.permute(0, 2, 3, 1), slots, down)
        changing = len(products)
        rows = len(x) // slots * changing
        if self.change.shape.taps > 1:
            products = products.view(rows, *x.shape[2:], -1)
            if size is not None:
                products = F.interpolate(products.permute(0, 3, 1, 2), scale_factor=2.0)
                products = products.permute(0, 2, 3, 1)
            products = _add_taps(products, output.shape[2:], self._stride, tiles=tiles)
        products = products.reshape(changing, -1, up.shape[2])
        changed = torch.bmm(products, up[:changing, 0])
        changed = changed.view(rows, *output.shape[2:], -1).permute(0, 3, 1, 2)
        output[:rows] += changed
        return output


def _add_taps(
    products: Tensor, size: torch.Size, stride: int, *, tiles: bool
) -> Tensor:
    """Sums [rows, *size, rank] of a 3x3 convolution's products [rows, height, width, 9 * rank]."""
    how = "circular" if tiles else "constant"
    padded = F.pad(products.permute(0, 3, 1, 2), (1, 1, 1, 1), how)
    padded = padded.permute(0, 2, 3, 1)
    padded = padded.reshape(*padded.shape[:3], _KERNEL**2, -1)
    rows, columns = (stride * (side - 1) + 1 for side in size)
    total = padded[:, :rows:stride, :columns:stride, 0]
    for tap in range(1, _KERNEL**2):
        below, right = divmod(tap, _KERNEL)
        shifted = padded[
            :, below : below + rows : stride, right : right + columns : stride, tap
        ]
        total = total + shifted
    return total


def _is_usual(conv: Conv2d) -> bool:
    """True if `_add_taps` computes the same as the convolution."""
    usual = [((1, 1), (0, 0)), ((_KERNEL, _KERNEL), (1, 1))]
    return (
        (conv.kernel_size, conv.padding) in usual
        and conv.stride[0] == conv.stride[1]
        and conv.groups == 1
        and conv.padding_mode == "zeros"
    )


class SlotChanges:
    """All slots' changes, zero for jobs without any; allocated when jobs need them."""

    def __init__(self, changes: Iterable[LowRankChange], like: Tensor) -> None:
        """*like* has the device and the type."""
        self.groups: dict[Shape, list[str]] = {}
        #: Rises whenever the tensors are allocated anew.
        self.version = 0
        self._members: dict[Shape, list[LowRankChange]] = {}
        for change in changes:
            self.groups.setdefault(change.shape, []).extend(change.paths)
            self._members.setdefault(change.shape, []).append(change)
        self._like = like
        self._slots: tuple[int, ...] = (0,)
        self._changing = 1.0
        self._is_outgrown = False
        self._capacities: dict[Shape, int] = {}
        self._parts: dict[Shape, Factors] = {}
        #: The block in use, and how many of its slots are; None: all.
        self.block: tuple[int, int | None] = (0, None)
        self._blocks: dict[int, Tensor] = {}
        self._changed: set[tuple[int, int]] = set()

    @property
    def slot_bytes(self) -> int:
        """Size of a slot's changes: zero until the first job has any."""
        return self._bytes_of(self._capacities)

    def more_bytes(self, rank: int) -> int:
        """Bytes that a slot's changes grow by for a job that changes all layers at a rank."""
        grown = {each: max(rank, self._capacities.get(each, 0)) for each in self.groups}
        return self._bytes_of(grown) - self.slot_bytes

    def _bytes_of(self, capacities: Mapping[Shape, int]) -> int:
        return self._like.element_size() * sum(
            len(self.groups[shape])
            * (shape.outputs + shape.inputs * shape.taps)
            * capacity
            for shape, capacity in capacities.items()
        )

    @property
    def exist(self) -> bool:
        """True once some job changed such a layer."""
        return bool(self._capacities)

    def slots_of(self, block: int) -> int:
        """The slots of a block that can hold changes, its first ones."""
        return math.ceil(self._changing * self._slots[min(block, len(self._slots) - 1)])

    def expect(self, *, few: bool) -> None:
        """Sets whether a *few* slots can hold changes or all; these stay all until `resize`."""
        if few and not self.exist:
            self._changing = _CHANGING
        elif not few and self._changing < 1:
            self._changing = 1.0
            self._is_outgrown = self.exist

    def has_room(self, ranks: Iterable[tuple[Shape, int]]) -> bool:
        """True if slots can hold changes of these ranks."""
        fits = all(rank <= self._capacities.get(shape, 0) for shape, rank in ranks)
        return fits and not self._is_outgrown

    def grow(self, ranks: Iterable[tuple[Shape, int]]) -> None:
        """Makes room for changes of these ranks; those that slots hold now are lost."""
        for shape, rank in ranks:
            capacity = max(_MIN_CAPACITY, 2 ** math.ceil(math.log2(rank)))
            self._capacities[shape] = max(self._capacities.get(shape, 0), capacity)
        try:
            self._allocate()
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        self._capacities.clear()
        self._allocate()

    def resize(self, *slots: int) -> None:
        """Allocates zero changes for the *slots* of the first block; others have the last ones'."""
        self._slots = slots
        self.block = (0, None)
        self._allocate()

    def _allocate(self) -> None:
        self.version += 1
        self._is_outgrown = False
        self._blocks.clear()
        self._parts.clear()
        self._changed.clear()
        self._leave_out()
        self.use_block(*self.block)

    def use_block(self, block: int, slots: int | None = None) -> None:
        """Uses the first *slots* of another block's changes, allocated at its first use."""
        held = self.slots_of(block)
        if self._capacities and block not in self._blocks:
            size = self.slot_bytes // self._like.element_size()
            self._blocks[block] = self._like.new_zeros((held, size))
        self.block = (block, slots)  # where the memory was too short, the one before
        if not self._capacities or not held:
            return
        own = self._blocks[block]
        at = 0
        for shape, capacity in self._capacities.items():
            layers = len(self.groups[shape])
            middle = at + layers * capacity * shape.outputs
            end = middle + layers * capacity * shape.inputs * shape.taps
            up = own[:, at:middle].view(held, layers, capacity, shape.outputs)
            down = own[:, middle:end].view(held, layers, -1, shape.inputs)
            self._parts[shape] = (up, down)
            at = end
            first = 0
            for change in self._members[shape]:
                part = slice(first, first + len(change.paths))
                change.up = up[:slots, part]
                change.down = down[:slots, part].flatten(1, 2)
                first = part.stop

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """The block sees layers as they are before any job changes convolutions."""
        self._leave_out()
        try:
            yield
        finally:
            self.use_block(*self.block)

    def _leave_out(self) -> None:
        for change in itertools.chain.from_iterable(self._members.values()):
            change.down = change.up = None

    def load(self, slot: int, changes: Mapping[Shape, Factors]) -> None:
        """Sets a slot's changes, asynchronously; there must be room."""
        block, _ = self.block
        place = (block, slot)
        if place in self._changed:
            self._blocks[block][slot].zero_()
            self._changed.discard(place)
        for shape, (new_up, new_down) in changes.items():
            self._changed.add(place)
            up, down = (part[slot] for part in self._parts[shape])
            rank = new_down.shape[1]
            up[:, :rank].copy_(new_up.transpose(1, 2))
            layers = len(new_down)
            taps = shape.taps
            by_tap = new_down.view(layers, rank, -1, taps).permute(0, 3, 1, 2)
            room = down.view(layers, taps, -1, shape.inputs)
            room[:, :, :rank].copy_(by_tap)
