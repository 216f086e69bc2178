"""In a fleet with a broker a thief writes in no other machine's name, even with a machine's key."""

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from azure.core.credentials import AzureSasCredential
from azure.core.exceptions import HttpResponseError

import thief
from benchmarks.stand_in import StandInEngine
from fleet.keys import mint
from fleet.report import records as report_records
from imagefleet import concurrency
from imagefleet.job.message import read_job
from imagefleet.job.names import duplicate_name
from imagefleet.records.log import RecordLog, Totals, shard_part
from imagefleet.storage.azure.account import read_address
from imagefleet.storage.azure.roles import ROLES, Role, is_container, name_of
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.proofs import machine_key
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from tokens import by_tokens
from worker import process
from worker.node import suspects
from worker.settings import WorkerSettings
from worker.stages.record import proven

M1, M2, STOLEN = (f"0d8f5c1e-77a2-4c1b-9a3e-5b2f0e7d9c1{last}" for last in "123")
BODIES = {
    f"j{number}": json.dumps(
        {
            "id": f"j{number}",
            "prompt": "a cat",
            "campaign": "spring",
            "seed": 100 * number,
        }
    )
    for number in range(6)
}
DRAWN = {name: body for name, body in BODIES.items() if name != "j5"}

Machine = Callable[[str], AbstractAsyncContextManager[Storage]]
Ask = Callable[..., JSONDict]


@pytest.fixture
def storage_settings(azurite_settings: StorageSettings) -> StorageSettings:
    """Tokens are Azure's."""
    return azurite_settings


@pytest.fixture
async def settings_of(
    storage: Storage, storage_settings: StorageSettings, tmp_path
) -> Callable[[str], StorageSettings]:
    """The settings of a worker with what a broker gives its machine."""
    secret = await mint.proof_secret(storage_settings)
    minted = mint.Minter(storage_settings).mint(ROLES["worker"], timedelta(hours=1))

    def settings(name: str) -> StorageSettings:
        given = {"machine": name, "machine_key": machine_key(secret, name)}
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(minted.record | given))
        update = {"storage": minted.storage, "sas_file": file}
        return storage_settings.model_copy(update=update)

    return settings


@pytest.fixture
def machine(settings_of: Callable[[str], StorageSettings]) -> Machine:
    @contextlib.asynccontextmanager
    async def opened(name: str) -> AsyncIterator[Storage]:
        async with open_storage(settings_of(name)) as found:
            await found.check()
            yield found

    return opened


@pytest.fixture
async def honest(storage: Storage, machine: Machine, run_worker) -> thief.Loot:
    """Images by one machine, and second drawings by another."""
    for name, of in ((f"{M1}-17", {}), (f"{M2}-17", {"verify": True})):
        await storage.queue.send(
            [json.dumps(json.loads(each) | of) for each in DRAWN.values()]
        )
        async with machine(name[:36]) as opened:
            await run_worker(name, opened=opened)
    waiting = {"j5": BODIES["j5"]}
    return thief.Loot("spring", DRAWN, {}, waiting, {}, (f"{M1}-17", f"{M2}-17"))


@pytest.fixture
def ask(in_process, storage_settings: StorageSettings, monkeypatch) -> Ask:
    """The JSON that a command prints."""
    for name in ("storage", "queue", "container", "files_container"):
        monkeypatch.setenv(
            f"IMAGEFLEET_{name.upper()}", str(getattr(storage_settings, name))
        )

    def run(*arguments: str) -> JSONDict:
        ended = in_process(*arguments, "--json")
        assert ended.returncode in {0, 4}, ended.stderr
        found = json.loads(ended.stdout)
        assert isinstance(found, dict)
        return found

    return run


async def test_an_honest_fleet_proves_all_that_it_stores(
    honest: thief.Loot,
    ask: Ask,
    storage: Storage,
    machine: Machine,
    storage_settings,
):
    verified = await asyncio.to_thread(ask, "verify", "spring")
    report = await asyncio.to_thread(ask, "report", "spring")
    assert (verified["pairs"], verified["alike"], verified["unproven"]) == (5, 5, 0)
    assert {each["worker"] for each in verified["workers"]} == {*honest.workers}
    assert (report["images"], report["damaged"]) == (5, 0)
    assert [(each["name"], each["images"]) for each in report["workers"]] == [
        (f"{M1}-17", 5)
    ]


