"""What a thief does with the tokens of a worker's role, by Azure's API; `ATTACKS` is the table.

The thief knows the jobs of the queue, whose messages a worker may read, and the names that follow
from them; by the role for chains also the images and records.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from azure.core.credentials import AzureSasCredential
from azure.storage.blob.aio import ContainerClient
from azure.storage.queue.aio import QueueClient

from fleet.keys import mint
from imagefleet.job.message import MAX_IMAGE_BYTES, image_stem, job_key, read_job
from imagefleet.job.sizes import MAX_IMAGES_PER_JOB
from imagefleet.records.log import Totals, shard_part
from imagefleet.records.record import Record
from imagefleet.storage.azure.account import read_address
from imagefleet.storage.azure.roles import Role
from imagefleet.storage.azure.storage import API_VERSION
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict

OPTIONS = {"api_version": API_VERSION, "retry_total": 0}

#: Bytes that are no image.
GARBAGE = b"garbage"


@dataclasses.dataclass
class Thief:
    """Azure's clients with a worker's tokens, each token for its own resource."""

    jobs: QueueClient
    high: QueueClient
    low: QueueClient
    poison: QueueClient
    images: ContainerClient
    files: ContainerClient


@contextlib.asynccontextmanager
async def stealing(settings: StorageSettings, role: Role) -> AsyncIterator[Thief]:
    """A thief with the tokens of *role*."""
    minted = mint.Minter(settings).mint(role, timedelta(hours=1))
    address = read_address(minted.storage)
    names = settings.queues_of(None)
    token = {
        resource: AzureSasCredential(each) for resource, each in minted.fields.items()
    }
    async with (
        address.queue_client(settings.queue, token["queue"], **OPTIONS) as jobs,
        address.queue_client(names["high"], token["queue_high"], **OPTIONS) as high,
        address.queue_client(names["low"], token["queue_low"], **OPTIONS) as low,
        address.queue_client(
            settings.poison_queue, token["poison"], **OPTIONS
        ) as poison,
        address.container_client(
            settings.container, token["blob"], **OPTIONS
        ) as images,
        address.container_client(
            settings.files_container, token["files"], **OPTIONS
        ) as files,
    ):
        yield Thief(jobs, high, low, poison, images, files)


@dataclasses.dataclass(frozen=True)
class Loot:
    """What the thief knows: bodies of jobs in *campaign*, by what became of them.

    Of *prey* the messages are the first in the queue.
    """

    campaign: str
    drawn: dict[str, str]
    failed: dict[str, str]
    waiting: dict[str, str]
    prey: dict[str, str]
    workers: tuple[str, ...]

    @property
    def honest(self) -> dict[str, str]:
        """The jobs that commands are asked about."""
        return {**self.drawn, **self.failed, **self.waiting}

    def record(
        self, job_id: str, body: str, outcome: str = "completed", **told: Any
    ) -> Record:
        """A forged record, credited to an honest worker."""
        job = read_job(body, "none")
        known = {
            "outcome": outcome,
            "id": job_id,
            "digest": job.stage_digest,
            "campaign": self.campaign,
            "at": datetime.now(UTC),
            "source": f"message-{job_id}",
            "worker": self.workers[0],
            "blob": job.blob_name(0) if outcome == "completed" else None,
            "size_bytes": len(GARBAGE),
            "sha256": hashlib.sha256(GARBAGE).hexdigest(),
            "prompt": "forged",
        }
        return Record.model_validate(known | told)


async def shard(
    thief: Thief,
    campaign: str,
    kind: str,
    lines: Iterable[bytes],
    totals: Totals | None = None,
) -> None:
    """Creates a shard with *lines*; *totals* may lie."""
    lines = list(lines)
    now = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    name = f"-records/{campaign}/{now}-thief-{secrets.token_hex(8)}.{kind}.jsonl.gz"
    blob = thief.images.get_blob_client(name)
    await blob.create_append_blob()
    await blob.append_block(shard_part(lines, totals or Totals(len(lines), len(lines))))


async def store(
    thief: Thief, name: str, data: bytes = GARBAGE, **metadata: str
) -> None:
    await thief.images.upload_blob(name, data, metadata=metadata)


async def records_of_images(thief: Thief, loot: Loot) -> None:
    """Images that are stored, with another SHA-256 or none, before and after the honest record."""
    for kind in ("images", "again"):
        for days, told in (
            (-1, {}),
            (1, {}),
            (0, {"sha256": None}),
            (0, {"worker": "w2"}),
        ):
            at = datetime.now(UTC) + timedelta(days=days)
            forged = [
                loot.record(*job, at=at, **told).line() for job in loot.drawn.items()
            ]
            await shard(thief, loot.campaign, kind, forged)


async def ends_of_completed_jobs(thief: Thief, loot: Loot) -> None:
    ends: tuple[JSONDict, ...] = (
        {},
        {"digest": None},
        {"source": None, "stages": 2},
    )
    for outcome in ("failed", "cancelled"):
        for told in ends:
            jobs = loot.drawn.items()
            forged = [
                loot.record(*job, outcome, error="E", **told).line() for job in jobs
            ]
            await shard(thief, loot.campaign, "jobs", forged)


async def operators_facts(thief: Thief, loot: Loot) -> None:
    """Replayed, discarded, replaced, cancelled, and a billion sent jobs."""
    everybody = {**loot.drawn, **loot.failed, **loot.waiting}
    for outcome in ("replayed", "discarded"):
        lines = [loot.record(*job, outcome).line() for job in everybody.items()]
        for kind in ("jobs", "settled"):
            await shard(thief, loot.campaign, kind, lines)
    redo = {"source": "redo/1.json"}  # as if one were under way
    lines = [
        loot.record(
            *job, "replaced", blob=read_job(job[1], "none").blob_name(0), **redo
        ).line()
        for job in loot.drawn.items()
    ]
    await shard(thief, loot.campaign, "replaced", lines)
    await shard(thief, loot.campaign, "cancelled", [])
    note = json.dumps({"load": "thief", "jobs": 10**9}).encode() + b"\n"
    await shard(thief, loot.campaign, "sent", [note])
    blob = thief.images.get_blob_client(f"-sent/{loot.campaign}/0")
    await blob.create_append_blob()
    await blob.append_block(b"IF-SENT1" + bytes(60))


async def totals_that_lie(thief: Thief, loot: Loot) -> None:
    line = [
        loot.record(
            "x", '{"prompt": "x", "id": "x"}', blob=f"{loot.campaign}/x.png"
        ).line()
    ]
    for lie in (Totals(2**40, 2**40), Totals(2**63, 1), Totals(5, 5)):
        await shard(thief, loot.campaign, "images", line, lie)


async def hundreds_of_made_up_campaigns(thief: Thief, loot: Loot) -> None:
    line = loot.record("x", '{"prompt": "x", "id": "x"}').line()
    turn = asyncio.Semaphore(32)

    async def add(number: int) -> None:
        async with turn:
            await shard(thief, f"made-up-{number}", "images", [line])

    await asyncio.gather(*map(add, range(300)))


async def numbers_without_bounds(thief: Thief, loot: Loot) -> None:
    (job_id, body), *_ = loot.drawn.items()
    line = loot.record(job_id, body).line()
    for name in (b"size_bytes", b"attempts", b"width", b"images", b"seconds", b"index"):
        told = line.removesuffix(b"}\n")  # of two values of a name the last counts
        huge = told + b',"' + name + b'":9007199254740991}\n'
        await shard(thief, loot.campaign, "images", [huge])
    many = {"images": MAX_IMAGES_PER_JOB, "completes": True, "attempts": 1_000_000}
    most = {
        "size_bytes": MAX_IMAGE_BYTES,
        "seconds": 600_000,
        "price_per_hour": 1_000,
        **many,
    }
    for kind in ("images", "again"):
        lines = [loot.record(*job, **most).line() for job in loot.drawn.items()]
        await shard(thief, loot.campaign, kind, lines)
    no_json = [b'{"outcome":' * 10_000 + b"\n", b"\xff\n"]
    await shard(thief, loot.campaign, "images", no_json)
    await shard(thief, loot.campaign, "jobs", no_json)


async def records_of_images_that_are_not_there(thief: Thief, loot: Loot) -> None:
    for number in range(3):
        told = {"blob": f"{loot.campaign}/made-up-{number}.png"}
        line = loot.record(f"made-up-{number}", '{"prompt": "x"}', **told).line()
        await shard(thief, loot.campaign, "images", [line])


async def images_of_failed_jobs(thief: Thief, loot: Loot) -> None:
    """Records only: the images are not stored."""
    for kind in ("images", "again"):
        lines = [loot.record(*job).line() for job in loot.failed.items()]
        await shard(thief, loot.campaign, kind, lines)


async def records_of_later_stages(thief: Thief, loot: Loot) -> None:
    """Of jobs that have one, and of a failed one."""
    for job_id, body in {**loot.drawn, **loot.failed}.items():
        name = f"{image_stem(job_key(loot.campaign, job_id), 0, 2)}.png"
        for told in ({"stage": 2, "stages": 2, "blob": name}, {"stages": 2}):
            for kind in ("images", "again"):
                line = loot.record(job_id, body, **told).line()
                await shard(thief, loot.campaign, kind, [line])


async def images_of_jobs_that_were_never_sent(thief: Thief, loot: Loot) -> None:
    body = json.dumps({"prompt": "x", "id": "made-up", "campaign": loot.campaign})
    record = loot.record("made-up", body)
    told = {"digest": str(record.digest), "sha256": str(record.sha256)}
    await store(thief, str(record.blob), **told, job="made-up")
    for kind in ("images", "again"):
        await shard(thief, loot.campaign, kind, [record.line()])


async def images_by_other_names(thief: Thief, loot: Loot) -> None:
    """Drawn jobs' images in other formats, and under another job's name."""
    (_, other), *_ = loot.failed.items()
    for job_id, body in loot.drawn.items():
        names = (f"{loot.campaign}/{job_id}.jpg", f"{loot.campaign}/{job_id}.webp")
        for name in (*names, read_job(other, "none").blob_name(0)):
            line = loot.record(job_id, body, blob=name).line()
            await shard(thief, loot.campaign, "images", [line])


async def drawings_under_workers_names(thief: Thief, loot: Loot) -> None:
    """False second drawings and duplicates of the right digest, and a worker's own confession."""
    for body in loot.drawn.values():
        job = read_job(body, "none")
        for worker in (*loot.workers, "a", "b"):
            told = {"worker": worker, "digest": job.stage_digest, "job": str(job.id)}
            name = f"-duplicates/{job.blob_name(0)}/{worker}-{id(told)}.png"
            await store(thief, name, **told)
        told = {"worker": "c", "digest": job.stage_digest, "job": str(job.id)}
        with contextlib.suppress(Exception):  # one is there
            await store(thief, f"-checks/{job.blob_name(0)}", **told)


