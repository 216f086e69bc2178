"""A worker with a trusted key takes signed jobs and signed lists of files, and nothing else."""

import base64
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

import signers
from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.signing import JobSigner, SigningKey
from imagefleet.storage import dead_letter
from imagefleet.storage.deliveries import Deliveries
from imagefleet.storage.open import Storage
from messages import Drawing, blobs, failed_jobs
from worker.files import manifest

LoraBytes = Callable[[str], bytes]


@pytest.fixture
def signer(storage: Storage, key: SigningKey) -> JobSigner:
    return JobSigner(key, storage.scope)


def job(name: str, **fields: Any) -> Job:
    return Job(prompt="a house", id=name, campaign="c", **fields)


def changed(body: str, **fields: Any) -> str:
    return json.dumps({**json.loads(body), **fields})


async def poisoned(storage: Storage) -> dict[str, dead_letter.FailedJob]:
    """The records of failed jobs by the message that a replay would send."""
    return {record.body or "": record for record in await failed_jobs(storage)}


async def test_only_jobs_as_they_were_signed_are_generated(
    storage: Storage,
    run_pipeline,
    key: SigningKey,
    signer: JobSigner,
    tmp_path,
):
    other = SigningKey.create(tmp_path / "other.pem")
    good = job("good").to_message(signer)
    without_id = {"prompt": "a house", "campaign": "c"}
    bad = {
        "tampered": changed(good, prompt="a thief's house"),
        "another id": changed(good, id="good2"),
        "another campaign": changed(good, campaign="c2"),
        "unsigned": job("unsigned").to_message(),
        "stripped": job("good").to_message(),
        "another key": job("other").to_message(JobSigner(other, storage.scope)),
        "garbage": changed(good, signature="garbage"),
        "well-formed garbage": changed(
            good, signature=base64.b64encode(bytes(64)).decode()
        ),
        "huge": changed(good, signature="A" * 50_000),
        "no id": json.dumps({**without_id, "signature": signer.sign(without_id)}),
        "in base64": base64.b64encode(job("b").to_message().encode()).decode(),
        "with the record of its deliveries": changed(
            good, prompt="b", deliveries={"known": 1}
        ),
    }
    pipeline = await run_pipeline(sent=[good, *bad.values()], trusted_key=key.public)
    assert pipeline.metrics.outcomes == {"completed": 1, "failed": len(bad)}
    assert pipeline.engine_thread.clock.images == 1
    assert await blobs(storage, "c/") == ["c/good.png"]
    records = await poisoned(storage)
    assert {record.error for record in records.values()} == {"UntrustedJobError"}
    assert {(record.campaign, record.attempts) for record in records.values()} == {
        ("default", 1)
    }
    assert len(records) == len(bad)


async def test_a_thief_who_renews_a_lease_cannot_change_the_job(
    storage: Storage, run_pipeline, key: SigningKey, signer: JobSigner
):
    """The token of a worker may update a message, and so write another text."""
    await storage.queue.send([job(f"j{n}").to_message(signer) for n in range(3)])
    for leased in await storage.queue.receive(3, 30):
        if '"j0"' in leased.body:
            renewed = await storage.queue.renew(
                leased, 30, changed(leased.body, prompt="x")
            )
            await storage.queue.release(renewed)
        elif '"j1"' in leased.body:
            await storage.queue.release(leased, body=changed(leased.body, id="victim"))
        else:
            await storage.queue.release(
                leased, body=Deliveries(known=1).write_to(leased.body)
            )
    pipeline = await run_pipeline(trusted_key=key.public)
    assert pipeline.metrics.outcomes == {"completed": 1, "failed": 2}
    assert pipeline.engine_thread.clock.images == 1
    assert await blobs(storage, "c/") == ["c/j2.png"]
    assert {each.error for each in (await poisoned(storage)).values()} == {
        "UntrustedJobError"
    }


async def test_a_job_suspected_of_killing_workers_must_be_signed_too(
    storage: Storage, run_pipeline, key: SigningKey
):
    await storage.queue.send([job("unsigned").to_message()])
    for _ in range(3):
        (leased,) = await storage.queue.receive(1, 30)
        await storage.queue.release(leased)
    pipeline = await run_pipeline(trusted_key=key.public)
    assert pipeline.metrics.outcomes == {"failed": 1}
    assert pipeline.engine_thread.clock.images == 0


async def test_a_failed_job_keeps_the_signature_of_what_was_sent(
    storage: Storage, run_pipeline, key: SigningKey, signer: JobSigner
):
    sent = job("j", seed=5, metadata={"ü": 1}).to_message(signer)
    released = job("released", seed=5).to_message(signer)
    engine = Drawing(lambda _: errors.TransientError("the engine failed"))
    pipeline = await run_pipeline(
        engine,
        trusted_key=key.public,
        max_attempts=1,
        sent=[sent, Deliveries(known=2, failed=2).write_to(released) or ""],
    )
    assert pipeline.metrics.outcomes == {"failed": 2}
    records = await poisoned(storage)
    assert sent in records, "to the byte"
    for body, record in records.items():
        again = read_job(body, "m", signers.trusted(key, storage.scope))
        assert (again.id, again.campaign) == (record.id, "c")
        assert "deliveries" not in body


@pytest.mark.parametrize("is_signed", [True, False])
async def test_only_loras_of_the_signed_list_are_used_and_without_one_the_worker_ends(
    storage: Storage,
    run_pipeline,
    key: SigningKey,
    signer: JobSigner,
    lora_bytes: LoraBytes,
    is_signed: bool,
):
    listed = {"style": hashlib.sha256(lora_bytes("style")).hexdigest()}
    content = manifest.encode("loras", listed, key if is_signed else None)
    files = {
        "style.safetensors": lora_bytes("style"),
        "planted.safetensors": lora_bytes("planted"),
        "manifest.json": content,
    }
    for name, data in files.items():
        await storage.files.create(f"loras/{name}", data, "application/x", {})
    names = ("style", "planted", "nowhere")
    jobs = [
        Job(prompt=f"a house <lora:{name}:1>", id=name, campaign="c") for name in names
    ]
    await storage.queue.send([each.to_message(signer) for each in jobs])
    if not is_signed:
        with pytest.raises(errors.SetupError, match="signed with the trusted key"):
            await run_pipeline(trusted_key=key.public)
        assert (await storage.queue.depth()).messages == 3
        assert (await storage.poison.depth()).messages == 0
        return
    pipeline = await run_pipeline(trusted_key=key.public)
    assert pipeline.metrics.outcomes == {"completed": 1, "failed": 2}
    assert await blobs(storage, "c/") == ["c/style.png"]
    reasons = {each.id: each.reason for each in (await poisoned(storage)).values()}
    for name in ("planted", "nowhere"):
        assert f"does not list '{name}'" in reasons[name]
