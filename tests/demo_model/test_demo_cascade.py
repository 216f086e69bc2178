"""The demo's cascade: what it is made of, and that its second stage shows what captions say."""

import argparse

import pytest
import torch
from safetensors import safe_open

from demo_world import answers
from demo_world.cascade import measure, pictures
from evaluation.score.demo import judge
from imagefleet.files import demo

pytestmark = pytest.mark.slow

#: Of the scenes, which are none of those that docs/cascade.md counts.
SEED = 5

CAPTIONS = 10

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    # Two threads on a busy machine wait for each other: 5x slower.
    torch.set_num_threads(1)


def test_it_is_small_and_all_of_it_is_there():
    files = [path for path in demo.CASCADE.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 8_000_000
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert len(weights) == 4
    for path in weights:
        with safe_open(path, "pt") as file:
            tensors = [file.get_tensor(key) for key in file.keys()]  # noqa: SIM118
        assert {each.dtype for each in tensors} == {torch.float16}
        assert all(bool(each.isfinite().all()) for each in tensors)


def test_both_stages_show_the_things_of_captions_that_training_never_had():
    scenes, texts = zip(*pictures.held_out_scenes(CAPTIONS, SEED), strict=True)
    options = argparse.Namespace(
        sampler="ddpm", steps=30, sr_steps=20, guidance=3.0, sr_guidance=1.0, noise=0.05
    )
    small, large = measure.draw_cascade(demo.CASCADE, texts, "cpu", options)
    assert {image.shape for image in small} == {(16, 16, 3)}
    assert {image.shape for image in large} == {(64, 64, 3)}
    found = measure.judged(large, judge.load_judge())
    right = [answers.objects_right(*each) for each in zip(scenes, found, strict=True)]
    assert answers.share(right) >= 0.8
