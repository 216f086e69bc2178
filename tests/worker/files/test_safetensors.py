from __future__ import annotations

import contextlib
import hashlib
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefleet import errors
from worker.files import loras

LoraBytes = Any  # the fixture of conftest.py


def check(data: bytes, sha256: str | None = None) -> None:
    loras.check_content("style", io.BytesIO(data), len(data), sha256)


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def test_a_whole_file_passes_and_with_its_hash_too(lora_bytes: LoraBytes) -> None:
    data = lora_bytes("a")
    check(data)
    check(data, hashlib.sha256(data).hexdigest())


def test_a_file_with_another_hash_is_retried(lora_bytes: LoraBytes) -> None:
    """It or the manifest is about to be replaced, or it was damaged on its way."""
    wanted = hashlib.sha256(lora_bytes("a")).hexdigest()
    with pytest.raises(
        errors.TransientError, match=r"SHA-256 .* style\.safetensors is not the one"
    ):
        check(lora_bytes("b"), wanted)


def test_a_file_truncated_anywhere_is_retried(lora_bytes: LoraBytes) -> None:
    data = lora_bytes("a")
    for size in range(len(data)):
        with pytest.raises(errors.TransientError, match=r"style\.safetensors is truncated"):
            check(data[:size])


@pytest.mark.parametrize(
    "data",
    [
        b"a LoRA, as far as a text file can be one",
        b"PK\x03\x04 a pickle of torch in a zip file",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        b"<html>not found</html>" * 9,
        b"\xff" * 8 + b"{}",
        (200_000_000).to_bytes(8, "little") + b"{",
        with_header(b"not json"),
        with_header(b"[]"),
        with_header(b"{"),
        with_header(b'{"a": 1}'),
        with_header(b'{"a": {}}'),
        with_header(b'{"a": {"data_offsets": [0]}}'),
        with_header(b'{"a": {"data_offsets": [0, "9"]}}'),
        with_header(b'{"a": {"data_offsets": [0, 1e999]}}'),
        with_header(b'{"a": {"data_offsets": [0, null]}}'),
        with_header(b'{"a": ' + b"[" * 100_000),
        with_header(b'{"a": {"data_offsets": [0, ' + b"9" * 5000 + b"]}}"),
        with_header(b"\xff\xfe"),
    ],
)
def test_what_is_not_a_safetensors_file_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(errors.UnusableFileError, match=r"style\.safetensors is not a safetensors"):
        check(data)


@given(st.binary() | st.binary().map(with_header))
def test_no_bytes_raise_anything_but_a_refusal(data: bytes) -> None:
    for sha256 in (None, "0" * 64):
        with contextlib.suppress(errors.TransientError, errors.UnusableFileError):
            check(data, sha256)


class Source:
    """A manifest that can be replaced; counts how often it is read."""

    def __init__(self, content: bytes | None) -> None:
        self.content = content
        self.reads = 0

    async def read(self) -> bytes | None:
        self.reads += 1
        return self.content


def manifest(source: Source) -> loras.Manifest:
    return loras.Manifest("loras/manifest.json in the storage", source.read)


async def test_a_manifest_gives_hashes_by_name_in_any_case() -> None:
    source = Source(json.dumps({"a": "ABC", "b": "def"}).encode())
    hashes = manifest(source)
    assert [await hashes.sha256(name) for name in ("a", "b", "c")] == ["abc", "def", None]
    assert source.reads == 1


async def test_without_a_manifest_any_file_will_do() -> None:
    source = Source(None)
    hashes = manifest(source)
    assert await hashes.sha256("a") is None
    assert await hashes.sha256("a") is None
    assert source.reads == 1, "that there is none is remembered as well"


async def test_a_manifest_is_read_again_after_a_while_and_when_told_to_forget_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source(b'{"a": "1"}')
    hashes = manifest(source)
    assert await hashes.sha256("a") == "1"
    source.content = b'{"a": "2"}'
    assert await hashes.sha256("a") == "1"
    hashes.forget()
    assert await hashes.sha256("a") == "2"
    source.content = None
    monkeypatch.setattr(loras, "MANIFEST_SECONDS", -1.0)
    assert await hashes.sha256("a") is None


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"a": 1}', b'"a"', b"\xff", b"[" * 100_000])
async def test_an_invalid_manifest_stops_the_lookup_instead_of_trusting_any_file(
    content: bytes,
) -> None:
    source = Source(content)
    hashes = manifest(source)
    for _ in range(2):
        with pytest.raises(errors.TransientError, match=r"manifest\.json in the storage is not"):
            await hashes.sha256("a")
    source.content = b'{"a": "1"}'
    assert await hashes.sha256("a") == "1"
