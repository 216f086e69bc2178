"""A worker with a trusted key takes signed jobs and signed lists of files, and nothing else."""

import asyncio
import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polling
import signers
from evaluation.stand_in import StandInEngine, draw_noise
from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.signing import JobSigner, SigningKey
from imagefleet.storage import dead_letter
from imagefleet.storage.deliveries import Deliveries
from imagefleet.storage.open import Storage
from messages import RunPipeline
from worker import process
from worker.engine import contract
from worker.files import manifest
from worker.settings import WorkerSettings

LoraBytes = Callable[[str], bytes]


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return SigningKey.create(tmp_path / "key.pem")


@pytest.fixture
def signer(storage: Storage, key: SigningKey) -> JobSigner:
    return JobSigner(key, storage.scope)


def job(name: str, **fields: Any) -> Job:
    return Job(prompt="a house", id=name, campaign="c", **fields)


def changed(body: str, **fields: Any) -> str:
    return json.dumps({**json.loads(body), **fields})


async def poisoned(storage: Storage) -> dict[str, dead_letter.FailedJob]:
    """The records of failed jobs by the message that a replay would send."""
    records = {}
    async for message in storage.poison.browse():
        record = dead_letter.FailedJob.parse(message.body)
        assert record is not None
        records[await record.message(storage.blobs)] = record
    return records


async def stored(storage: Storage) -> list[str]:
    return [name async for name in storage.blobs.names() if name.startswith("c/")]


async def test_only_jobs_as_they_were_signed_are_generated(
    storage: Storage,
    run_pipeline: RunPipeline,
    key: SigningKey,
    signer: JobSigner,
    tmp_path: Path,
) -> None:
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
    await storage.queue.send([good, *bad.values()])
    pipeline = await run_pipeline(trusted_key=key.public)
    assert dict(pipeline.metrics.outcomes) == {"completed": 1, "failed": len(bad)}
    assert pipeline.engine_thread.clock.images == 1
    assert await stored(storage) == ["c/good.png"]
    records = await poisoned(storage)
    assert {record.error for record in records.values()} == {"UntrustedJobError"}
    assert {(record.campaign, record.attempts) for record in records.values()} == {
        ("default", 1)
    }
    assert len(records) == len(bad)


async def test_a_thief_who_renews_a_lease_cannot_change_the_job(
    storage: Storage, run_pipeline: RunPipeline, key: SigningKey, signer: JobSigner
) -> None:
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
    assert dict(pipeline.metrics.outcomes) == {"completed": 1, "failed": 2}
    assert pipeline.engine_thread.clock.images == 1
    assert await stored(storage) == ["c/j2.png"]
    assert {each.error for each in (await poisoned(storage)).values()} == {
        "UntrustedJobError"
    }


async def test_a_job_suspected_of_killing_workers_must_be_signed_too(
    storage: Storage, run_pipeline: RunPipeline, key: SigningKey, signer: JobSigner
) -> None:
    await storage.queue.send([job("unsigned").to_message()])
    for _ in range(3):
        (leased,) = await storage.queue.receive(1, 30)
        await storage.queue.release(leased)
    pipeline = await run_pipeline(trusted_key=key.public)
    assert dict(pipeline.metrics.outcomes) == {"failed": 1}
    assert pipeline.engine_thread.clock.images == 0


async def test_a_failed_job_keeps_the_signature_of_what_was_sent(
    storage: Storage, run_pipeline: RunPipeline, key: SigningKey, signer: JobSigner
) -> None:
    def draw(request: contract.ImageRequest) -> contract.Pixels:
        if request.seed == 5:
            raise errors.TransientError("the engine failed")
        return draw_noise(request)

    sent = job("j", seed=5, metadata={"ü": 1}).to_message(signer)
    released = job("released", seed=5).to_message(signer)
    await storage.queue.send(
        [sent, Deliveries(known=2, failed=2).write_to(released) or ""]
    )
    pipeline = await run_pipeline(
        StandInEngine(draw=draw), trusted_key=key.public, max_attempts=1
    )
    assert dict(pipeline.metrics.outcomes) == {"failed": 2}
    records = await poisoned(storage)
    assert sent in records, "to the byte"
    for body, record in records.items():
        again = read_job(body, "m", signers.trusted(key, storage.scope))
        assert (again.id, again.campaign) == (record.id, "c")
        assert "deliveries" not in body


async def test_both_keys_are_taken_while_keys_change(
    storage: Storage,
    run_pipeline: RunPipeline,
    key: SigningKey,
    signer: JobSigner,
    tmp_path: Path,
) -> None:
    new = SigningKey.create(tmp_path / "new.pem")
    await storage.queue.send(
        [
            job("old").to_message(signer),
            job("new").to_message(JobSigner(new, storage.scope)),
        ]
    )
    pipeline = await run_pipeline(trusted_key=f"{key.public},{new.public}")
    assert dict(pipeline.metrics.outcomes) == {"completed": 2}