async def test_whoever_judges_with_tokens_is_told_that_nobody_is_believed(
    honest: thief.Loot, storage_settings: StorageSettings, caplog
):
    for name in ("monitor", "operator"):
        caplog.clear()
        tokens = by_tokens(storage_settings, ROLES[name])
        async with open_storage(tokens) as looks_on:
            proofs = await looks_on.proofs()
            assert proofs is not None
            assert proofs.are_hidden
            found = await report_records.read_records(looks_on, "spring", 0)
        assert "the account's key alone reads what proves" in caplog.text
        assert (found.images, found.workers, found.damaged.count) == (5, {}, 0)


@pytest.mark.parametrize("role", [*ROLES.values(), ROLES["worker"].for_chains()])
async def test_no_token_reads_or_changes_the_secret(
    settings_of, storage_settings: StorageSettings, role: Role
):
    secret = await mint.proof_secret(storage_settings)
    minted = mint.Minter(storage_settings).mint(role, timedelta(hours=1))
    address = read_address(minted.storage)
    seen = []
    for resource, token in minted.fields.items():
        name = name_of(storage_settings, resource)
        credential = AzureSasCredential(token)
        client: Any
        if is_container(resource):
            client = address.container_client(name, credential, **thief.OPTIONS)
            read = client.get_container_properties
            change = client.set_container_metadata
        else:
            client = address.queue_client(name, credential, **thief.OPTIONS)
            read = client.get_queue_properties
            change = client.set_queue_metadata
        async with client:
            with contextlib.suppress(HttpResponseError):
                seen.append(dict((await read()).metadata or {}))
            with pytest.raises(HttpResponseError):
                await change({"proofsecrets": "mine"})
    assert secret not in str(seen)
    assert await mint.proof_secret(storage_settings) == secret


async def test_a_thief_with_a_machines_key_has_no_other_machine_named_or_quarantined(
    honest: thief.Loot, ask: Ask, machine: Machine
):
    before = await asyncio.to_thread(ask, "verify", "spring")
    names = [
        *honest.workers,
        f"{M1}-9",
        "a",
        "b",
        *(f"{STOLEN}-{pid}" for pid in range(4)),
    ]
    async with machine(STOLEN) as stolen:
        for body in DRAWN.values():
            job = read_job(body, "none")
            for number, name in enumerate(names):
                aside = duplicate_name(job.blob_name(0), f"thief-{number}")
                told = {"worker": name, "digest": job.stage_digest, "job": str(job.id)}
                told |= {"sha256": "0" * 64, "proof": "A" * 22}
                data = f"no image {name}".encode()
                if name.startswith(STOLEN):
                    told = stolen.prover.proven(
                        aside, told | {"sha256": hashlib.sha256(data).hexdigest()}
                    )
                assert await stolen.blobs.create(aside, data, "image/png", told)

    after = await asyncio.to_thread(ask, "verify", "spring", "--quarantine", "--yes")

    assert after["unproven"] == 5 * 5
    assert not [each for each in after["workers"] if each["draws_wrong"]]
    assert not {M1, M2, *honest.workers} & {*after["quarantined"]}
    assert after["alike"] == before["alike"]


async def test_what_comes_back_with_anothers_metadata_is_not_that_machines(
    honest: thief.Loot, ask: Ask, storage: Storage, machine: Machine
):
    """An image that was deleted for a redo, whose proof somebody has read."""
    told = dict(await storage.blobs.metadata("spring/j0.png") or {})
    await storage.blobs.delete("spring/j0.png")
    async with machine(STOLEN) as stolen:
        assert await stolen.blobs.create("spring/j0.png", b"garbage", "image/png", told)
    found = await asyncio.to_thread(ask, "verify", "spring")
    [pair] = found["different_pairs"]
    assert pair["workers"] == ["", f"{M2}-17"]


async def test_a_thief_adds_no_hours_or_costs_to_another_worker(
    honest: thief.Loot, ask: Ask, machine: Machine
):
    before = await asyncio.to_thread(ask, "report", "spring")
    price = {"price_per_hour": 900.0, "start_up_seconds": 80_000.0}
    async with machine(STOLEN) as stolen:
        log = RecordLog(stolen.blobs, "thief", concurrency.NEVER)
        for days in (-3, 3):
            at = datetime.now(UTC) + timedelta(days=days)
            jobs = [*honest.drawn.items(), *honest.waiting.items()]
            for told in (
                {},
                {"proof": "A" * 22},
                {"worker": f"{M1}-99"},
                {"worker": "?"},
            ):
                forged = [honest.record(*job, at=at, **price, **told) for job in jobs]
                await log.add(forged)
                await log.add(forged, again=True)
            own = [
                proven(honest.record(*job, at=at, worker=f"{STOLEN}-1"), stolen.prover)
                for job in jobs
            ]
            as_another = [
                each.model_copy(update={"worker": f"{M1}-17"}) for each in own
            ]
            await log.add(as_another)
            await log.add([*own, *as_another], again=True)

    after = await asyncio.to_thread(ask, "report", "spring")

    others = [each for each in after["workers"] if not each["name"].startswith(STOLEN)]
    assert others == before["workers"]
    assert after["damaged"] > before["damaged"] == 0
    assert after["jobs"] >= before["jobs"] == 5


