"""`imagefleet prompt` with textual inversion embeddings, of a folder and of a storage."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fleet import console
from imagefleet.files import demo

Imagefleet = Callable[..., "subprocess.CompletedProcess[str]"]  # the fixture of conftest.py


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Embeddings of eight vectors for SD1.x, of two for SDXL, and a pickle."""
    path = tmp_path / "embeddings"
    path.mkdir()
    save_file({"emb_params": np.zeros((8, 768), np.float32)}, path / "EasyNegative.safetensors")
    both = {"clip_l": np.zeros((2, 768)), "clip_g": np.zeros((2, 1280))}
    save_file(both, path / "xl-neg.safetensors")
    (path / "old.pt").write_bytes(b"\x80\x02")
    return path


def shown(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == console.EXIT_DONE, result.stderr
    return [line.strip() for line in result.stdout.splitlines()]


def test_embeddings_are_shown_with_the_tokens_that_they_take(
    in_process: Imagefleet, folder: Path
) -> None:
    arguments = ("prompt", "a castle", "--negative", "(easynegative:1.2), blurry, xl-neg art")
    lines = shown(in_process(*arguments, "--embedding-directory", str(folder)))

    assert lines[3:] == [
        "negative: 14 tokens in 1 chunk",
        "chunk 1, 14 tokens",
        "1.2    [EasyNegative]",
        "1      , blurry , [xl-neg] art",
        "embedding EasyNegative (SD 1.x): 8 tokens",
        "embedding xl-neg (SDXL): 2 tokens",
    ]
    words = json.loads(in_process(*arguments, "--json").stdout)
    assert words["negative"]["embeddings"] == [], "without a folder names are words"
    assert words["negative"]["tokens"] < 14


def test_those_of_the_storage_are_found_as_a_worker_finds_them(
    in_process: Imagefleet, folder: Path, tmp_path: Path
) -> None:
    storage = f"local:{tmp_path / 'fleet'}"
    file = str(folder / "EasyNegative.safetensors")
    assert in_process("files", "add", "embedding", file, "--storage", storage).returncode == 0

    result = in_process("prompt", "a EasyNegative", "--storage", storage, "--json")

    found: list[dict[str, Any]] = json.loads(result.stdout)["prompt"]["embeddings"]
    assert found == [
        {
            "name": "EasyNegative",
            "family": "SD 1.x",
            "tokens": 8,
            "chunk": 1,
            "at": 1,
            "unusable": None,
        }
    ]


@pytest.mark.parametrize(
    ("negative", "model", "reason"),
    [
        ("old, blurry", False, "old.pt, a pickle"),
        ("xl-neg", True, "'xl-neg' is for SDXL, and the model is one of SD 1.x"),
    ],
)
def test_an_embedding_that_would_fail_the_job_is_an_error(
    negative: str, reason: str, in_process: Imagefleet, folder: Path, *, model: bool
) -> None:
    of_model = ("--model", str(demo.find_checkpoint())) if model else ()
    result = in_process(
        *("prompt", "a", "--negative", negative, "--embedding-directory", str(folder), *of_model)
    )

    assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert f"negative: the embedding {negative.split(',', maxsplit=1)[0]!r}" in result.stderr
    assert reason in result.stderr


def test_a_name_that_is_written_as_an_embedding_and_is_none_is_reported(
    in_process: Imagefleet, folder: Path
) -> None:
    result = in_process(
        "prompt", "embedding:foo, embedding:EasyNegative", "--embedding-directory", str(folder)
    )

    assert "there is no embedding 'foo' here" in result.stderr
    assert "'EasyNegative'" not in result.stderr
    missing = in_process("prompt", "a", "--embedding-directory", str(folder / "none"))
    assert "cannot be read: it does not exist" in missing.stderr
