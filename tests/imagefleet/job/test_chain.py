"""Jobs with further stages: what a stage takes over, its name, its message and its signature."""

import base64
import json
from typing import Any

import pytest

import signers
from imagefleet import errors
from imagefleet.job import chain, sizes
from imagefleet.job.message import Job, is_signed, read_job
from imagefleet.signing import SigningKey
from imagefleet.storage.routing.models import model_of, models_of
from imagefleet.validation import JSONDict


def text(*stages: JSONDict, **fields: Any) -> str:
    return json.dumps({"prompt": "a house", "id": "0001", "then": stages} | fields)


def at(body: str, number: int, **place: Any) -> Job:
    return read_job(
        json.dumps(json.loads(body) | {"stage": {"number": number, **place}}), "m"
    )


def refused(body: str) -> str:
    with pytest.raises(errors.InvalidMessageError) as caught:
        read_job(body, "m")
    return caught.value.message


def test_a_stage_takes_over_what_it_does_not_give():
    body = text(
        {"model": "second", "steps": 30},
        {"prompt": "a palace", "seed": 7},
        model="first",
        negative_prompt="blurry",
        steps=12,
        cfg_scale=5,
        width=512,
        height=768,
        campaign="spring",
        output={"format": "webp"},
        metadata={"order": 3},
    )
    first = read_job(body, "m")
    second = at(body, 2)
    third = at(body, 3)
    assert (first.model, first.steps, first.stage, first.stages) == ("first", 12, 1, 3)
    assert (second.model, second.steps, second.stage, second.stages) == (
        "second",
        30,
        2,
        3,
    )
    assert (third.model, third.steps, third.prompt, third.seed) == (
        "second",
        30,
        "a palace",
        7,
    )
    assert first.seed == second.seed
    for each in (second, third):
        assert (each.id, each.campaign) == ("0001", "spring")
        assert (each.negative_prompt, each.cfg_scale) == ("blurry", 5)
        assert (each.width, each.height) == (512, 768)
        assert each.output == first.output
        assert each.metadata == {"order": 3}
    assert second.prompt == "a house"


def test_fields_of_one_image_are_a_stages_own():
    second_pass = {"enable_hr": True, "hr_scale": 2, "width": 512, "height": 512}
    body = text({"denoising_strength": 0.3}, {}, denoising_strength=0.6, **second_pass)
    first = read_job(body, "m")
    second = at(body, 2)
    third = at(body, 3)
    assert [each.denoising_strength for each in (first, second, third)] == [
        0.6,
        0.3,
        0.75,
    ]
    assert [each.enable_hr for each in (first, second, third)] == [True, False, False]
    assert first.init_images == ()
    assert second.init_images == ("images/default/0001.png",)
    assert third.init_images == ("images/default/0001~s2.png",)


def test_a_stage_with_another_sampler_does_not_take_over_the_options_of_the_first():
    body = text(
        {"sampler_name": "DDIM"},
        {},
        sampler_name="Euler",
        scheduler="Karras",
        s_churn=3,
    )
    assert at(body, 2).sampler == "ddim"
    assert (at(body, 2).scheduler, at(body, 2).s_churn) == (None, 0)
    assert at(body, 3).sampler == "ddim"


def test_a_stage_that_asks_for_a_random_seed_gets_one_of_its_own_the_same_each_time():
    body = text({"seed": -1}, {"seed": -1})
    seeds = [read_job(body, "m").seed, at(body, 2).seed, at(body, 3).seed]
    assert len(set(seeds)) == 3
    assert min(seeds) >= 0
    assert at(body, 2).seed == seeds[1]


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        ({"id": "b"}, "stage 2: id is the job's"),
        ({"campaign": "b"}, "stage 2: campaign is the job's"),
        ({"then": [{}]}, "stage 2: then is the job's"),
        ({"verify": True}, "stage 2: verify is the job's"),
        (
            {"init_images": ["x.png"]},
            "stage 2: init_images is the image of the stage before",
        ),
        ({"n_iter": 2}, "stage 2: n_iter should be 1"),
        ({"stepz": 3}, "stage 2: stepz: unknown key"),
        ({"steps": 3000}, "stage 2: steps"),
        ({"restore_faces": True}, "stage 2: restore_faces is not supported"),
        ({"prompt": "a <x:y>"}, "stage 2: prompt"),
    ],
)
def test_a_wrong_stage_is_refused_by_its_number(stage: JSONDict, reason: str):
    assert reason in refused(text(stage))


def test_a_chain_of_several_images_is_refused():
    assert "the job asks for 4 images" in refused(text({}, n_iter=2, batch_size=2))


