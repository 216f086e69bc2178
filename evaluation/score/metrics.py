"""FID, KID, CMMD and CLIP score of features, in float64.

The tests compare them with torch-fidelity's. Those need torch, torchvision and all features in
memory; here an ONNX network needs neither, and features stay in files. It has no CMMD.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from evaluation.score.statistics import Doubles, Features, Rows, Statistics, blocks
from imagefleet.errors import SetupError

#: As torch-fidelity has them, whose subsets are drawn the same way.
KID_SUBSETS = 100
KID_SUBSET_SIZE = 1000
_KID_SEED = 2020

#: Jayasumana et al., "Rethinking FID: Towards a Better Evaluation Metric" (2024).
_CMMD_SIGMA = 10.0
_CMMD_SCALE = 1000.0

#: The CLIP score is 100 times a cosine.
_CLIP_SCALE = 100.0


#: Of the normal distribution, for intervals of 95 %.
_QUANTILE = 1.96


@dataclass(frozen=True)
class Estimate:
    """A figure with the interval of 95 % in which other images of the same kind would have it."""

    value: float
    interval: tuple[float, float]

    @classmethod
    def of(cls, value: float, shares: Doubles) -> Self:
        """Estimates the interval from each image's first-order share of the figure.

        The infinitesimal jackknife, which resampling approaches (Efron, "The Jackknife, the
        Bootstrap and Other Resampling Plans", 1982, chapter 6). Resampling itself would take an
        eigenvalue decomposition a time, and images that are drawn twice raise FID.
        """
        count = len(shares)
        apart = shares - shares.mean()
        variance = float(apart @ apart) * count / max(1, count - 1)
        error = math.sqrt(variance)
        return cls(value, (value - _QUANTILE * error, value + _QUANTILE * error))


@dataclass(frozen=True)
class Kid:
    """The mean over subsets, and their standard deviation; None of subsets that are the sets."""

    estimate: Estimate
    std: float | None
    subset_size: int


def mean_square(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> float:
    """The mean square of the difference of all channels, out of 255 squared."""
    difference = a.astype(np.int16) - b
    return float(np.square(difference, dtype=np.int32).mean())


def psnr(square: float) -> float | None:
    """The peak signal-to-noise ratio in dB by the mean square; None for the same pixels."""
    return None if square == 0 else 10 * math.log10(255**2 / square)


def frechet_distance(a: Statistics, b: Statistics) -> float:
    """The Fréchet distance of two sets of features: FID (Heusel et al., 2017) of Inception's."""
    if a.mean.shape != b.mean.shape:
        raise SetupError(
            f"one side has {len(a.mean):,} features an image, the other {len(b.mean):,}: both must"
            " come from the same extractor"
        )
    # The trace of sqrt(A B) is that of sqrt(sqrt(A) B sqrt(A)), which is symmetric.
    root = square_root(a)
    return _distance(
        a, b, np.linalg.eigvalsh(root @ b.covariance @ root).astype(np.float64)
    )


def square_root(of: Statistics) -> Doubles:
    """Symmetric square root of the covariance."""
    values, vectors = np.linalg.eigh(of.covariance)
    root: Doubles = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    return root


def _distance(a: Statistics, b: Statistics, values: Doubles) -> float:
    apart = a.mean - b.mean
    spread = (
        np.trace(a.covariance)
        + np.trace(b.covariance)
        - 2 * np.sqrt(values.clip(0)).sum()
    )
    return max(0.0, float(apart @ apart + spread))


def fid(rows: Rows, reference: Statistics, root: Doubles) -> Estimate:
    """The FID of *rows* to a reference, whose `square_root` is *root*."""
    seen = Statistics.of(rows)
    values, vectors = np.linalg.eigh(root @ seen.covariance @ root)
    # What follows is the derivative of the distance by the weight of each image.
    least = values.max() * len(values) * np.finfo(np.float64).eps
    whole = values > least
    shared = root @ (vectors[:, whole] / values[whole] ** 0.25)
    shares = []
    for block in blocks(rows):
        apart = block - seen.mean
        to_reference = 2 * apart @ (seen.mean - reference.mean)
        own = np.square(apart).sum(axis=1)
        common = np.square(apart @ shared).sum(axis=1)
        shares.append((to_reference + own - common) / seen.count)
    return Estimate.of(_distance(seen, reference, values), np.concatenate(shares))


def kid(
    a: Rows, b: Rows, *, subsets: int = KID_SUBSETS, subset_size: int = KID_SUBSET_SIZE
) -> Kid:
    """KID, of Binkowski et al. (2018): the unbiased MMD of subsets under a cubic kernel.

    The subsets follow from the order of the rows alone; they have no more rows than there are.
    """
    size = min(subset_size, a.shape[0], b.shape[0])
    if size < 2:  # noqa: PLR2004
        raise SetupError("KID needs at least two images on each side")
    # This generator and this order draw the subsets of torch-fidelity.
    random = np.random.RandomState(_KID_SEED)
    are_whole = a.shape[0] == b.shape[0] == size
    subsets = 1 if are_whole else subsets
    found = []
    shares = np.zeros(a.shape[0])
    for _ in range(subsets):
        numbers = random.choice(a.shape[0], size, replace=False)
        one = a[numbers].astype(np.float64)
        other = b[random.choice(b.shape[0], size, replace=False)].astype(np.float64)
        within = _without_itself(_cubic(one, one))
        across = _cubic(one, other).mean(axis=1)
        within_other = _without_itself(_cubic(other, other)).mean()
        found.append(float(within.mean() + within_other - 2 * across.mean()))
        apart = within - across
        shares[numbers] += 2 * (apart - apart.mean()) / (size * subsets)
    std = None if are_whole else float(np.std(found))
    return Kid(Estimate.of(float(np.mean(found)), shares), std, size)


def _without_itself(kernel: Doubles) -> Doubles:
    """The mean of each row but for the diagonal."""
    sums: Doubles = kernel.sum(axis=1) - np.diagonal(kernel)
    return sums / (len(kernel) - 1)


def _cubic(a: Doubles, b: Doubles) -> Doubles:
    kernel: Doubles = a @ b.T / a.shape[1] + 1
    return kernel * kernel * kernel  # a power takes ten times as long


def cmmd(a: Rows, b: Rows, *, within_b: float | None = None) -> Estimate:
    """CMMD: 1,000 times the squared MMD of CLIP's image features under a Gaussian kernel.

    *within_b* is the mean of `mean_kernels(b, b)`, where it is known already.
    """
    within_b = float(mean_kernels(b, b).mean()) if within_b is None else within_b
    within = mean_kernels(a, a)
    across = mean_kernels(a, b)
    value = _CMMD_SCALE * float(within.mean() + within_b - 2 * across.mean())
    return Estimate.of(
        max(0.0, value), _CMMD_SCALE * 2 * (within - across) / len(within)
    )


def mean_kernels(a: Rows, b: Rows) -> Doubles:
    """The mean of the Gaussian kernel of each of *a* with all of *b*, block by block."""
    totals = [np.zeros(len(each)) for each in blocks(a)]
    for first, one in enumerate(blocks(a)):
        rows = unit(one)
        for second, other in enumerate(blocks(b)):
            if a is b and second < first:
                continue  # the same as the pair the other way round
            # Of unit vectors, the squared distance is 2 - 2 cos.
            kernel = np.exp((rows @ unit(other).T - 1) / _CMMD_SIGMA**2)
            totals[first] += kernel.sum(axis=1)
            if a is b and second > first:
                totals[second] += kernel.sum(axis=0)
    return np.concatenate(totals) / b.shape[0]


def mean(values: Doubles) -> Estimate:
    """The mean of the images' scores, exact whatever their order."""
    return Estimate.of(math.fsum(values) / len(values), values / len(values))


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
