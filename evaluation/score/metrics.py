"""FID, KID, CMMD and CLIP score of features, in float64.

The tests compare them with torch-fidelity's. Those need torch, torchvision and all features in
memory; here an ONNX network needs neither, and features stay in files. It has no CMMD.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evaluation.score.statistics import Doubles, Features, Rows, Statistics, blocks
from imagefleet import errors

#: As torch-fidelity has them, whose subsets are drawn the same way.
KID_SUBSETS = 100
KID_SUBSET_SIZE = 1000
_KID_SEED = 2020

#: Jayasumana et al., "Rethinking FID: Towards a Better Evaluation Metric" (2024).
_CMMD_SIGMA = 10.0
_CMMD_SCALE = 1000.0

#: The CLIP score is 100 times a cosine.
_CLIP_SCALE = 100.0


@dataclass(frozen=True, slots=True)
class Kid:
    """The mean over subsets, and their standard deviation."""

    mean: float
    std: float
    subset_size: int


def mean_square(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> float:
    """The mean square of the difference of all channels, out of 255 squared."""
    difference = a.astype(np.int16) - b
    return float(np.square(difference, dtype=np.int32).mean())


def psnr(square: float) -> float | None:
    """The peak signal-to-noise ratio in dB by the mean square; None for the same pixels."""
    return None if square == 0 else 10 * math.log10(255**2 / square)


def frechet_distance(a: Statistics, b: Statistics) -> float:
    """FID, of Heusel et al. (2017), if the features are Inception's."""
    if a.mean.shape != b.mean.shape:
        raise errors.SetupError(
            f"one side has {len(a.mean):,} features an image, the other {len(b.mean):,}: both must"
            " come from the same extractor"
        )
    # The trace of sqrt(A B) is that of sqrt(sqrt(A) B sqrt(A)), which is symmetric.
    values, vectors = np.linalg.eigh(a.covariance)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    shared = np.sqrt(np.linalg.eigvalsh(root @ b.covariance @ root).clip(0)).sum()
    apart = a.mean - b.mean
    spread = np.trace(a.covariance) + np.trace(b.covariance) - 2 * shared
    return float(apart @ apart + spread)


def kid(a: Rows, b: Rows, *, subsets: int = KID_SUBSETS, subset_size: int = KID_SUBSET_SIZE) -> Kid:
    """KID, of Binkowski et al. (2018): the unbiased MMD of subsets under a cubic kernel.

    The subsets follow from the order of the rows alone; they have no more rows than there are.
    """
    size = min(subset_size, a.shape[0], b.shape[0])
    if size < 2:  # noqa: PLR2004
        raise errors.SetupError("KID needs at least two images on each side")
    # This generator and this order draw the subsets of torch-fidelity.
    random = np.random.RandomState(_KID_SEED)
    found = []
    for _ in range(subsets):
        one = a[random.choice(a.shape[0], size, replace=False)].astype(np.float64)
        other = b[random.choice(b.shape[0], size, replace=False)].astype(np.float64)
        found.append(_unbiased_mmd(one, other))
    return Kid(float(np.mean(found)), float(np.std(found)), size)


def _unbiased_mmd(a: Doubles, b: Doubles) -> float:
    pairs = len(a) * (len(a) - 1)
    within = sum(
        (kernel.sum() - np.trace(kernel)) / pairs for kernel in (_cubic(a, a), _cubic(b, b))
    )
    return float(within - 2 * _cubic(a, b).mean())


def _cubic(a: Doubles, b: Doubles) -> Doubles:
    kernel: Doubles = a @ b.T / a.shape[1] + 1
    return kernel * kernel * kernel  # a power takes ten times as long


def cmmd(a: Rows, b: Rows, *, within_b: float | None = None) -> float:
    """CMMD: 1,000 times the squared MMD of CLIP's image features under a Gaussian kernel.

    *within_b* is `mean_kernel(b, b)`, where it is known already.
    """
    within_b = mean_kernel(b, b) if within_b is None else within_b
    return _CMMD_SCALE * (mean_kernel(a, a) + within_b - 2 * mean_kernel(a, b))


def mean_kernel(a: Rows, b: Rows) -> float:
    """The mean of the Gaussian kernel over all pairs, block by block."""
    total = 0.0
    for first, one in enumerate(blocks(a)):
        rows = unit(one)
        for second, other in enumerate(blocks(b)):
            if a is b and second < first:
                continue  # the same as the pair the other way round
            # Of unit vectors, the squared distance is 2 - 2 cos.
            kernel = np.exp((rows @ unit(other).T - 1) / _CMMD_SIGMA**2)
            total += float(kernel.sum()) * (2 if a is b and second > first else 1)
    return total / (a.shape[0] * b.shape[0])


def clip_score(images: Features, texts: Features) -> Doubles:
    """The score of each image with its text: 100 times their cosine, 0 at least.

    Hessel et al., "CLIPScore" (2021), without its factor of 2.5; as NeMo and MLPerf have it.
    """
    cosines: Doubles = (unit(images) * unit(texts)).sum(axis=1)
    return _CLIP_SCALE * cosines.clip(0)


def unit(features: Features) -> Doubles:
    """The rows at length 1, in float64."""
    exact = features.astype(np.float64)
    lengths = np.sqrt((exact**2).sum(axis=1, keepdims=True))
    rows: Doubles = exact / np.maximum(lengths, 1e-12)
    return rows
