"""The gate's figures against their definitions, over several batches."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from evaluation.gate import compare, pair, run, verdict
from evaluation.gate.compare import Measures
from evaluation.gate.images import FolderImages
from evaluation.gate.page import Result
from evaluation.gate.pair import Shift
from evaluation.score.extractors import ExtractorFacts
from evaluation.score.metrics import clip_score, frechet_distance, unit
from evaluation.score.preparation import Preparation
from evaluation.score.statistics import Features, Statistics

pytestmark = pytest.mark.slow

COUNT = 37  # two batches and a part


class Corners:
    """Features that are some of the image's pixels; those of a text are its length's."""

    facts = ExtractorFacts(
        "corners", "pixels", "0" * 64, 6, Preparation(8, (0,) * 3, (1,) * 3)
    )

    def features(self, images: Sequence[Image.Image]) -> Features:
        return np.stack(
            [np.asarray(each, np.float32)[0, :2].ravel() for each in images]
        )

    def text_features(self, texts: Sequence[str]) -> Features:
        return np.stack([np.arange(6, dtype=np.float32) + len(each) for each in texts])


def write(folder: Path, count: int, noise: int, seed: int = 1) -> FolderImages:
    folder.mkdir()
    for number in range(count):
        pixels = np.random.default_rng(number).integers(60, 190, (8, 8, 3))
        added = np.random.default_rng((seed, number)).integers(
            -noise, noise + 1, pixels.shape
        )
        Image.fromarray((pixels + added).astype(np.uint8)).save(
            folder / f"{number:03}.png"
        )
    return FolderImages(folder)


async def compared(
    a: FolderImages, b: FolderImages, measures: Measures
) -> compare.Comparison:
    names = {name.removesuffix(".png"): name for name in await a.names()}
    return await compare.compare(
        (a, b), sorted(names), (names, names), measures, lambda _: None
    )


async def rows(folder: FolderImages) -> Features:
    drawn = [Image.open(folder._path / name) for name in sorted(await folder.names())]
    return Corners().features(drawn)


async def test_features_fid_and_pixels_are_those_of_all_images_at_once(
    tmp_path,
):
    a = write(tmp_path / "a", COUNT, 0)
    b = write(tmp_path / "b", COUNT, 9)
    measures = Measures(Corners(), None, None)

    judged = verdict.judge(await compared(a, b, measures), measures, verdict.Bounds())

    all_a = await rows(a)
    all_b = await rows(b)
    one = unit(all_a)
    other = unit(all_b)
    within = np.mean([1 - one[i] @ one[j] for i, j in combinations(range(COUNT), 2)])
    assert judged.feature_distance == pytest.approx(
        np.mean(1 - (one * other).sum(1)) / within
    )
    statistics = Statistics.of
    assert judged.fid_between == pytest.approx(
        frechet_distance(statistics(all_b), statistics(all_a))
    )
    halves = [
        statistics(each) for each in (all_a[::2], all_a[1::2], all_b[::2], all_b[1::2])
    ]
    assert judged.fid_a == pytest.approx(frechet_distance(halves[0], halves[1]))
    assert judged.fid_b == pytest.approx(
        (
            frechet_distance(halves[2], halves[1])
            + frechet_distance(halves[3], halves[0])
        )
        / 2
    )
    pixels = [
        np.stack(
            [np.asarray(Image.open(each), float) for each in sorted(side.iterdir())]
        )
        for side in (tmp_path / "a", tmp_path / "b")
    ]
    squares = np.square(pixels[0] - pixels[1]).mean((1, 2, 3))
    assert judged.psnr == pytest.approx(10 * np.log10(255**2 / squares.mean()))
    assert judged.psnr_lowest == pytest.approx(10 * np.log10(255**2 / squares.max()))
    [check] = [each for each in judged.checks if each.name == "fid"]
    assert check.figure == pytest.approx(
        100 * abs(judged.fid_b / judged.fid_a - 1)  # type: ignore[operator]
    )


async def test_a_folder_is_a_reference_for_fid(tmp_path):
    a = write(tmp_path / "a", 9, 0)
    b = write(tmp_path / "b", 9, 9)
    other = write(tmp_path / "other", COUNT, 30, seed=2)
    reference = await run._statistics(other, Corners())
    measures = Measures(Corners(), None, reference)

    judged = verdict.judge(await compared(a, b, measures), measures, verdict.Bounds())

    exact = Statistics.of(await rows(other))
    assert judged.fid_a == pytest.approx(
        frechet_distance(Statistics.of(await rows(a)), exact)
    )
    assert judged.fid_b == pytest.approx(
        frechet_distance(Statistics.of(await rows(b)), exact)
    )


def test_the_clip_score_is_that_of_captions_without_loras():
    from evaluation.gate.images import Drawing
    from imagefleet.job.message import read_job

    job = read_job('{"prompt": "a red cat <lora:fox:0.5>", "id": "cat"}', "cat")
    pixels = np.random.default_rng(1).integers(0, 256, (8, 8, 3), np.uint8)
    with_job = Drawing(pixels, job, 1)
    without = Drawing(pixels // 2, None, None)
    found = compare.Comparison()

    compare._add_clip_scores(
        found, [(with_job, with_job), (without, without)], Corners()
    )

    texts = Corners().text_features(["a red cat"])
    expected = clip_score(Corners().features([Image.fromarray(pixels)]), texts).tolist()
    assert found.clip_scores == (expected, expected), (
        "a pair without a caption is left out"
    )


def test_what_all_pictures_have_in_common_is_measured():
    pixels = np.random.default_rng(1).integers(40, 200, (32, 32, 3)).astype(np.uint8)
    smooth = np.asarray(
        Image.fromarray(pixels).resize((96, 96), Image.Resampling.BICUBIC)
    )

    brighter = Shift.of(smooth, smooth + np.array([0, 5, 0], np.uint8))
    moved = Shift.of(smooth, np.roll(smooth, 1, axis=0))
    stretched = Shift.of(
        smooth, (120 + (smooth - 120.0) * 1.1).clip(0, 255).astype(np.uint8)
    )
    blurred = Shift.of(
        smooth, np.asarray(Image.fromarray(smooth).filter(ImageFilter.GaussianBlur(1)))
    )

    assert brighter.brightness_levels == pytest.approx(5)
    assert moved.displacement_pixels == pytest.approx(1, abs=0.15)
    assert stretched.contrast_percent == pytest.approx(10, abs=1)
    assert blurred.sharpness_percent < -15
    both = brighter + Shift.of(smooth, smooth - np.array([0, 5, 0], np.uint8))
    assert both.brightness_levels == pytest.approx(0), "chance differences cancel out"


@pytest.mark.parametrize("side", [1, 8, 64, 300, 700])
def test_pictures_of_any_size_have_a_similarity(side: int):
    drawn = (
        np.random.default_rng(1).integers(0, 256, (side, side + 3, 3)).astype(np.uint8)
    )

    assert pair.similarity(drawn, drawn) == pytest.approx((1, 1))
    assert Shift.of(drawn, drawn).displacement_pixels == pytest.approx(0)


async def test_with_three_pairs_it_is_said_that_fid_is_left_out(tmp_path):
    a = write(tmp_path / "a", 3, 0)
    b = write(tmp_path / "b", 3, 1)
    measures = Measures(Corners(), None, None)
    found = await compared(a, b, measures)

    result = Result(
        ("a", "b"),
        measures,
        found,
        verdict.judge(found, measures, verdict.Bounds()),
        (),
    )

    assert "FID (fewer than four pairs)" in result.left_out
