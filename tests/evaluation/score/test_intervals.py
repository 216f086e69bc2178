"""Intervals of 95 % contain what other images of the same kind have, as often as they say."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from cli import console
from evaluation.score import metrics
from evaluation.score.figures import GroupScores
from evaluation.score.metrics import Estimate
from evaluation.score.statistics import Features, Statistics

pytestmark = pytest.mark.slow

DIMENSIONS = 12

#: Sets of images that are drawn; the share of intervals that contain the truth is within 5 %.
SETS = 120

Figure = Callable[[Features], Estimate]


def images(random: np.random.Generator, count: int, shift: float) -> Features:
    """Features of images, heavier in their tails than normal ones."""
    mixed = np.random.default_rng(0).normal(size=(DIMENSIONS, DIMENSIONS))
    return np.float32(random.standard_t(6, (count, DIMENSIONS)) @ mixed + shift)


@pytest.fixture(scope="module")
def reference() -> Features:
    return images(np.random.default_rng(1), 400, 0)


def figures(reference: Features) -> dict[str, Figure]:
    statistics = Statistics.of(reference)
    root = metrics.square_root(statistics)
    return {
        "fid": lambda rows: metrics.fid(rows, statistics, root),
        "kid": lambda rows: (
            metrics.kid(rows, reference, subsets=4, subset_size=100).estimate
        ),
        "cmmd": lambda rows: metrics.cmmd(rows, reference),
        "clip": lambda rows: metrics.mean(rows[:, 0].astype(np.float64)),
    }


def share_with_the_usual(found: list[Estimate]) -> float:
    """The share of the intervals that hold the mean figure."""
    usual = np.mean([each.value for each in found])
    held = [each.interval[0] <= usual <= each.interval[1] for each in found]
    return float(np.mean(held))


@pytest.mark.parametrize("shift", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("name", ["fid", "kid", "cmmd", "clip"])
def test_an_interval_has_the_figure_of_other_images_in_95_of_100(
    reference: Features, name: str, shift: float
):
    random = np.random.default_rng(2)
    found = [figures(reference)[name](images(random, 250, shift)) for _ in range(SETS)]
    assert share_with_the_usual(found) > 0.89
    widths = np.array([each.interval[1] - each.interval[0] for each in found])
    spread = np.std([each.value for each in found])
    assert np.median(widths) / (2 * 1.96) < 1.6 * spread, "nor is it wider than need be"


def test_of_heavy_tails_the_interval_of_fid_is_too_narrow_as_the_document_says():
    random = np.random.default_rng(3)
    statistics = Statistics.of(np.float32(random.normal(0.2, 1.3, (20_000, 8))))
    root = metrics.square_root(statistics)
    found = []
    for _ in range(3 * SETS):
        rows = np.float32(random.standard_t(3, (500, 8)))
        found.append(metrics.fid(rows, statistics, root))
    assert 0.4 < share_with_the_usual(found) < 0.9


def test_the_interval_of_a_mean_is_that_of_scipys_bootstrap():
    scores = np.random.default_rng(3).gamma(2.0, 10.0, 500)
    theirs = stats.bootstrap(
        (scores,), np.mean, rng=np.random.default_rng(4)
    ).confidence_interval
    ours = metrics.mean(scores)
    assert ours.value == pytest.approx(scores.mean())
    assert ours.interval == pytest.approx(tuple(theirs), rel=0.01)


def test_fid_and_its_interval_are_there_for_fewer_images_than_features(
    reference: Features,
):
    rows = images(np.random.default_rng(5), 6, 0)
    statistics = Statistics.of(reference)
    found = metrics.fid(rows, statistics, metrics.square_root(statistics))
    expected = metrics.frechet_distance(Statistics.of(rows), statistics)
    assert found.value == pytest.approx(expected, rel=1e-6)
    assert found.interval[0] < found.value < found.interval[1]


def test_subsets_that_are_the_whole_sets_have_no_standard_deviation(
    reference: Features,
):
    rows = images(np.random.default_rng(6), 400, 0)
    whole = metrics.kid(rows, reference)
    assert (whole.std, whole.subset_size) == (None, 400)
    assert metrics.kid(rows[:200], reference, subsets=3).std is not None


def test_no_figure_is_a_negative_zero():
    tiny = GroupScores(group="a", images=2, kid=-1e-9, kid_interval=(-2e-9, 1e-9))
    assert tiny.shown("kid") == "0.00000 ±0.00000"
    assert tiny.shown("fid") == "-"
    assert console.number(-0.0001, 3) == "0.000"
