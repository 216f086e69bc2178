"""Measures the difference between two drawings of one job, without any network.

The structural similarity is scikit-image's. What one broken picture shows is in its worst region,
not in the mean over the picture; what a wrong setting does to all of them is in `Shift`, where it
adds up while chance differences cancel out.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from PIL import Image

from evaluation.gate.images import Pixels
from evaluation.score.statistics import Doubles

#: Regions of a picture in each direction: damage to a sixteenth of it, anywhere, fills one.
REGIONS = 8

#: Wang et al., "Image Quality Assessment" (2004) compare pictures at about this size.
_SSIM_PIXELS = 256

#: The side of SSIM's window; smaller pictures are enlarged to a region of one window at least.
_WINDOW = 7

#: Levels added to how colourful a picture is: what is grey has no colours to change.
_COLOURLESS = 2.0

#: Added to the energy of edges, in squared levels: a flat picture has none.
_FLAT = 1.0


def similarity(a: Pixels, b: Pixels) -> tuple[float, float]:
    """The SSIM of two pictures [height, width, 3] of one size: the mean, and the worst region's."""
    from skimage.metrics import structural_similarity
    from skimage.transform import resize_local_mean

    side = min(a.shape[:2])
    if (factor := round(side / _SSIM_PIXELS)) > 1:
        a = np.asarray(Image.fromarray(a).reduce(factor))
        b = np.asarray(Image.fromarray(b).reduce(factor))
    elif (times := math.ceil(_WINDOW / side)) > 1:
        a = a.repeat(times, 0).repeat(times, 1)
        b = b.repeat(times, 0).repeat(times, 1)
    mean, each_pixel = structural_similarity(
        a, b, channel_axis=2, full=True, data_range=255
    )
    regions = [min(REGIONS, length) for length in a.shape[:2]]
    return float(mean), float(resize_local_mean(each_pixel.mean(2), regions).min())


def tone(a: Pixels, b: Pixels) -> tuple[float, float]:
    """Changes from A to B, means over the regions of a picture: of colours, and of brightness.

    That of colours in percent of A's own, the distances from grey: 100 for a picture in grey tones;
    that of brightness in levels.
    """
    regions = [_regions(each) for each in (a, b)]
    grey_a, grey_b = (each.mean(-1, keepdims=True) for each in regions)
    of_a = regions[0] - grey_a
    of_b = regions[1] - grey_b
    apart = np.linalg.norm(of_b - of_a, axis=-1).mean()
    own = np.linalg.norm(of_a, axis=-1).mean()
    lighter = np.abs(grey_b - grey_a).mean()
    return float(100 * apart / (own + _COLOURLESS)), float(lighter)


def _regions(picture: Pixels) -> Doubles:
    """The mean colour of each region of a picture."""
    height, width = picture.shape[:2]
    size = min(REGIONS, width), min(REGIONS, height)
    small = Image.fromarray(picture).resize(size, Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float64)


@dataclass(frozen=True)
class Shift:
    """Change from A to B that all pairs share: sums over pairs, which can be added up."""

    pixels: int
    #: [3]: the sums of B - A by channel, in levels.
    brightness: Doubles
    #: [2, 3]: of A's and B's channels.
    variance: Doubles
    #: [2]: the squared differences of neighbours in A and in B.
    edges: Doubles
    #: [2, 2]: the products of A's gradients.
    gradients: Doubles
    #: [2]: the products of A's gradients and B - A.
    along: Doubles

    @classmethod
    def of(cls, a: Pixels, b: Pixels) -> Self:
        """The sums of one pair of pictures [height, width, 3]."""
        channels = np.stack([a, b]).reshape(2, -1, 3)
        pixels = channels.shape[1]
        grey = np.stack([a, b]).mean(-1, dtype=np.float32)
        steps = (
            np.square(np.diff(grey, axis=axis), dtype=np.float64) for axis in (1, 2)
        )
        edges = np.zeros(2)
        for step in steps:
            if step.size:
                edges += step.mean((1, 2))
        grey_a, grey_b = grey
        apart = (grey_b - grey_a)[1:-1, 1:-1].ravel().astype(np.float64)
        right = grey_a[1:-1, 2:]
        left = grey_a[1:-1, :-2]
        below = grey_a[2:, 1:-1]
        above = grey_a[:-2, 1:-1]
        gradient = np.stack([(right - left).ravel(), (below - above).ravel()]) / 2
        gradient = gradient.astype(np.float64)
        return cls(
            pixels,
            (channels[1].astype(np.int16) - channels[0]).sum(0, dtype=np.float64),
            channels.var(1, dtype=np.float64) * pixels,
            edges * pixels,
            gradient @ gradient.T,
            gradient @ apart,
        )

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.pixels + other.pixels,
            self.brightness + other.brightness,
            self.variance + other.variance,
            self.edges + other.edges,
            self.gradients + other.gradients,
            self.along + other.along,
        )

    @property
    def brightness_levels(self) -> float:
        """The mean change of the channel that changes most, of 255 levels."""
        return float(np.abs(self.brightness).max() / self.pixels)

    @property
    def contrast_percent(self) -> float:
        """The change of the standard deviation of the channel that changes most."""
        one, other = self.variance + _FLAT * self.pixels
        return float(100 * np.abs(np.sqrt(other / one) - 1).max())

    @property
    def sharpness_percent(self) -> float:
        """The change of the edges' height; blur makes it negative."""
        one, other = self.edges + _FLAT * self.pixels
        return float(100 * (np.sqrt(other / one) - 1))

    @property
    def displacement_pixels(self) -> float:
        """Displacement of B's pictures against A's, by Lucas and Kanade (1981)."""
        moved, *_ = np.linalg.lstsq(self.gradients, self.along, rcond=None)
        return float(np.hypot(*moved))
