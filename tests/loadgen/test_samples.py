import json
from collections.abc import Sequence

import pytest

import signers
from imagefleet.job.message import read_job
from imagefleet.job.sizes import MAX_MESSAGE_BYTES
from imagefleet.signing import SigningKey
from loadgen.campaigns import Sample
from loadgen.settings import LoadSettings

BODIES = [
    json.dumps({"prompt": f"a cat {number}", "id": f"j{number}"})
    for number in range(4000)
]


def chosen(share: float, key: str = "k", bodies: Sequence[str] = BODIES) -> list[str]:
    sample = Sample(share, key)
    return [body for body in bodies if sample.second_drawing(body)]


def test_the_sample_has_its_share_and_is_the_same_each_time_for_its_key_alone():
    assert 150 < len(chosen(0.05)) < 250
    assert chosen(0.05) == chosen(0.05)
    assert set(chosen(0.05)) & set(chosen(0.05, "other")) != set(chosen(0.05))
    assert (chosen(0), chosen(1)) == ([], BODIES)


def test_a_second_drawing_is_the_same_job_stored_apart():
    body = '{"prompt":"ein Hündchen","id":"a","campaign":"c","batch_size":4}'
    message = Sample(1, "k").second_drawing(body)

    assert message is not None
    first = read_job(body, "")
    second = read_job(message, "")
    assert second.model_copy(update={"verify": False}) == first
    assert (first.images_to_draw, second.images_to_draw) == (4, 1)
    assert (first.blob_name(0), second.blob_name(0)) == ("c/a.png", "-checks/c/a.png")
    assert Sample(1, "k").second_drawing(message) is None


def test_a_second_drawing_of_a_job_in_stages_is_of_the_first():
    body = '{"prompt":"a","id":"a","then":[{"steps":12}]}'
    message = Sample(1, "k").second_drawing(body)
    assert message is not None
    second = read_job(message, "")
    assert (second.verify, second.then, second.stages) == (True, (), 1)


def test_a_second_drawing_is_signed_where_jobs_are(tmp_path):
    key = SigningKey.create(tmp_path / "key.pem")
    signer = signers.signer(key)
    signed = read_job('{"prompt": "a cat", "id": "a"}', "").to_message(signer)

    message = Sample(1, "k", signer).second_drawing(signed)

    assert message is not None
    assert read_job(message, "", signers.trusted(key)).verify
    assert Sample(1, "k").second_drawing(signed) is None, "nobody could sign it"


def test_jobs_of_few_steps_are_not_compared():
    assert chosen(
        1, bodies=['{"prompt":"a","steps":4}', '{"prompt":"a","steps":15}']
    ) == ['{"prompt":"a","steps":15}']


def test_a_job_that_fills_its_message_is_drawn_once():
    body = json.dumps({"prompt": "", "negative_prompt": "b" * (MAX_MESSAGE_BYTES - 40)})
    assert Sample(1, "k").second_drawing(body) is None


def test_a_share_is_the_default_where_workers_are_strangers():
    azure = "https://acme.blob.core.windows.net"
    assert LoadSettings(storage="local:x").second_drawings == 0
    assert LoadSettings(storage=azure).second_drawings == 0.005
    assert LoadSettings(storage=azure, verify_share=0).second_drawings == 0
    with pytest.raises(ValueError, match="verify_share"):
        LoadSettings(verify_share=1.5)
