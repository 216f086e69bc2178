"""Jobs that are signed: what a signature covers, and what a worker refuses."""

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

import signers
from imagefleet import errors
from imagefleet.job.message import Job, is_signed, read_job
from imagefleet.signing import JobSigner, SigningKey, TrustedJobs
from imagefleet.storage.deliveries import Deliveries, without_deliveries
from imagefleet.validation import JSONDict

JOB = Job(
    prompt="a hut, \U0001f332 \u2028 'quoted' \"twice\" &amp; é",
    id="hut",
    campaign="spring",
    cfg_scale=7.25,
    metadata={"order": 7, "price": 1e22, "nested": {"b": [1.0, None], "a": "ü"}},
)


def changed(body: str, **fields: Any) -> str:
    return json.dumps({**json.loads(body), **fields})


def test_a_signed_job_is_the_same_job(signer: JobSigner, trusted: TrustedJobs):
    body = JOB.to_message(signer)
    assert read_job(body, "m", trusted) == read_job(JOB.to_message(), "m")
    assert read_job(body, "m") == read_job(JOB.to_message(), "m"), (
        "without a trusted key"
    )
    assert is_signed(body)
    assert not is_signed(JOB.to_message())


def test_a_signature_outlasts_deliveries_base64_and_another_order_of_the_fields(
    signer: JobSigner, trusted: TrustedJobs
):
    body = JOB.to_message(signer)
    released = Deliveries(known=3, lost=1).write_to(body)
    assert released is not None
    texts = [
        released,
        base64.b64encode(body.encode()).decode(),
        base64.b64encode(released.encode()).decode(),
        json.dumps(dict(reversed(json.loads(body).items())), indent=3),
    ]
    for text in texts:
        assert read_job(text, "m", trusted).id == "hut"
        assert is_signed(text)
    assert "deliveries" not in without_deliveries(released)
    assert read_job(without_deliveries(released), "m", trusted).id == "hut"
    assert without_deliveries(body) is body


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "another"},
        {"id": "another"},
        {"campaign": "another"},
        {"campaign": None},
        {"seed": 5},
        {"model": "other"},
        {"steps": 21},
        {"metadata": {}},
        {"save_images": True},
        {"signature": "A" * 88},
        {"signature": "A" * 86 + "=="},
        {"signature": "x" * 50_000},
        {"signature": ["A" * 88]},
        {"signature": {"a": 1}},
        {"signature": 5},
        {"signature": ""},
    ],
)
def test_what_was_changed_after_it_was_signed_is_refused(
    signer: JobSigner, trusted: TrustedJobs, fields: JSONDict
):
    with pytest.raises(
        errors.UntrustedJobError, match="it was changed after it was signed"
    ):
        read_job(changed(JOB.to_message(signer), **fields), "m", trusted)


@pytest.mark.parametrize("fields", [{}, {"signature": None}])
def test_an_unsigned_job_is_refused_with_what_to_do(
    trusted: TrustedJobs, fields: JSONDict
):
    with pytest.raises(
        errors.UntrustedJobError,
        match=r"not signed with the trusted key: it carries no signature.*IMAGEFLEET_SIGNING_KEY",
    ):
        read_job(changed(JOB.to_message(), **fields), "m", trusted)


def test_nothing_of_an_unsigned_job_is_looked_at(trusted: TrustedJobs):
    with pytest.raises(errors.UntrustedJobError):
        read_job('{"no_such_field": 1, "prompt": [[[]]]}', "m", trusted)
    with pytest.raises(errors.InvalidMessageError, match="is not JSON"):
        read_job("no job", "m", trusted)


def test_another_keys_signature_and_one_for_something_else_are_refused(
    signer: JobSigner, trusted: TrustedJobs, tmp_path
):
    other = SigningKey.create(tmp_path / "other.pem")
    with pytest.raises(errors.UntrustedJobError, match="another key signed it"):
        read_job(JOB.to_message(signers.signer(other)), "m", trusted)
    fields = json.loads(JOB.to_message())
    terms = {
        name: text for name, text in signer.sign(fields).items() if name != "ed25519"
    }
    signature = signer.key.sign("manifest of loras", {**fields, "signature": terms})
    fields["signature"] = {**terms, "ed25519": signature}
    with pytest.raises(errors.UntrustedJobError):
        read_job(json.dumps(fields), "m", trusted)


def test_a_signed_job_has_an_id_or_it_could_be_sent_again_as_another(
    signer: JobSigner, trusted: TrustedJobs
):
    with pytest.raises(ValueError, match="a signed job needs an id"):
        Job(prompt="a hut").to_message(signer)
    for fields in ({"prompt": "a hut"}, {"prompt": "a hut", "id": None}):
        body = json.dumps({**fields, "signature": signer.sign(fields)})
        with pytest.raises(errors.UntrustedJobError, match="has no `id`"):
            read_job(body, "m", trusted)


def test_a_field_written_twice_means_the_one_that_is_checked(
    signer: JobSigner, trusted: TrustedJobs
):
    body = JOB.to_message(signer)
    with pytest.raises(errors.UntrustedJobError):
        read_job(body[:-1] + ',"prompt":"another"}', "m", trusted)
    assert (
        read_job('{"prompt":"another",' + body[1:], "m", trusted).prompt == JOB.prompt
    )


@pytest.mark.parametrize(
    "until",
    [
        "",
        "soon",
        "2026-12-31",
        "2026-12-31T00:00:00",
        "0001-01-01T00:00:00+14:00",
        "9" * 60,
    ],
)
def test_a_signature_until_no_date_is_refused(
    signer: JobSigner, trusted: TrustedJobs, until: str
):
    terms = {"fleet": "acme/images", "queue": "jobs", "until": until}
    signature = signer.key.sign("job", {"id": "a", "prompt": "", "signature": terms})
    body = json.dumps(
        {"id": "a", "prompt": "", "signature": {**terms, "ed25519": signature}}
    )
    with pytest.raises(errors.UntrustedJobError, match="is signed until no date"):
        read_job(body, "m", trusted)


def test_another_program_signs_as_the_documentation_says(tmp_path):
    SigningKey.create(tmp_path / "key.pem")
    private = serialization.load_pem_private_key(
        (tmp_path / "key.pem").read_bytes(), None
    )
    assert isinstance(private, ed25519.Ed25519PrivateKey)
    fields = {"prompt": "a hut, é", "id": "hut", "steps": 15, "cfg_scale": 7.5}
    until = f"{datetime.now(UTC) + timedelta(days=90):%Y-%m-%dT%H:%M:%S+00:00}"
    terms = {"fleet": "acme/images", "queue": "jobs", "until": until}
    signed = {**fields, "signature": terms}
    text = "imagefleet job 1\n" + json.dumps(
        signed, sort_keys=True, separators=(",", ":")
    )
    signature = base64.b64encode(private.sign(text.encode("ascii"))).decode()
    public = base64.b64encode(private.public_key().public_bytes_raw()).decode()
    body = json.dumps(
        {**fields, "signature": {**terms, "ed25519": signature}}, ensure_ascii=False
    )
    assert read_job(body, "m", signers.trusted(public)).id == "hut"
