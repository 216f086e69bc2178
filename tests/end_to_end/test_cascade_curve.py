"""The curve of a cascade by the commands that make it: a sweep in two stages, drawn and scored."""

import json
import os
from pathlib import Path

import pytest

import forks
from pixel import tiny_cascade

pytestmark = pytest.mark.slow

CAPTIONS = ("a red house", "two blue stars", "a green tree")

STAGES = [{"model": "sr", "steps": 4, "cfg_scale": 1.5, "denoising_strength": 0.25}]


def test_both_stages_of_a_sweep_are_drawn_and_the_second_is_scored(
    tmp_path: Path, worker_forks: forks.Forks
) -> None:
    folders = [tiny_cascade.build(tmp_path / name, name) for name in ("base", "sr")]
    (tmp_path / "captions.txt").write_text("\n".join(CAPTIONS))
    models = [word for folder in folders for word in ("--model", str(folder))]

    def run(*arguments: str) -> None:
        result = worker_forks.run(*arguments, cwd=tmp_path, variables=os.environ)
        assert result.returncode == 0, result.stderr

    fields = (
        "cfg_scale=1,6",
        "sampler_name=DDPM",
        "steps=5",
        f"then={json.dumps(STAGES)}",
    )
    swept = [word for field in fields for word in ("--set", field)]
    drawn_with = ("--models", "base", "--model", "base", "--model", "sr")
    run("sweep", "captions.txt", "--campaign", "cascade", *swept, *drawn_with)
    run("worker", *models, "--until-empty", "--device", "cpu")
    run("score", "cascade", "--extractor", "demo", "--json-file", "scores.json")

    images = {
        path.name for path in (tmp_path / "imagefleet-data/images/cascade").iterdir()
    }
    assert images == {
        f"cfg-{scale}_{number:06}{stage}.png"
        for scale in ("1.0", "6.0")
        for number in range(len(CAPTIONS))
        for stage in ("", "~s2")
    }
    groups = json.loads((tmp_path / "scores.json").read_text())["groups"]
    found = [(each["cfg_scale"], each["images"], each["left_out"]) for each in groups]
    assert found == [(1, 3, 0), (6, 3, 0)]
    assert all(each["fid"] > 0 and each["clip"] is not None for each in groups)