async def test_a_worker_says_at_its_start_whose_jobs_it_takes(
    storage: Storage,
    worker_settings: Callable[..., WorkerSettings],
    key: SigningKey,
    signer: JobSigner,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A key that did not arrive is noticed by its absence."""
    caplog.set_level("INFO")
    await storage.queue.send(
        [job("good").to_message(signer), job("unsigned").to_message()]
    )
    settings = worker_settings(trusted_key=key.public)
    report = await process.run_worker(settings, load=StandInEngine)
    assert (
        f"pulling jobs signed with {key.public} from {storage.queue.name}"
        in caplog.text
    )
    assert report.jobs == {"completed": 1, "failed": 1}


async def put_loras(storage: Storage, content: bytes | None, **files: bytes) -> None:
    for name, data in files.items():
        await storage.files.create(
            f"loras/{name}.safetensors", data, "application/x", {}
        )
    if content is not None:
        version = await storage.files.read_part("loras/manifest.json", 0, 1)
        assert await storage.files.replace(
            "loras/manifest.json",
            content,
            "application/json",
            version and version.version,
        )


async def test_only_loras_of_the_signed_list_are_used(
    storage: Storage,
    run_pipeline: RunPipeline,
    key: SigningKey,
    signer: JobSigner,
    lora_bytes: LoraBytes,
) -> None:
    listed = {"style": hashlib.sha256(lora_bytes("style")).hexdigest()}
    content = manifest.encode("loras", listed, key)
    await put_loras(
        storage, content, style=lora_bytes("style"), planted=lora_bytes("planted")
    )
    jobs = [
        Job(prompt=f"a house <lora:{name}:1>", id=name, campaign="c")
        for name in ("style", "planted", "nowhere")
    ]
    await storage.queue.send([each.to_message(signer) for each in jobs])
    pipeline = await run_pipeline(trusted_key=key.public)
    assert dict(pipeline.metrics.outcomes) == {"completed": 1, "failed": 2}
    assert await stored(storage) == ["c/style.png"]
    reasons = {each.id: each.reason for each in (await poisoned(storage)).values()}
    for name in ("planted", "nowhere"):
        assert f"does not list '{name}'" in reasons[name]


@pytest.mark.parametrize("damage", ["missing", "plain", "cut"])
async def test_a_list_that_is_not_signed_stops_the_worker_and_poisons_nothing(
    storage: Storage,
    run_pipeline: RunPipeline,
    key: SigningKey,
    signer: JobSigner,
    lora_bytes: LoraBytes,
    damage: str,
) -> None:
    good = manifest.encode("loras", {"style": "0" * 64}, key)
    plain = manifest.encode("loras", {"style": "0" * 64}, None)
    content = {"missing": None, "plain": plain, "cut": good[:-9]}[damage]
    await put_loras(storage, content, style=lora_bytes("style"))
    styled = (
        Job(prompt="a <lora:style:1>", id=f"j{n}", campaign="c") for n in range(5)
    )
    await storage.queue.send([each.to_message(signer) for each in styled])
    with pytest.raises(errors.SetupError, match="must be signed with the trusted key"):
        await run_pipeline(trusted_key=key.public)
    assert (await storage.queue.depth()).messages == 5
    assert (await storage.poison.depth()).messages == 0


async def test_a_lora_added_after_the_worker_began_is_used_at_once(
    storage: Storage,
    run_pipeline: RunPipeline,
    key: SigningKey,
    signer: JobSigner,
    lora_bytes: LoraBytes,
) -> None:
    files = {name: lora_bytes(name) for name in ("first", "second")}
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    await put_loras(
        storage,
        manifest.encode("loras", {"first": hashes["first"]}, key),
        first=files["first"],
    )
    bodies = {
        name: Job(prompt=f"a <lora:{name}:1>", id=name, campaign="c").to_message(signer)
        for name in files
    }
    await storage.queue.send([bodies["first"]])
    stop = asyncio.Event()

    async def add_the_second() -> None:
        await polling.until(
            lambda: stored(storage), lambda names: names == ["c/first.png"]
        )
        await put_loras(
            storage, manifest.encode("loras", hashes, key), second=files["second"]
        )
        await storage.queue.send([bodies["second"]])

        async def both() -> bool:
            assert not (await storage.poison.depth()).messages
            return len(await stored(storage)) == 2

        await polling.until(both)
        stop.set()

    pipeline, _ = await asyncio.gather(
        run_pipeline(stop=stop, until_empty=False, trusted_key=key.public),
        add_the_second(),
    )
    assert dict(pipeline.metrics.outcomes) == {"completed": 2}
