"""Where a job's images may be: no path leads out of their folder, no text is taken for an image."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefleet import errors
from imagefleet.job import sizes
from imagefleet.job.message import Job, read_job
from imagefleet.job.passes import img2img
from imagefleet.storage import protocol

PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)


def read(source: object) -> Job:
    return read_job(json.dumps({"prompt": "a", "init_images": [source]}), "m")


@pytest.mark.parametrize(
    ("source", "container", "blob"),
    [
        ("cat.png", "files", "inputs/cat.png"),
        ("cats/a (1).v2.JPG", "files", "inputs/cats/a (1).v2.JPG"),
        ("images/spring/0001-3.webp", "images", "spring/0001-3.webp"),
    ],
)
def test_a_name_is_a_blob_of_its_container(source: str, container: str, blob: str):
    (given,) = read(source).init_images
    assert img2img.place(given) == img2img.Named(container, blob)  # type: ignore[arg-type]
    protocol.check_blob_name(blob)


@pytest.mark.parametrize(
    "prefix", ["", "data:image/png;base64,", "data:image/jpeg;base64,"]
)
def test_base64_is_an_image_within_the_message(prefix: str):
    (given,) = read(prefix + base64.b64encode(PNG).decode()).init_images
    assert img2img.place(given) is None
    assert img2img.content(given) == PNG


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("../secret.png", "should be a name"),
        ("a/../../secret.png", "should be a name"),
        ("/etc/passwd.png", "should be a name"),
        ("images/../jobs.png", "should be a name"),
        ("images/-records/spring.png", "should be a name"),
        ("images/.png", "should be a name"),
        ("a\\b.png", "should be a name"),
        ("a.png\x00", "should be a name"),
        ("a//b.png", "should be a name"),
        ("model.safetensors", "should be a name"),
        ("https://example.com/a.png", "is an address"),
        ("a" * 300 + ".png", "should be a name"),
        ("/".join("abcdefghi") + ".png", "should be a name"),
        ("", "is no PNG, JPEG or WebP"),
        ("cat", "is neither the base64"),
        ("aGVsbG8=", "is no PNG, JPEG or WebP"),
        (base64.b64encode(b"GIF89a" + bytes(9)).decode(), "is no PNG, JPEG or WebP"),
        (7, "should be a valid string"),
        (None, "should be a valid string"),
    ],
)
def test_anything_else_is_refused_by_name(source: object, reason: str):
    with pytest.raises(
        errors.InvalidMessageError, match=rf"^init_images\[0\]: .*{reason}"
    ):
        read(source)


@given(st.text())
def test_no_text_is_a_blob_outside_its_folder(text: str):
    try:
        (source,) = read(text).init_images
    except errors.InvalidMessageError:
        return
    if (place := img2img.place(source)) is not None:
        protocol.check_blob_name(place.blob)
        assert place.container == "images" or place.blob.startswith("inputs/")


def test_base64_beyond_a_message_says_what_to_do():
    data = base64.b64encode(PNG + bytes(60_000)).decode()
    with pytest.raises(errors.InvalidMessageError, match="store the image in inputs/"):
        read(data)


def test_base64_that_fits_alone_but_not_with_the_rest_is_refused_when_it_is_sent():
    data = base64.b64encode(PNG + bytes(49_080)).decode()
    body = read(data).to_message()
    with pytest.raises(errors.JobError, match="a queue message holds 65,536"):
        sizes.checked_messages([body])
