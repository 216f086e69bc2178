import contextlib
import hashlib
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefleet import errors
from imagefleet.files.kinds import LORA
from worker.files import library


def check(data: bytes, sha256: str | None = None) -> None:
    library.check_content(LORA, "style", io.BytesIO(data), len(data), sha256)


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def test_a_whole_file_passes_and_with_its_hash_too(lora_bytes):
    data = lora_bytes("a")
    check(data)
    check(data, hashlib.sha256(data).hexdigest())


def test_a_file_with_another_hash_is_retried(lora_bytes):
    """It or the manifest is about to be replaced, or it was damaged on its way."""
    wanted = hashlib.sha256(lora_bytes("a")).hexdigest()
    with pytest.raises(
        errors.TransientError, match=r"SHA-256 .* style\.safetensors is not the one"
    ):
        check(lora_bytes("b"), wanted)


def test_a_file_truncated_anywhere_is_retried(lora_bytes):
    data = lora_bytes("a")
    for size in range(len(data)):
        with pytest.raises(
            errors.TransientError, match=r"style\.safetensors is truncated"
        ):
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
def test_what_is_not_a_safetensors_file_is_refused_by_name(data: bytes):
    with pytest.raises(
        errors.UnusableFileError, match=r"style\.safetensors is not a safetensors"
    ):
        check(data)


@given(st.binary() | st.binary().map(with_header))
def test_no_bytes_raise_anything_but_a_refusal(data: bytes):
    for sha256 in (None, "0" * 64):
        with contextlib.suppress(errors.TransientError, errors.UnusableFileError):
            check(data, sha256)
