"""Similarity of two pictures, by their fingerprints.

A job comes out a little different on another GPU, in another precision or among other jobs.
`benchmarks/likeness.py` measures what `SAME_BELOW` divides.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

#: [16, 16, 4]: each cell's mean red, green and blue, and its roughness; all out of 255.
Fingerprint = NDArray[np.float32]

#: Cells of a fingerprint in each direction.
SIDE = 16

#: Two drawings of one job are nearer than this. Jobs of 15 steps were up to 2.1 apart in float32
#: and float16, on two kinds of GPU; another seed makes 15 or more, noise of 2 % of the range 21, a
#: garbled 64th of the image 28, a LoRA left out 52. (In bfloat16 4 of 40 jobs were further apart.)
SAME_BELOW = 10.0

#: Cells whose colours differ most: a broken tile is lost in the mean over all.
_WORST_CELLS = 4

#: The smoothest cells: noise shows there first, and a picture's own detail hides it elsewhere.
_SMOOTH_CELLS = SIDE * SIDE // 4

#: Noise of 2 % of the range changes roughness by some 2, and rounding by 0.1.
_ROUGHNESS_WEIGHT = 10.0


def fingerprint(pixels: NDArray[np.uint8]) -> Fingerprint:
    """The fingerprint of an image [height, width, 3]; images of any size can be compared."""
    for axis in (0, 1):
        side = pixels.shape[axis]
        if side < 2 * SIDE:  # a cell needs two pixels for its roughness
            pixels = pixels.repeat(-(-2 * SIDE // max(1, side)), axis)
    green = pixels[..., 1].astype(np.int16)
    across = green[:, 1:] - green[:, :-1]
    roughness = np.abs(across[1:] - across[:-1])[..., None]
    return np.concatenate([_cell_means(pixels), _cell_means(roughness) / 2], axis=2)


def distance(a: Fingerprint, b: Fingerprint) -> float:
    """0 for the same pixels; below `SAME_BELOW` for two drawings of one job."""
    differences = a[..., :3] - b[..., :3]
    colours = np.sqrt((differences**2).mean(axis=2)).ravel()
    worst = np.partition(colours, -_WORST_CELLS)[-_WORST_CELLS:]
    rough_a = a[..., 3].ravel()
    rough_b = b[..., 3].ravel()
    smooth = np.argpartition(rough_a + rough_b, _SMOOTH_CELLS)[:_SMOOTH_CELLS]
    roughness = np.median(np.abs(rough_a[smooth] - rough_b[smooth]))
    return float(max(worst.mean(), _ROUGHNESS_WEIGHT * roughness))


def _cell_means(values: NDArray[np.integer]) -> NDArray[np.float32]:
    """The means of [height, width, channels] in SIDE x SIDE cells, as equal as can be."""
    height, width, _ = values.shape
    borders = np.arange(SIDE + 1)
    rows = borders * height // SIDE
    columns = borders * width // SIDE
    # A loop over slices: five times as fast as `np.add.reduceat` on whole pictures.
    of_rows = [values[top:end].sum(0, np.uint32) for top, end in pairwise(rows)]
    sums = np.add.reduceat(np.stack(of_rows), columns[:-1], axis=1)
    sizes = np.diff(rows)[:, None, None] * np.diff(columns)[:, None]
    return np.asarray(sums / sizes, np.float32)
