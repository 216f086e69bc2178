"""The programs that `layers.py` runs on a GPU; Triton's functions have no types."""

# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

cdiv = triton.cdiv

# A grid's first side alone may exceed 65,535, as SDXL's VAE does.


@triton.jit
def add_up(x, added, sums, pixels, channels, total, has_added: tl.constexpr, size: tl.constexpr,
           width: tl.constexpr):  # fmt: skip
    """Sums of a part's values and squares for each channel, in [2, rows, parts, channels]."""
    part = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(2) * width + tl.arange(0, width)
    inside = at < channels
    shift = tl.zeros([width], tl.float32)
    if has_added:
        shift = tl.load(added + row * channels + at, mask=inside, other=0).to(
            tl.float32
        )
    values = tl.zeros([width], tl.float32)
    squares = tl.zeros([width], tl.float32)
    for first in range(0, size, 16):
        pixel = part * size + first + tl.arange(0, 16)
        valid = (pixel < pixels)[:, None] & inside[None, :]
        pixel_places = row * pixels * channels + pixel[:, None] * channels
        places = pixel_places + at[None, :]
        read = tl.load(x + places, mask=valid, other=0).to(tl.float32)
        read = tl.where(valid, read + shift[None, :], 0)
        values += tl.sum(read, 0)
        squares += tl.sum(read * read, 0)
    place = (row * tl.num_programs(0) + part) * channels + at
    tl.store(sums + place, values, mask=inside)
    tl.store(sums + total + place, squares, mask=inside)


@triton.jit
def normalise(x, added, normed, mean, scale, weight, bias, numbers, channels, group,
              has_added: tl.constexpr, activates: tl.constexpr, size: tl.constexpr):  # fmt: skip
    """(x + added - mean) * scale * weight + bias, and its SiLU."""
    first = tl.program_id(0).to(tl.int64) * size
    row = tl.program_id(1).to(tl.int64)
    at = first + tl.arange(0, size)
    inside = at < numbers
    channel = ((first % channels).to(tl.int32) + tl.arange(0, size)) % channels
    place = row * (channels // group) + channel // group
    own = row * numbers + at
    read = tl.load(x + own, mask=inside).to(tl.float32)
    if has_added:
        shifts = added + row * channels
        read += tl.load(shifts + channel, mask=inside).to(tl.float32)
    read = read - tl.load(mean + place, mask=inside)
    read = read * tl.load(scale + place, mask=inside)
    read = read * tl.load(weight + channel, mask=inside).to(tl.float32)
    read += tl.load(bias + channel, mask=inside).to(tl.float32)
    if activates:
        read = read * tl.sigmoid(read)
    tl.store(normed + own, read.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def gate(x, gated, numbers, width, size: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    inside = at < numbers
    place = at // width * 2 * width + at % width
    value = tl.load(x + place, mask=inside).to(tl.float32)
    other = tl.load(x + place + width, mask=inside).to(tl.float32)
    other = 0.5 * other * (1 + tl.erf(other * 0.7071067811865476))
    tl.store(gated + at, (value * other).to(gated.dtype.element_ty), mask=inside)
