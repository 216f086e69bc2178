"""Images as workers store them, with their jobs in them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from imagefleet.job.message import Output, read_job
from worker.engine.contract import Pixels
from worker.stages import encode

Encode = Callable[..., bytes]


def shapes(seed: int) -> Pixels:
    """A picture of large shapes."""
    cells = np.random.default_rng(seed).integers(10, 246, (8, 8, 3), np.uint8)
    return cells.repeat(8, 0).repeat(8, 1)


@pytest.fixture
def encoded() -> Encode:
    """The file of a job's image."""

    def encode_one(key: str, pixels: Pixels | None = None, **fields: Any) -> bytes:
        fields = {"id": key, "prompt": f"a {key}", "seed": len(key), **fields}
        job = read_job(json.dumps(fields), key)
        drawn = shapes(job.seed) if pixels is None else pixels
        return encode.encode(drawn, Output(), "Steps: 20", job.to_message()).data

    return encode_one


@pytest.fixture
def folders(tmp_path, encoded: Encode) -> tuple[Path, Path]:
    """Two folders with the same four images, and the same jobs in them."""
    for name in "ab":
        (tmp_path / name).mkdir()
        for key in ("cat", "house", "flower", "umbrella"):
            (tmp_path / name / f"{key}.png").write_bytes(encoded(key))
    return tmp_path / "a", tmp_path / "b"
