import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker.files import manifest
from worker.files.manifest import FileHashes

WEIGHTS = bytes(range(256)) * 8


def safetensors_file(path: Path, **metadata: str) -> Path:
    header = json.dumps(
        {
            "__metadata__": metadata,
            "a": {
                "dtype": "U8",
                "shape": [len(WEIGHTS)],
                "data_offsets": [0, len(WEIGHTS)],
            },
        }
    ).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + WEIGHTS)
    return path


@pytest.fixture
def files() -> Iterator[FileHashes]:
    made = FileHashes()
    yield made
    made.close()


def test_a_lora_that_names_its_hash_is_not_read(
    files: FileHashes, tmp_path, monkeypatch
):
    path = safetensors_file(
        tmp_path / "a.safetensors", sshs_model_hash="ab" * 32, other="x"
    )
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert files.of_lora(path).result() == "ab" * 6


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"ss_output_name": "night"},
        {"sshs_model_hash": 'x", "Version: "evil'},
        {"sshs_model_hash": "ab"},
        {"note": '"sshs_model_hash": "' + "ab" * 32 + '"'},
    ],
)
def test_a_loras_hash_is_that_of_its_weights_unless_its_header_names_one(
    files: FileHashes, tmp_path, metadata: dict[str, str]
):
    path = safetensors_file(tmp_path / "a.safetensors", **metadata)
    assert files.of_lora(path).result() == hashlib.sha256(WEIGHTS).hexdigest()[:12]


def test_a_file_is_hashed_once_until_it_changes(
    files: FileHashes, tmp_path, monkeypatch
):
    read = []
    original = manifest.hash_lora
    monkeypatch.setattr(
        manifest, "hash_lora", lambda path: read.append(path) or original(path)
    )
    path = safetensors_file(tmp_path / "a.safetensors")
    first = files.of_lora(path).result()
    assert files.of_lora(path).result() == first
    assert read == [path]
    path.write_bytes(path.read_bytes() + b"more")
    assert files.of_lora(path).result() != first


def test_a_checkpoints_hash_is_that_of_its_whole_file(files: FileHashes, tmp_path):
    path = safetensors_file(tmp_path / "m.safetensors")
    expected = hashlib.sha256(path.read_bytes()).hexdigest()[:10]
    assert files.of_model(path).result() == expected


def test_a_folder_has_no_hash_and_a_known_one_is_not_computed(
    files: FileHashes, tmp_path
):
    assert files.of_model(tmp_path).result() is None
    assert files.of_model(tmp_path / "missing").result() is None
    path = safetensors_file(tmp_path / "m.safetensors")
    assert files.of_model(path, "AB" * 32).result() == "ab" * 5


def test_a_file_that_cannot_be_read_leaves_the_hash_out_and_says_so(
    files: FileHashes, tmp_path, caplog
):
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\xff" * 64)
    with caplog.at_level(logging.WARNING):
        assert files.of_lora(broken).result() is None
        assert files.of_lora(tmp_path / "gone.safetensors").result() is None
    assert "the hash of broken.safetensors is left out of its images" in caplog.text
    assert "gone.safetensors" in caplog.text
