"""How senders write a job's message down: base64, byte order marks, NULs, any script."""

import base64
import json
import re
from collections.abc import Callable

import pytest

from imagefleet import errors
from imagefleet.job import sizes
from imagefleet.job.message import read_job, text_for_image
from imagefleet.storage import protocol
from imagefleet.validation import JSONDict
from messages import read


def refusal(body: str) -> str:
    """Why a message is not a valid job."""
    with pytest.raises(errors.InvalidMessageError) as refused:
        read_job(body, "message-1")
    return refused.value.message


@pytest.mark.parametrize(
    "written",
    [
        lambda text: "\ufeff" + text,
        lambda text: "\n\ufeff " + text,
        lambda text: base64.encodebytes(text.encode()).decode(),
        lambda text: base64.encodebytes(text.encode()).decode().replace("\n", "\r\n"),
        lambda text: base64.urlsafe_b64encode(text.encode()).decode(),
        lambda text: base64.b64encode(text.encode()).decode().rstrip("="),
        lambda text: base64.urlsafe_b64encode(text.encode()).decode().rstrip("="),
        lambda text: base64.b64encode(text.encode("utf-8-sig")).decode(),
        lambda text: "\ufeff" + base64.b64encode(text.encode()).decode(),
    ],
)
@pytest.mark.parametrize(
    "prompt", ["a fox " * 20, "a fox?", "a fox??", "?>?>", "\u00ff\U0001f98a"]
)
def test_a_message_is_read_however_its_sender_writes_base64_and_a_byte_order_mark(
    written: Callable[[str], str], prompt: str
):
    body = written(json.dumps({"prompt": prompt, "id": "j"}, ensure_ascii=False))

    assert read_job(body, "m").prompt == prompt
    assert json.loads(text_for_image(body, read_job(body, "m")))["prompt"] == prompt


@pytest.mark.parametrize(
    "body",
    [
        "a fox",
        "e30",
        "bm90IEpTT04=",
        "YSBmb3g",
        "\ufeff",
        "{'prompt': 'a'}",
        "eyJwcm9t",
    ],
)
def test_what_is_neither_json_nor_its_base64_is_no_job_and_says_why(body: str):
    assert re.match(
        "the message is not JSON: .|prompt: is required", refusal(body) or ""
    )


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_a_nul_which_no_images_text_can_hold_is_refused(field: str):
    with pytest.raises(
        errors.InvalidMessageError, match=rf"{field}: .*U\+0000.*: remove it"
    ):
        read(**{field: "a\0b"})


@pytest.mark.parametrize("letter", ["a", "\u0436", "\u4e00", "\U0001f98a", "\x7f"])
def test_metadata_of_any_script_has_its_bytes_in_utf_8_and_a_header_that_fits(
    letter: str,
):
    most = (sizes.MAX_METADATA_BYTES - len('{"a": ""}')) // len(letter.encode())
    metadata = read(metadata={"a": letter * most}).metadata
    header = sizes.metadata_header(metadata)

    protocol.check_metadata({"metadata": header})
    assert sizes.read_metadata_header(header) == metadata
    assert len(header) <= 4 / 3 * sizes.MAX_METADATA_BYTES + 4
    with pytest.raises(errors.InvalidMessageError, match=r"metadata: is 4,\d+ bytes"):
        read(metadata={"a": letter * (most + 1)})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "<lora:a:1>" * 17}, "prompt: the prompt has 17 LoRAs; at most 16"),
        ({"prompt": "a" * 33_000, "output": {"format": "jpeg"}}, "too long for a JPEG"),
        (
            {"enable_hr": True, "steps": 50, "denoising_strength": 0.01},
            "denoising_strength 0.01 is too small for a second pass of 50 steps",
        ),
        (
            {
                "alwayson_scripts": {
                    "controlnet": {"args": [{"image": "a.png", "model": "m"}] * 4}
                }
            },
            "alwayson_scripts: the job has 4 ControlNets; at most 3",
        ),
    ],
)
def test_what_no_worker_draws_is_refused_before_any_has_it(
    fields: JSONDict, reason: str
):
    assert re.search(reason, refusal(json.dumps({"prompt": "a", **fields})))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "word " * 2400},
        {"prompt": "a BREAK " * 31 + "b"},
        {"prompt": "my.style-2 " * 2400},
        {"prompt": "e\u0301" * 3000},
        {"prompt": "&amp;" * 3000},
        {"prompt": "<lora:a:1>" * 16},
        {"prompt": "a" * 32_000, "output": {"format": "jpeg"}},
        {"prompt": "a" * 33_000, "output": {"format": "webp"}},
        {"enable_hr": True, "steps": 50, "denoising_strength": 0.05},
    ],
)
def test_what_a_worker_may_draw_is_read(fields: JSONDict):
    read(**fields)
