"""Sources whose jobs are signed."""

import json

import pytest

import signers
from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.job.sizes import MAX_MESSAGE_BYTES, message_bytes
from imagefleet.keeping.rule import Keep
from imagefleet.signing import MAX_SIGNATURE_BYTES, JobSigner, SigningKey, TrustedJobs
from loadgen.file_source import FileSource
from loadgen.sources import TemplateSource

TEMPLATE = """
prompt: "a {noun} & <friends>"
count: 300
seed: 3
lists: {noun: [cat, "döner", fox]}
job: {steps: 15, metadata: {noun: "{noun}", price: 0.1}}
"""


def test_a_templates_jobs_are_signed_and_the_same_each_time(
    signer: JobSigner, trusted: TrustedJobs, tmp_path
):
    path = tmp_path / "t.yaml"
    path.write_text(TEMPLATE)
    bodies = list(TemplateSource(path, signer=signer).bodies())
    again = TemplateSource(path, signer=signer).bodies()
    digests = [
        [read_job(body, "m", trusted).digest for body in some]
        for some in (bodies, again)
    ]
    assert digests[1] == digests[0]
    for body, plain in zip(bodies, TemplateSource(path).bodies(), strict=True):
        assert read_job(body, "m", trusted) == read_job(plain, "m")


def test_a_files_jobs_get_ids_and_are_signed(
    signer: JobSigner, trusted: TrustedJobs, tmp_path
):
    path = tmp_path / "jobs.jsonl"
    path.write_text(
        '{"prompt": "a"}\n\n{"prompt": "b", "id": "own", "save_images": true}\n'
    )
    with_key = FileSource(path, signer=signer)
    with_key.check()
    bodies = [body for body in with_key.bodies() if body]
    jobs = [read_job(body, "m", trusted) for body in bodies]
    assert [job.id for job in jobs][1:] == ["own"]
    plain = [read_job(body, "m") for body in FileSource(path).bodies() if body]
    assert jobs == plain


def test_a_job_without_room_for_its_signature_stops_the_load_before_it_begins(
    signer: JobSigner, trusted: TrustedJobs, tmp_path
):
    def file_of(prompt_length: int) -> FileSource:
        path = tmp_path / "jobs.jsonl"
        path.write_text(Job(prompt="x" * prompt_length, id="a", seed=1).to_message())
        return FileSource(path, signer=signer)

    plain = Job(prompt="", id="a", seed=1).to_message()
    room = MAX_MESSAGE_BYTES - message_bytes(plain) - MAX_SIGNATURE_BYTES
    full = file_of(room)
    full.check()
    (body,) = full.bodies()
    assert message_bytes(body or "") <= MAX_MESSAGE_BYTES
    with pytest.raises(errors.SetupError, match="line 1: the message has 65,537 bytes"):
        file_of(room + 1).check()


def test_a_line_that_somebody_signed_is_sent_as_it_is_or_signed_anew(
    signer: JobSigner, trusted: TrustedJobs, tmp_path
):
    other = SigningKey.create(tmp_path / "other.pem")
    theirs = json.dumps(
        json.loads(
            Job(prompt="a", id="a", cfg_scale=7).to_message(signers.signer(other))
        )
    )
    path = tmp_path / "jobs.jsonl"
    path.write_text(theirs)
    assert list(FileSource(path).bodies()) == [theirs]
    for ours in ({"campaign": "spring"}, {"keep": Keep(minimum={"clip": 25})}):
        with pytest.raises(errors.SetupError, match=f"without a {next(iter(ours))}"):
            FileSource(path, **ours).check()
    (body,) = FileSource(path, signer=signer, **ours).bodies()
    job = read_job(body or "", "m", trusted)
    assert (job.id, job.keep) == ("a", ours["keep"])
