"""Means and covariances of features, streamed and merged in float64.

torch-fidelity computes them of an array of all features, 2.5 GB for 300,000 images of Inception's.
"""

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from imagefleet.errors import SetupError

Features = NDArray[np.float32]
Doubles = NDArray[np.float64]

#: Rows multiplied at once: 16 MB of 2,048 features.
BLOCK_ROWS = 1024


#: What numpy raises for a file that is no `.npz`, or lacks what is asked for.
UNREADABLE = (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile)


class Rows(Protocol):
    """Features of many images, of which some are read at a time: an array, or files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Images, and features of each."""

    def __getitem__(self, indices: NDArray[np.int64], /) -> Features: ...


def blocks(rows: Rows, size: int = BLOCK_ROWS) -> Iterable[Features]:
    """The rows in order, *size* at a time."""
    for first in range(0, rows.shape[0], size):
        yield rows[np.arange(first, min(first + size, rows.shape[0]))]


@dataclass(frozen=True)
class Statistics:
    """The number of images, the mean of their features and the sum of squares around it."""

    count: int
    mean: Doubles
    scatter: Doubles

    @classmethod
    def of(cls, rows: Rows) -> Self:
        """The statistics of *rows*, read block by block."""
        return cls.merged(map(cls._of_block, blocks(rows)), rows.shape[1])

    @classmethod
    def merged(cls, parts: Iterable[Self], dimensions: int) -> Self:
        """The statistics of all parts; their order changes the last digits at most."""
        empty = cls(0, np.zeros(dimensions), np.zeros((dimensions, dimensions)))
        return reduce(cls.__add__, parts, empty)

    @classmethod
    def _of_block(cls, features: Features) -> Self:
        exact = features.astype(np.float64)
        mean = exact.mean(axis=0)
        centred = exact - mean
        return cls(len(features), mean, centred.T @ centred)

    def __add__(self, other: Self) -> Self:
        """Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm" (1979)."""
        count = self.count + other.count
        if not (self.count and other.count):
            return self if self.count else other
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        between = np.outer(apart, apart) * (self.count * other.count / count)
        return type(self)(count, mean, self.scatter + other.scatter + between)

    @property
    def covariance(self) -> Doubles:
        """Raises SetupError for a single image, which has none."""
        if self.count < 2:  # noqa: PLR2004
            raise SetupError("FID needs at least two images on each side")
        return self.scatter / (self.count - 1)

    @classmethod
    def read(cls, path: Path) -> Self:
        """A `.npz` of pytorch-fid or clean-fid; raises SetupError if it is none."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                mean = np.asarray(stored["mu"], np.float64)
                covariance = np.asarray(stored["sigma"], np.float64)
                count = int(stored["count"]) if "count" in stored else 0
        except UNREADABLE as error:
            raise SetupError(
                f"{path} has no statistics: it should be an .npz with `mu` and `sigma` ({error})"
            ) from None
        is_whole = np.isfinite(mean).all() and np.isfinite(covariance).all()
        if mean.ndim != 1 or covariance.shape != 2 * mean.shape or not is_whole:
            raise SetupError(
                f"{path}: `mu` should be a vector of finite numbers and `sigma` a square matrix of"
                f" its size, not {mean.shape} and {covariance.shape}"
            )
        # Without a count, that of the covariance as it is.
        count = count if count > 1 else 2
        return cls(count, mean, covariance * (count - 1))
