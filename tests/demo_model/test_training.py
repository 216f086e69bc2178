"""The programs that made the demo's models still run, for a step on a CPU."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from demo_world import make_tokenizer
from demo_world.cascade import measure, train
from demo_world.klein import measure as measure_klein
from demo_world.klein import train as train_klein

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_cascade_is_trained_and_goes_on_from_its_state(tmp_path, capsys):
    torch.set_num_threads(1)
    state = tmp_path / "state.pt"
    small = ["--out", str(tmp_path), "--state", str(state), "--processes", "0"]
    small += ["--pictures", "6", "--base-batch", "2", "--sr-batch", "2"]
    small += ["--base-seconds", "600", "--sr-seconds", "600"]

    train.main([*small, "--base-steps", "1", "--sr-steps", "1"])
    train.main([*small, "--base-steps", "2", "--sr-steps", "1"])

    found = torch.load(state, weights_only=True)
    assert {name: stage["step"] for name, stage in found.items()} == {
        "base": 2,
        "sr": 1,
    }
    steps = ["--captions", "3", "--steps", "2", "--sr-steps", "2"]
    measure.main(["--model", str(tmp_path), *steps, "--device", "cpu"])
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1])["captions"] == 3


@pytest.mark.slow
def test_the_klein_is_trained_and_goes_on_from_its_state(tmp_path, capsys):
    torch.set_num_threads(1)
    state = tmp_path / "state"
    model = tmp_path / "model"
    small = ["--toy", "--out", str(model), "--state", str(state), "--processes", "0"]

    train_klein.main([*small, "--steps", "1"])
    train_klein.main([*small, "--steps", "2"])

    for stage in train_klein.STAGES:
        found = torch.load(state / f"{stage}.pt", weights_only=True)
        assert found["step"] == 2, stage
    for lora in ("outline-style", "outline-style-lokr"):
        path = str(model / "loras" / f"{lora}.safetensors")
        drawn = ["--model", str(model), "--captions", "2", "--lora", path]
        measure_klein.main([*drawn, "--steps", "1"])
        printed = capsys.readouterr().out
        assert json.loads(printed.splitlines()[-1])["captions"] == 2


def test_the_tokenizer_is_made_of_its_vocabulary(tmp_path):
    made = ROOT / "imagefleet" / "job" / "clip_tokenizer"
    vocabulary = tmp_path / "vocabulary.txt.gz"
    vocabulary.write_bytes(gzip.compress((made / "merges.txt").read_bytes()))

    make_tokenizer.write_tokenizer(vocabulary, tmp_path / "tokenizer")

    for path in (tmp_path / "tokenizer").iterdir():
        assert path.read_bytes() == (made / path.name).read_bytes(), path.name
