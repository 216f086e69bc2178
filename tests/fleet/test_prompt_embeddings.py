"""`imagefleet prompt` with textual inversion embeddings, of a folder and of a storage."""

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cli import console
from header_files import lora_of

Imagefleet = Callable[
    ..., "subprocess.CompletedProcess[str]"
]  # the fixture of conftest.py


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Embeddings of eight vectors for SD1.x, of two for SDXL, and a pickle."""
    path = tmp_path / "embeddings"
    path.mkdir()
    save_file(
        {"emb_params": np.zeros((8, 768), np.float32)},
        path / "EasyNegative.safetensors",
    )
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
    arguments = (
        "prompt",
        "a castle",
        "--negative",
        "(easynegative:1.2), blurry, xl-neg art",
    )
    lines = shown(in_process(*arguments, "--embedding-directory", str(folder)))

    assert lines[3:] == [
        "negative: 14 tokens in 1 chunk",
        "chunk 1, 14 tokens",
        "1.2    [EasyNegative]",
        "1      , blurry , [xl-neg] art",
        "embedding EasyNegative (SD 1.x): 8 tokens",
        "embedding xl-neg (SDXL): 2 tokens",
    ]
    (words,) = json.loads(in_process(*arguments, "--json").stdout)["negative"]["texts"]
    assert words["embeddings"] == [], "without a folder names are words"
    assert words["tokens"] < 14


def test_those_of_the_storage_are_found_as_a_worker_finds_them(
    in_process: Imagefleet, folder: Path, tmp_path: Path
) -> None:
    storage = f"local:{tmp_path / 'fleet'}"
    file = str(folder / "EasyNegative.safetensors")
    assert (
        in_process("files", "add", "embedding", file, "--storage", storage).returncode
        == 0
    )

    (tmp_path / "ink.safetensors").write_bytes(lora_of())
    assert in_process(
        "files", "add", "lora", "ink.safetensors", "--storage", storage
    ).stdout
    text = "a EasyNegative <lora:gone:1> <lora:ink:1>"
    result = in_process("prompt", text, "--storage", storage, "--json")

    read = json.loads(result.stdout)["prompt"]
    assert [lora["is_stored"] for lora in read["loras"]] == [False, True]
    assert (
        "on the text encoder: not in this storage"
        in in_process("prompt", text, "--storage", storage).stdout
    )
    found: list[dict[str, Any]] = read["texts"][0]["embeddings"]
    assert found == [
        {
            "name": "EasyNegative",
            "family": "SD 1.x",
            "length": 8,
            "sha256": hashlib.sha256(Path(file).read_bytes()).hexdigest(),
            "reason": None,
            "chunk": 1,
            "at": 1,
        }
    ]


def test_an_embedding_that_would_fail_the_job_is_an_error(
    in_process: Imagefleet, folder: Path
) -> None:
    result = in_process(
        *(
            "prompt",
            "a",
            "--negative",
            "old, blurry",
            "--embedding-directory",
            str(folder),
        )
    )

    assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert "negative: the embedding 'old'" in result.stderr
    assert "old.pt, a pickle" in result.stderr


def test_a_name_that_is_written_as_an_embedding_and_is_none_is_reported(
    in_process: Imagefleet, folder: Path
) -> None:
    result = in_process(
        "prompt",
        "embedding:foo, embedding:EasyNegative",
        "--embedding-directory",
        str(folder),
    )

    assert "there is no embedding 'foo' here" in result.stderr
    assert "'EasyNegative'" not in result.stderr
    missing = in_process("prompt", "a", "--embedding-directory", str(folder / "none"))
    assert "cannot be read: it does not exist" in missing.stderr
