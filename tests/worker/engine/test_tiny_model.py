from pathlib import Path
from typing import Any

import numpy as np

import tiny_model
from drawing import draw, make_request


def test_the_same_seed_builds_the_same_files(checkpoint: Path, tmp_path: Path) -> None:
    again = tiny_model.build_tiny_checkpoint(tmp_path / "again")
    other = tiny_model.build_tiny_checkpoint(tmp_path / "other", seed=1)
    for part in ("unet", "vae", "text_encoder"):
        (file,) = (checkpoint / part).glob("*.safetensors")
        inside = file.relative_to(checkpoint)
        assert (again / inside).read_bytes() == file.read_bytes()
        assert (other / inside).read_bytes() != file.read_bytes()


def test_its_images_are_colourful_and_distinct(engine: Any) -> None:
    images = draw(engine, *(make_request(seed=seed, steps=15) for seed in range(4)))
    for image in images:
        assert image.std() > 30
        saturation = image.max(axis=2).astype(int) - image.min(axis=2)
        assert saturation.mean() > 40
    assert np.abs(images[0].astype(int) - images[1]).mean() > 20
