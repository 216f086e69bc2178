"""Statistics that are none of a distribution are refused, with the reason."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.score.statistics import Statistics
from imagefleet import errors


def test_one_image_has_no_covariance():
    with pytest.raises(errors.SetupError, match="at least two images"):
        _ = Statistics(1, np.zeros(2), np.zeros((2, 2))).covariance


@pytest.mark.parametrize(
    "arrays",
    [
        {"mu": np.zeros((2, 2)), "sigma": np.zeros((2, 2))},
        {"mu": np.zeros(2), "sigma": np.zeros((3, 3))},
        {"mu": np.full(2, np.nan), "sigma": np.zeros((2, 2))},
    ],
)
def test_statistics_of_no_distribution_are_refused(arrays: dict[str, Any], tmp_path):
    path: Path = tmp_path / "reference.npz"
    np.savez(path, **arrays)

    with pytest.raises(errors.SetupError, match="a vector of finite numbers"):
        Statistics.read(path)
