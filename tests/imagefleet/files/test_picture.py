import base64
import io
import json
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from imagefleet.files import picture
from imagefleet.job import sizes
from imagefleet.job.message import Output, read_job, text_for_image
from worker.stages import encode

NOISE = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)


def file_of(body: str, form: str = "png", parameters: str = "a cat") -> bytes:
    text = text_for_image(body, read_job(body, "message-1"))
    return encode.encode(NOISE, Output(format=form), parameters, text).data  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
def test_a_job_is_found_in_its_image_as_it_was_sent(form: str):
    signed = {"prompt": "ein Hündchen 🐶", "id": "a", "metadata": {"by": "me"}}

    found = picture.message_in(
        file_of(json.dumps({**signed, "deliveries": {"known": 3}}), form)
    )

    assert found is not None
    assert json.loads(found) == signed | {
        "digest": read_job(json.dumps(signed), "m").digest
    }


def test_a_job_without_an_id_has_that_of_its_message_so_that_it_keeps_its_name_and_seed():
    body = base64.b64encode(b'{"prompt": "a cat"}').decode()
    found = picture.message_in(file_of(body))

    assert found is not None
    first = read_job(body, "message-1")
    again = read_job(found, "message-2")
    assert first == again
    assert again.blob_name(0) == "default/message-1.png"


@pytest.mark.parametrize("letter", ["a", "é", "漢", "🐶", "\\", '"'])
def test_the_largest_message_survives(letter: str):
    fields = {"prompt": letter * 65_536, "id": "a"}
    while not sizes.fits(json.dumps(fields, ensure_ascii=False)):
        fields["prompt"] = fields["prompt"][:-100]
    body = json.dumps(fields, ensure_ascii=False)

    found = picture.message_in(file_of(body))

    assert found is not None
    assert read_job(found, "m") == read_job(body, "m")


def test_a_jpeg_that_cannot_hold_both_goes_without_the_job():
    body = json.dumps({"prompt": "a" * 30_000, "id": "a"})
    assert picture.message_in(file_of(body, "jpeg", "a" * 30_000)) is None
    assert picture.message_in(file_of(body, "webp", "a" * 30_000)) is not None


def test_the_parameters_stay_the_first_text_of_a_png():
    data = file_of('{"prompt": "a cat", "id": "a"}')
    assert 0 < data.index(b"tEXtparameters\0") < data.index(b"tEXtimagefleet\0")


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_any_damage_means_no_job(noise: bytes):
    whole = file_of('{"prompt": "a cat", "id": "a"}')
    for data in (noise, whole[:8] + noise, whole[: len(noise)], b"\xff\xd8" + noise):
        assert picture.message_in(data) is None or data.startswith(whole[: len(noise)])


def chunk(kind: bytes, data: bytes, size: int | None = None) -> bytes:
    length = struct.pack(">I", len(data) if size is None else size)
    return length + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize(
    "chunks",
    [
        chunk(b"tEXt", b"imagefleet\0" + b" " * picture.MAX_MESSAGE_BYTES + b"{}"),
        chunk(b"tEXt", b"imagefleet\0[]"),
        chunk(b"tEXt", b"imagefleet\0" + b"[" * 100_000),
        chunk(b"tEXt", b'imagefleet\0{"prompt": "\\ud800"}', 2**32 - 1) + b" ",
        chunk(b"gAMA", b"") * 1000 + chunk(b"tEXt", b"imagefleet\0{}"),
        chunk(b"IDAT", b"") + chunk(b"tEXt", b"imagefleet\0{}"),
    ],
)
def test_a_hostile_png_has_no_job(chunks: bytes):
    assert picture.message_in(b"\x89PNG\r\n\x1a\n" + chunks) is None


def test_a_16_bit_grey_image_is_scaled_and_not_clipped_to_white():
    grey = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    file = io.BytesIO()
    Image.fromarray(grey).save(file, "PNG")

    decoded = picture.decode(file.getvalue())

    assert decoded is not None
    assert np.asarray(decoded)[..., 0].ravel().tolist() == list(range(256))
