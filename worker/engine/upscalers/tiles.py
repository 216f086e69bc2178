"""An image through a network tile by tile, so that its memory does not grow with the image."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

#: Pixels of the image on each side that two tiles share: across them, one fades into the other.
OVERLAP = 32


def spans(length: int, tile: int, overlap: int = OVERLAP) -> list[tuple[int, int]]:
    """The places where tiles begin and end along a side, evenly spread; all are of the same length.

    Raises:
        ValueError: a tile is not longer than what it shares.
    """
    if tile >= length:
        return [(0, length)]
    if tile <= overlap:
        raise ValueError(f"tiles of {tile} pixels cannot share {overlap}")
    count = -(-(length - overlap) // (tile - overlap))
    starts = [round(index * (length - tile) / (count - 1)) for index in range(count)]
    return [(start, start + tile) for start in starts]


def run(
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
    """Each span with its weights [pixels of the output]: 1, and less across what is shared."""
    for index, (start, end) in enumerate(spans_):
        weight = torch.ones((end - start) * scale)
        if index:
            shared = (spans_[index - 1][1] - start) * scale
            weight[:shared] *= _ramp(shared)
        if index < len(spans_) - 1:
            shared = (end - spans_[index + 1][0]) * scale
            weight[-shared:] *= _ramp(shared).flip(0)
        yield weight, start, end


def _ramp(length: int) -> torch.Tensor:
    """A tile's weights along a side, above 0 everywhere, so that no pixel is without weight."""
    return (torch.arange(length) + 0.5) / length
