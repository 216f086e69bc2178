"""The baselines of measurements: plain diffusers, random models, the machine's limit."""

import dataclasses
from pathlib import Path

import pytest
import torch

from drawing import assert_alike, difference, draw, draw_alone, make_request
from evaluation.bench import baseline, machine
from families import lora_kinds
from imagefleet import errors
from worker.engine import contract

CPU = torch.device("cpu")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> baseline.PlainDiffusers:
    return baseline.PlainDiffusers(checkpoint, CPU, torch.float32)


@pytest.fixture(scope="module")
def loras(tmp_path_factory, checkpoint: Path) -> list[contract.Lora]:
    folder = tmp_path_factory.mktemp("random")
    names = lora_kinds.build(folder, checkpoint, 2, CPU, rank=4)
    return [
        contract.Lora(name, folder / f"{name}.safetensors", 0.7, 0.7) for name in names
    ]


def test_plain_diffusers_matches_the_engine(plain, engine, loras):
    requests = [make_request(seed=seed) for seed in (1, 2)]
    with_lora = [dataclasses.replace(request, loras=(loras[seed],))
                 for seed, request in enumerate(requests)]  # fmt: skip
    plain.use_loras(())
    both = plain.draw(requests)
    assert_alike(both, draw_alone(engine, requests))
    for request, without in zip(with_lora, both, strict=True):
        plain.use_loras(request.loras)
        (image,) = plain.draw([request])
        assert difference(image, draw(engine, request)[0]) <= 2
        assert difference(image, without) > 10
    plain.use_loras(())
    assert difference(plain.draw(requests[:1])[0], both[0]) <= 1


def test_a_sampler_without_a_scheduler_is_refused(plain):
    with pytest.raises(errors.SetupError, match="'ddim'"):
        plain.draw([make_request(sampler="ddim")])


def test_an_image_of_sd15_takes_26_64_tflop(tmp_path):
    flops = machine.count_image_flops(tmp_path / "no folder: SD1.5", 512, 512, 15)
    assert flops == pytest.approx(26.64e12, rel=1e-3)