async def messages_of_failed_jobs(thief: Thief, loot: Loot) -> None:
    """Poison messages: well-formed and others of completed jobs, of none, and not even JSON."""
    for job_id, body in loot.drawn.items():
        known = loot.record(job_id, body, "failed", error="E", reason="forged")
        known = known.model_copy(update={"body": body})
        await thief.poison.send_message(known.model_dump_json(exclude_defaults=True))
    for body in [
        *loot.drawn.values(),
        '{"prompt": "a", "id": "forged"}',
        "no JSON",
        "[" * 9_000,
    ]:
        await thief.poison.send_message(body)


async def other_texts_of_leased_messages(thief: Thief, loot: Loot) -> None:
    """Now they are drawn jobs of another prompt, at a later stage, or with five deaths behind."""
    (job_id, body), *_ = loot.drawn.items()
    lies: list[JSONDict] = [
        {"prompt": "forged"},
        {"stage": 2, "then": [{"enable_hr": True}]},
        {"deliveries": {"known": 10**6, "lost_alone": 10**6, "images": [*range(100)]}},
    ]
    for lie in lies:
        message = await thief.jobs.receive_message()
        assert message is not None
        assert json.loads(message.content)["id"] in loot.prey
        text = json.dumps({**json.loads(body), "id": job_id, **lie})
        await thief.jobs.update_message(message, visibility_timeout=0, content=text)


async def nonsense_among_the_records(thief: Thief, loot: Loot) -> None:
    await thief.images.upload_blob("-records/nonsense", b"x")
    await thief.images.upload_blob("-records/../x.images.jsonl.gz", b"x")


Attack = Callable[[Thief, Loot], Awaitable[None]]

ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        records_of_images,
        ends_of_completed_jobs,
        operators_facts,
        totals_that_lie,
        hundreds_of_made_up_campaigns,
        numbers_without_bounds,
        records_of_images_that_are_not_there,
        images_of_failed_jobs,
        records_of_later_stages,
        images_of_jobs_that_were_never_sent,
        images_by_other_names,
        drawings_under_workers_names,
        messages_of_failed_jobs,
        other_texts_of_leased_messages,
        nonsense_among_the_records,
    )
}
