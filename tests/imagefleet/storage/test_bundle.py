"""Bundles: exactly the messages that they were made of, however many there are."""

import json
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from imagefleet.job import sizes
from imagefleet.job.message import Job, is_bundle, read_job
from imagefleet.signing import JobSigner, Scope, SigningKey, TrustedJobs, TrustedKeys
from imagefleet.storage import bundle
from imagefleet.storage.bundle import Sent

NAME = "0123456789abcdef" * 2


def job(number: int, **fields: object) -> Job:
    known = {"prompt": f"house {number}", "id": f"j{number}", "steps": 4}
    return Job.model_validate(known | fields)


def bundled(messages: list[str], most: int = 64) -> list[str]:
    return bundle.bundled([Sent(each) for each in messages], most, lambda _: NAME)


def expanded(bodies: list[str]) -> list[str]:
    return [message for body in bodies for message in bundle.messages_of(body)]


#: Jobs of every kind of difference: of type, of what is left out, nested, and of order.
ODD = [
    job(0),
    job(1, cfg_scale=1),
    job(2, defaults="a1111-1.10", steps=15),
    job(3, defaults="a1111-1.10", steps=15, sampler_name="Euler a", width=512),
    job(4, metadata={"a": 1, "b": [1, 2.0, None, "ä\ufffe"]}),
    job(5, metadata={"a": 1.0}),
    job(6, prompt='"quotes" \\ <lora:x:0.5> & 😀 \x7f'),
    job(7, cfg_scale=1e-05, seed=2**32 - 1),
    job(8, negative_prompt="", clip_skip=2, tiling=True),
]


def test_a_bundle_is_exactly_the_messages_of_its_jobs():
    messages = [each.to_message() for each in ODD]
    found = bundled(messages)
    assert len(found) == 1
    assert expanded(found) == messages


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(range(len(ODD))), min_size=1, max_size=80),
    st.integers(2, 64),
)
def test_any_jobs_are_in_the_queue_once_and_as_they_were(chosen: list[int], most: int):
    messages = [
        ODD[kind].model_copy(update={"id": f"n{number}"}).to_message()
        for number, kind in enumerate(chosen)
    ]
    assert sorted(expanded(bundled(messages, most))) == sorted(messages)


def test_shared_fields_are_written_once():
    messages = [
        job(number, negative_prompt="blurry", width=768, steps=1).to_message()
        for number in range(64)
    ]
    (text,) = bundled(messages)
    assert text.count("blurry") == text.count('"width":768') == 1
    assert len(text) < sum(map(len, messages)) / 1.35


def test_jobs_of_two_campaigns_models_or_formats_are_in_bundles_of_their_own():
    messages = [
        job(number, **fields).to_message()
        for number, fields in enumerate(
            [
                {"campaign": "a"},
                {"campaign": "b"},
                {"model": "m", "campaign": "a"},
                {"output": {"format": "webp"}, "campaign": "a"},
            ]
            * 2
        )
    ]
    found = bundled(messages)
    assert [len(bundle.messages_of(each)) for each in found] == [2, 2, 2, 2]
    assert sorted(expanded(found)) == sorted(messages)


@pytest.mark.parametrize(
    "fields",
    [
        {"n_iter": 2},
        {"then": [{"steps": 9}]},
        {"verify": True},
        {"awaited": True},
    ],
)
def test_what_somebody_waits_for_or_has_several_images_is_sent_by_itself(fields):
    messages = [job(0).to_message(), job(1, **fields).to_message(), job(2).to_message()]
    found = bundled(messages)
    assert messages[1] in found
    assert len(found) == 2


def test_long_prompts_make_smaller_bundles_that_queues_can_carry():
    messages = [
        job(number, prompt="<&>" * 900 + f"{number}").to_message()
        for number in range(40)
    ]
    found = bundled(messages)
    assert len(found) > 4
    assert all(map(sizes.fits, found))
    assert expanded(found) == messages


def test_the_same_jobs_are_in_the_same_bundles_whichever_of_them_are_left_out():
    messages = [job(number).to_message() for number in range(40)]
    names: list[list[str]] = []

    def name(unsigned: list[str]) -> str:
        names.append(list(unsigned))
        return NAME

    first = bundle.bundled([Sent(each) for each in messages], 16, name)
    jobs = [Sent(each, number in {17, 39}) for number, each in enumerate(messages)]
    second = bundle.bundled(jobs, 16, name)
    assert len(first) == 3
    assert names[3:] == names[1:3]
    assert expanded(second) == [messages[17], messages[39]]
    assert all(map(is_bundle, second))


@pytest.fixture
def key() -> SigningKey:
    return SigningKey(Ed25519PrivateKey.generate())


def scope(fleet: str, second: int = 0) -> Scope:
    return Scope(
        lambda: fleet, "jobs", lambda: datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC)
    )


def test_signatures_are_of_jobs_and_64_of_them_fit(key: SigningKey):
    signer = JobSigner(key, scope("here"))
    messages = [
        job(number, prompt="a house in the woods, " * 12 + f"{number}").to_message(
            signer
        )
        for number in range(64)
    ]
    (text,) = bundled(messages)
    assert sizes.fits(text)
    trusted = TrustedJobs(TrustedKeys.read(key.public), scope("here"))
    for message in bundle.messages_of(text):
        read_job(message, "m", trusted)
    assert expanded([text]) == messages


def test_jobs_signed_in_other_seconds_are_in_the_same_bundle(key: SigningKey):
    messages = [
        job(number).to_message(JobSigner(key, scope("here", number // 2)))
        for number in range(4)
    ]
    (text,) = bundled(messages)
    assert expanded([text]) == messages


GOOD = bundled([job(number).to_message() for number in range(3)])[0]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (GOOD.replace(NAME, "short"), "32 hexadecimal digits"),
        (GOOD.replace('"j1"', '"j2"'), "a job twice"),
        (GOOD.replace('"j1"', '"../j1"'), "without an id"),
        (GOOD.replace('"id":"j1"', '"id":"j1","model":"x"'), "model differs"),
        (GOOD.replace('"id":"j1"', '"id":"j1","campaign":"x"'), "campaign differs"),
        (GOOD.replace('"id":"j1"', '"id":"j1","verify":true'), "by itself"),
        (GOOD.replace('"id":"j1"', '"id":"j1","batch_size":4'), "by itself"),
        (
            GOOD.replace('"jobs":[', '"jobs":[' + '{"id":"x"},' * 64),
            "67 jobs",
        ),
        (json.dumps({"bundle": NAME, "jobs": []}), "0 jobs"),
        (GOOD[:-9], "cut"),
        ('{"bundle":null,"jobs":[{}]}', "32 hexadecimal digits"),
        ('{"bundle":"x","jobs":{"a":1}}', "cut"),
        ('{"bundle":"x","jobs":[1]}', "cut"),
    ],
)
def test_a_bad_bundle_says_what_is_wrong(body: str, problem: str):
    found = bundle.read(body)
    assert found.problem is not None
    assert problem in found.problem


def test_a_field_that_is_no_jobs_is_no_more_hidden_in_a_bundle_than_outside():
    body = GOOD.replace('"id":"j1"', '"id":"j1","stepz":3')
    assert '"stepz":3' in bundle.messages_of(body)[1]