def test_a_second_drawing_has_no_further_stages():
    assert "(verify) is of a job's first stage" in refused(text({}, verify=True))


def test_a_chain_has_at_most_nine_stages():
    assert read_job(text(*[{}] * 8), "m").stages == 9
    assert "then" in refused(text(*[{}] * 9))


@pytest.mark.parametrize(
    "place", [1, {"number": 1}, {"number": 4}, {"number": "x"}, {}, None]
)
def test_a_message_for_a_stage_that_the_job_lacks_is_refused(place: object):
    body = json.loads(text({}, {}))
    if place is None:
        assert read_job(json.dumps(body | {"stage": None}), "m").stage == 1
    else:
        assert "stage" in refused(json.dumps(body | {"stage": place}))


def test_a_stage_written_again_is_the_same_stage_of_the_same_job():
    body = text({"steps": 9}, {"model": "x"}, model="first")
    for number in (2, 3):
        job = at(body, number, message="first-message")
        again = read_job(job.to_message(), "another")
        assert again.model_dump() == job.model_dump()
        assert (again.stage, again.stages) == (number, 3)
        assert again.blob_name(0) == job.blob_name(0)
        assert job.source("m") == "first-message"
        assert again.source("another") == "another"


def test_a_worker_sends_the_next_stage_of_a_signed_job_without_the_key(
    tmp_path,
):
    key = SigningKey.create(tmp_path / "key.pem")
    trusted = signers.trusted(key)
    signer = signers.signer(key)
    body = Job(prompt="a house", id="a", then=({"steps": 5}, {"steps": 6})).to_message(
        signer
    )
    for number in (2, 3):
        fields = json.loads(body) | {"stage": {"number": number, "message": "m"}}
        assert read_job(json.dumps(fields), "m", trusted).steps == 3 + number
        fields["then"][0]["steps"] = 99
        with pytest.raises(errors.UntrustedJobError):
            read_job(json.dumps(fields), "m", trusted)
    stage = at(body, 2)
    assert is_signed(stage.to_message(signer))
    assert (
        read_job(stage.to_message(signer), "m", trusted).model_dump()
        == stage.model_dump()
    )


def test_the_first_message_leaves_room_for_those_of_later_stages():
    room = sizes.MAX_MESSAGE_BYTES - len(text({})) - 100
    with pytest.raises(errors.JobError, match="with further stages holds"):
        sizes.checked_messages([text({}, prompt="a" * room)])
    assert "takes more than" in refused(text({}, prompt="a" * room))
    alone = json.dumps({"prompt": "a" * room})
    assert sizes.checked_messages([alone]) == [alone]
    count = (room - 500) // 10
    prompt = "".join(sign * count for sign in ("é", "\\", "n", "&"))
    fields = json.loads(text({}, id=None, prompt=prompt))
    fits = json.dumps(fields, ensure_ascii=False)
    sizes.checked_messages([fits])
    assert sizes.message_bytes(fits) > sizes.MAX_MESSAGE_BYTES - 1200
    job = read_job(fits, "m" * 36)
    fields = json.loads(job.to_message()) | {
        chain.STAGE_FIELD: job.next_stage_field("m" * 36)
    }
    assert sizes.fits(json.dumps(fields, ensure_ascii=False, separators=(",", ":")))


def test_a_message_that_grows_when_it_is_sent_on_is_refused_before_anything_is_drawn():
    large = text({}, prompt="<" * 20_000)
    encoded = base64.b64encode(large.encode()).decode()
    assert sizes.checked_messages([encoded]) == [encoded]
    assert "the job with its stages takes more than 65,024 bytes" in refused(encoded)
    numbers = text({"comments": [1e15] * 10_000}).replace("1000000000000000.0", "1e15")
    assert sizes.checked_messages([numbers]) == [numbers]
    assert "takes more than" in refused(numbers)


def test_a_message_goes_to_the_queue_of_its_stages_model():
    body = text({"model": "b"}, {}, {"model": None}, model="a")
    fields = json.loads(body)
    found = [
        model_of(json.dumps(fields | {"stage": {"number": each}}))
        for each in range(1, 5)
    ]
    assert found == ["a", "b", "b", None]
    assert model_of(body) == "a"
    assert models_of(body) == {"a", "b"}
    for damaged in (
        {"stage": 3},
        {"stage": {"number": "x"}},
        {"then": 3},
        {"then": [3]},
    ):
        model_of(json.dumps({**fields, **damaged}))
        models_of(json.dumps({**fields, **damaged}))
