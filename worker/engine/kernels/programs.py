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


@triton.jit
def product(up, down, rows, columns, outer, inner, rank, size: tl.constexpr):
    """A tile of up [outer, rank] times down [rank, inner], in float32."""
    total = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    for first in range(0, rank, size):
        ranks = first + tl.arange(0, size)
        valid = ranks < rank
        left = tl.load(
            up + rows[:, None] * rank + ranks[None, :],
            mask=(rows < outer)[:, None] & valid[None, :],
            other=0,
        )
        right = tl.load(
            down + ranks[:, None] * inner + columns[None, :],
            mask=valid[:, None] & (columns < inner)[None, :],
            other=0,
        )
        if left.dtype != tl.float16 or right.dtype != tl.float16:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        total += tl.dot(left, right, input_precision="ieee")
    return total


@triton.jit
def place_of(layer, index, count):
    """The layer's place in an ascending *index*, and whether it is there."""
    before = tl.zeros([128], tl.int32)
    here = tl.zeros([128], tl.int32)
    for first in range(0, count, 128):
        numbers = first + tl.arange(0, 128)
        known = tl.load(index + numbers, mask=numbers < count, other=2**30)
        before += (known < layer).to(tl.int32)
        here += (known == layer).to(tl.int32)
    is_there = tl.sum(here) > 0
    return tl.where(is_there, tl.sum(before), 0).to(tl.int64), is_there


@triton.jit
def change_of(kind: tl.constexpr, a, b, c, d, at, rows, columns, outer, inner, first_size,
              second_size, size: tl.constexpr):  # fmt: skip
    """A tile of what the matrices at a place make."""
    inside = (rows < outer)[:, None] & (columns < inner)[None, :]
    if kind == "full":
        places = at * outer * inner + rows[:, None] * inner + columns[None, :]
        change = tl.load(a + places, mask=inside, other=0).to(tl.float32)
    elif kind == "lokr":
        blocks = inner // second_size
        lefts = a + at * (outer // first_size) * blocks
        lefts += (rows // first_size)[:, None] * blocks
        lefts += (columns // second_size)[None, :]
        rights = b + at * first_size * second_size
        rights += (rows % first_size)[:, None] * second_size
        rights += (columns % second_size)[None, :]
        change = tl.load(lefts, mask=inside, other=0).to(tl.float32)
        change *= tl.load(rights, mask=inside, other=0).to(tl.float32)
    else:
        ups = a + at * outer * first_size
        downs = b + at * first_size * inner
        change = product(ups, downs, rows, columns, outer, inner, first_size, size)
    if kind == "loha":
        ups = c + at * outer * second_size
        downs = d + at * second_size * inner
        change *= product(ups, downs, rows, columns, outer, inner, second_size, size)
    return change


@triton.jit(
    do_not_specialize=["rank", "before", "count", "first_size", "second_size"],
    do_not_specialize_on_alignment=["index"],
)
def merge(original, base, merged, up, down, index, a, b, c, d, norms, squares, outer, inner, rank,
          before, count, first_size, second_size, strength, scale, weight, kind: tl.constexpr,
          kept: tl.constexpr, sums: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
          size: tl.constexpr):  # fmt: skip
    """A tile of base + strength * (up @ down) + weight * change; or the sums of DoRA's squares.

    The change is that of the layer's place among the *count* of the *index*, where it is there;
    *before* are the layers before the first.
    """
    layer = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(inner, width)
    row_tile = tl.program_id(0) // across
    column_tile = tl.program_id(0) % across
    rows = row_tile * height + tl.arange(0, height)
    columns = column_tile * width + tl.arange(0, width)
    inside = (rows < outer)[:, None] & (columns < inner)[None, :]
    places = layer * outer * inner + rows[:, None] * inner + columns[None, :]
    total = tl.zeros([height, width], tl.float32)
    if not sums:
        ups = up + layer * outer * rank
        downs = down + layer * rank * inner
        total = product(ups, downs, rows, columns, outer, inner, rank, size) * strength
        total += tl.load(base + places, mask=inside, other=0).to(tl.float32)
    if kind != "none":
        at, is_there = place_of(layer + before, index, count)
        change = scale * change_of(
            kind, a, b, c, d, at, rows, columns, outer, inner, first_size, second_size, size
        )  # fmt: skip
        if kept != "none":
            exact = tl.load(original + places, mask=inside, other=0).to(tl.float32)
            change += exact
            if kept == "rows":
                lines, length, tile, tiles = rows, outer, column_tile, across
            else:
                lines, length, tile = columns, inner, row_tile
                tiles = tl.cdiv(outer, height)
            valid = lines < length
            parts = squares + at * tiles * length + lines
            if sums:
                part = tl.sum(change * change, 1 if kept == "rows" else 0)
                tl.store(parts + tile * length, part, mask=valid & is_there)
            else:
                square = tl.zeros(lines.shape, tl.float32)
                for other in range(tiles):
                    square += tl.load(parts + other * length, mask=valid, other=0)
                norm = tl.load(norms + at * length + lines, mask=valid, other=0)
                ratio = norm.to(tl.float32) / tl.maximum(tl.sqrt(square), 1.2e-38)
                change *= ratio[:, None] if kept == "rows" else ratio[None, :]
                change -= exact
        total += tl.where(is_there, weight * change, 0)
    if not sums:
        tl.store(merged + places, total.to(merged.dtype.element_ty), mask=inside)