async def test_a_record_in_the_place_of_an_honest_one_takes_no_hours_from_its_worker(
    honest: thief.Loot, ask: Ask, storage: Storage, machine: Machine
):
    """By who may read images, as the tokens for chains allow."""
    before = await asyncio.to_thread(ask, "report", "spring")
    lines = []
    async with machine(STOLEN) as stolen:
        for job_id, body in honest.drawn.items():
            metadata = (
                await storage.blobs.metadata(read_job(body, "none").blob_name(0)) or {}
            )
            told = {"sha256": metadata["sha256"], "worker": f"{STOLEN}-1"}
            lines.append(
                proven(honest.record(job_id, body, **told), stolen.prover).line()
            )
        first = "-records/spring/20200101T000000Z-first.images.jsonl.gz"
        await stolen.blobs.append(first, shard_part(lines, Totals(5, 5)), 0)
    after = await asyncio.to_thread(ask, "report", "spring")
    [known] = before["workers"]
    [found, others] = sorted(after["workers"], key=lambda each: str(each["name"]))
    assert (found["name"], others["name"]) == (f"{M1}-17", f"{STOLEN}-1")
    for name in (
        "first_pull_at",
        "last_image_at",
        "start_up_seconds",
        "seconds",
        "gpu_dollars",
    ):
        assert found[name] == known[name], name
    assert found["images"] + found["replaced"] == known["images"] == 5


async def test_a_thief_with_a_machines_key_writes_any_figures_of_that_machine(
    honest: thief.Loot, ask: Ask, machine: Machine
):
    """Nothing prevents it."""
    told = {
        "worker": f"{STOLEN}-1",
        "price_per_hour": 900.0,
        "start_up_seconds": 36_000.0,
    }
    async with machine(STOLEN) as stolen:
        forged = [honest.record(*job, **told) for job in honest.drawn.items()]
        log = RecordLog(stolen.blobs, "thief", concurrency.NEVER)
        await log.add([proven(each, stolen.prover) for each in forged], again=True)
    report = await asyncio.to_thread(ask, "report", "spring")
    [own] = [each for each in report["workers"] if each["name"] == f"{STOLEN}-1"]
    assert (own["images"], own["doubled"]) == (0, 5)
    assert own["gpu_dollars"] >= 9_000


async def test_a_worker_whose_name_is_not_its_machines_says_that_it_proves_nothing(
    settings_of, monkeypatch, caplog
):
    monkeypatch.setattr("worker.pull.UNTIL_EMPTY_PAUSE_SECONDS", 0.1)
    known = {**settings_of(M1).model_dump(), "model": "stand-in", "until_empty": True}
    for name in (f"{M1}-7", f"{M2}-7"):
        await process.run_worker(WorkerSettings(**known, name=name), load=StandInEngine)
        assert ("no proof of what" in caplog.text) == (name == f"{M2}-7")


async def test_a_thief_marks_no_images_of_another_worker_as_suspect(
    honest: thief.Loot, ask: Ask, machine: Machine
):
    data = json.dumps({"worker": f"{M1}-17"}).encode()
    told = {"worker": f"{M1}-17", "sha256": hashlib.sha256(data).hexdigest()}
    async with machine(STOLEN) as stolen:
        own = stolen.prover.proven(
            "-suspect/w/2.json", told | {"worker": f"{STOLEN}-1"}
        )
        for number, metadata in enumerate(({}, told, own)):
            blob = f"-suspect/w/{number}.json"
            assert await stolen.blobs.create(blob, data, "application/json", metadata)
    found = await asyncio.to_thread(ask, "redo", "--suspect", "--dry-run")
    assert (found["images"], found["damaged_records"]) == (0, 3)

    async with machine(M1) as broken:
        good_at = time.monotonic() - 3600
        await suspects.record(broken, f"{M1}-17", good_at, "why", concurrency.NEVER)
    found = await asyncio.to_thread(ask, "redo", "--suspect", "--dry-run")
    assert (found["images"], found["damaged_records"]) == (5, 3)
