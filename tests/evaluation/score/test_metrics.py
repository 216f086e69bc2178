"""The metrics are those of torch-fidelity and of the papers, however the features are cut."""

import importlib
import importlib.util
import sys
import types

import numpy as np
import pytest
import torch
from PIL import Image

from evaluation.score import chunks, metrics
from evaluation.score.plan import Chunk
from evaluation.score.preparation import Preparation
from evaluation.score.statistics import Statistics
from imagefleet import errors

pytestmark = pytest.mark.slow

#: Of the fixed random network.
DIMENSIONS = 48

PREPARATION = Preparation(32, (128.0,) * 3, (128.0,) * 3)


@pytest.fixture(scope="module")
def torch_fidelity() -> types.SimpleNamespace:
    """The real FID and KID of torch-fidelity, which use nothing of torchvision."""
    assert importlib.util.find_spec("torch_fidelity"), (
        "`make test` installs torch-fidelity"
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("", ".datasets", ".transforms", ".transforms.functional"):
            module = types.ModuleType(f"torchvision{name}")
            module.CIFAR10 = module.CIFAR100 = module.STL10 = object
            patch.setitem(sys.modules, module.__name__, module)
        sys.modules["torchvision.transforms"].functional = module  # type: ignore[attr-defined]
        return types.SimpleNamespace(
            fid=importlib.import_module("torch_fidelity.metric_fid"),
            kid=importlib.import_module("torch_fidelity.metric_kid"),
        )


def network() -> torch.nn.Module:
    """The same random convolutions each time."""
    generator = torch.Generator().manual_seed(1)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 5, 2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, DIMENSIONS, 3, 2),
    )
    for each in layers.parameters():
        each.data = torch.randn(each.shape, generator=generator) / 10
    return layers.eval()


def pictures(count: int, seed: int) -> list[Image.Image]:
    random = np.random.default_rng(seed)
    colours = random.integers(40 + 30 * seed, 256, (count, 4, 4, 3)).astype(np.uint8)
    return [
        Image.fromarray(each).resize((40, 40), Image.Resampling.BICUBIC)
        for each in colours
    ]


@pytest.fixture(scope="module")
def features() -> tuple[np.ndarray, np.ndarray]:
    """Features of two sets of pictures, 700 and 500."""
    extract = network()
    with torch.inference_mode():
        first, second = (
            extract(torch.from_numpy(PREPARATION.array(pictures(count, seed))))
            .mean((2, 3))
            .numpy()
            for count, seed in ((700, 1), (500, 2))
        )
    return first, second


def test_fid_is_that_of_torch_fidelity(torch_fidelity, features):
    theirs = torch_fidelity.fid.fid_statistics_to_metric(
        *(
            torch_fidelity.fid.fid_features_to_statistics(torch.from_numpy(each))
            for each in features
        ),
        verbose=False,
    )["frechet_inception_distance"]
    ours = metrics.frechet_distance(*map(Statistics.of, features))
    assert theirs > 0.01
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("subset_size", [100, 500])
def test_kid_is_that_of_torch_fidelity(torch_fidelity, features, subset_size: int):
    theirs = torch_fidelity.kid.kid_features_to_metric(
        *map(torch.from_numpy, features),
        kid_subsets=5,
        kid_subset_size=subset_size,
        kid_kernel="poly",
        verbose=False,
    )
    ours = metrics.kid(*features, subsets=5, subset_size=subset_size)
    assert theirs["kernel_inception_distance_mean"] > 0.0001
    assert ours.estimate.value == pytest.approx(
        theirs["kernel_inception_distance_mean"], rel=1e-4
    )
    assert ours.std == pytest.approx(
        theirs["kernel_inception_distance_std"], rel=1e-3, abs=1e-8
    )


def test_seven_stored_shards_in_any_order_give_the_figures_of_the_whole(
    features, tmp_path
):
    parts = np.array_split(features[0], 7)
    stored = [
        Chunk(tmp_path / f"{number}.jsonl", tmp_path / f"{number}")
        for number in range(7)
    ]
    for number in (6, 2, 0, 5, 1, 4, 3):
        note = chunks.Note(digest="", images=len(parts[number]))
        chunks.write(stored[number], note, {"features": parts[number]})
    rows = chunks.StoredRows(stored, "features", DIMENSIONS)
    kid, whole = (
        metrics.kid(each, features[1], subsets=2, subset_size=200)
        for each in (rows, features[0])
    )
    assert kid == whole
    assert metrics.cmmd(rows, features[1]) == metrics.cmmd(*features)
    fid = metrics.frechet_distance(*map(Statistics.of, (rows, features[1])))
    assert fid == metrics.frechet_distance(*map(Statistics.of, features))


def test_kid_of_few_images_says_how_few(features):
    assert metrics.kid(features[0], features[1][:60], subsets=2).subset_size == 60
    with pytest.raises(errors.SetupError, match="at least two images"):
        metrics.kid(features[0], features[1][:1])


def test_cmmd_is_that_of_its_paper(features):
    """As `cmmd/distance.py` of its authors has it, in google-research on GitHub."""
    x, y = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in features)
    x = x.astype(np.float64)
    y = y.astype(np.float64)
    x_squared = np.diag(x @ x.T)
    y_squared = np.diag(y @ y.T)
    gamma = 1 / (2 * 10**2)

    def mean_of(a: np.ndarray, b: np.ndarray, aa: np.ndarray, bb: np.ndarray) -> float:
        return float(
            np.mean(np.exp(-gamma * (-2 * a @ b.T + aa[:, None] + bb[None, :])))
        )

    theirs = 1000 * (
        mean_of(x, x, x_squared, x_squared)
        + mean_of(y, y, y_squared, y_squared)
        - 2 * mean_of(x, y, x_squared, y_squared)
    )
    assert theirs > 0.001
    assert metrics.cmmd(*features).value == pytest.approx(theirs, rel=1e-4)


def test_blocks_do_not_change_cmmd(features, monkeypatch):
    whole = metrics.cmmd(*features).value
    monkeypatch.setattr(metrics, "blocks", lambda rows: np.array_split(rows, 7))
    assert metrics.cmmd(*features).value == pytest.approx(whole, rel=1e-9)


def test_the_clip_score_is_100_cosines_and_never_below_zero():
    images = np.float32([[3, 4], [1, 0], [1, 0]])
    texts = np.float32([[6, 8], [0, 2], [-1, 0]])
    assert metrics.clip_score(images, texts).tolist() == pytest.approx([100, 0, 0])


def test_features_of_another_extractor_are_refused(features):
    with pytest.raises(errors.SetupError, match="same extractor"):
        metrics.frechet_distance(
            Statistics.of(features[0]), Statistics.of(features[1][:, :5])
        )
