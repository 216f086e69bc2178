"""A storm's jobs whose ids clash on purpose, and what has to be true of them in the end.

A tenth share their ids with jobs of other content. `imagefleet load` refuses such files, so all
messages are those of a foreign producer; some are exact copies of others.
"""

import base64
import json
import random
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from browsing import visible
from imagefleet import aio, errors
from imagefleet.job.message import Job, read_job
from imagefleet.storage import dead_letter
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from storm_jobs import BAD_EVERY, STAGE_SEEDS, StormJob, drawings
from storm_worker import BAD_STEPS, is_image_of

#: One job in so many has an id that another has, too.
CLASH_EVERY = 10

#: One message in so many is sent twice.
COPY_EVERY = 40

#: What rivals are, beside the job whose id they have.
CHANGES = ("prompt", "seed", "steps", "images", "format", "later stage", "stages")

CAMPAIGN = "default"

#: The campaign of those whose names were taken, sent again.
RENAMED = "renamed"


class Key(NamedTuple):
    """What a job is: its id, and the digest of its content."""

    id: str
    digest: str


def named_jobs(count: int) -> Iterator[StormJob]:
    """Jobs of ids of their own, less those of `rivals`: single images, batches, chains, bad ones.

    Beside a batch `j16` there is a job `j16-0`, as the batch's first image was once called.
    """
    for number in range(count - count // CLASH_EVERY):
        job: StormJob = {"id": f"j{number}", "prompt": "a house", "seed": number}
        if number % BAD_EVERY == BAD_EVERY - 1:
            job["steps"] = BAD_STEPS
        elif number % 8 == 0:
            job["n_iter"] = 2
        elif number % 8 == 4:
            job["then"] = [{"seed": number + STAGE_SEEDS}]
        elif number % 16 == 1:
            job["id"] = f"j{number - 1}-0"
        yield job


def rivals(count: int, chance: random.Random) -> list[StormJob]:
    """Jobs of other content whose ids are those of some of the `named_jobs`; some share one."""
    named = [job for job in named_jobs(count) if job.get("steps") != BAD_STEPS]
    found: dict[Key, StormJob] = {key_of(job): job for job in named}
    for number in range(count // CLASH_EVERY):
        change = CHANGES[number % len(CHANGES)]
        while (
            key := key_of(rival := _changed(chance.choice(named), change, chance))
        ) in found:
            pass
        found[key] = rival
    return list(found.values())[len(named) :]


def _changed(job: StormJob, change: str, chance: random.Random) -> StormJob:
    rival = {name: value for name, value in job.items() if name != "then"}
    then = [{"seed": int(str(job["seed"])) + chance.randrange(2, 9) * STAGE_SEEDS}]
    match change:
        case "prompt":
            rival["prompt"] = f"a cat {chance.randrange(100)}"
        case "seed":
            rival["seed"] = chance.randrange(STAGE_SEEDS, 2 * STAGE_SEEDS)
        case "steps":
            rival["steps"] = chance.choice([BAD_STEPS, 20, 25, 30])
        case "images":
            rival["n_iter"] = 3 if "n_iter" in job else 2
        case "format":
            rival["output"] = {"format": chance.choice(["jpeg", "webp"])}
        case "later stage" | "stages" if "n_iter" in job:
            return {"prompt": "a fish", "then": then} | {
                **rival,
                "n_iter": 1,
                "prompt": "a fish",
            }
        case "stages" if "then" in job:
            pass  # its first stage alone, whose image is the same
        case _:
            rival["then"] = then
    return rival


def messages(jobs: Iterable[StormJob], chance: random.Random) -> list[str]:
    """The messages of a foreign producer: with and without their digest, some in base64."""
    found = []
    for job in jobs:
        text = chance.choice([json.dumps(job), _read(job).to_message()])
        if chance.random() < 0.2:
            text = base64.b64encode(text.encode()).decode()
        found.append(text)
    return found


def copies(jobs: Iterable[StormJob], chance: random.Random) -> list[StormJob]:
    return [job for job in jobs if chance.random() * COPY_EVERY < 1]


def key_of(job: StormJob) -> Key:
    return _key(_read(job))


def _read(job: StormJob) -> Job:
    return read_job(json.dumps(job), "none")


def _key(job: Job) -> Key:
    return Key(str(job.id), job.digest)


#: Runs `imagefleet ARGUMENTS`; returns what it prints.
Console = Callable[..., Awaitable[str]]


@dataclass(slots=True)
class Outcomes:
    """What has become of the jobs, by what is stored and what is in the poison queue."""

    completed: set[Key]
    failed: dict[Key, dead_letter.FailedJob]
    #: What cannot be.
    errors: list[str]
    #: Those of each job's stages.
    digests: dict[Key, list[str]]
    #: Jobs that nobody can draw.
    bad: set[Key]

    @property
    def taken(self) -> list[Key]:
        """Those that failed for their names alone; a bad job fails for either reason."""
        taken = [
            key for key, each in self.failed.items() if each.error == "NameTakenError"
        ]
        return [key for key in taken if key not in self.bad]


async def outcomes_of(
    storage: Storage, sent: list[StormJob], campaign: str
) -> Outcomes:
    """Tells the outcomes of the jobs *sent* by their pixels alone; each has to have exactly one."""
    sent_as = {key_of(job): job for job in sent}
    jobs = {key: _read(job) for key, job in sent_as.items()}
    wrong = list[str]()
    owners = await _owners(storage, sent, campaign, wrong)
    failed = await _failed(storage, campaign, wrong)
    completed = set[Key]()
    bad = set[Key]()
    for key, job in jobs.items():
        names = drawings([sent_as[key]])
        own = {(name, digest, job.stages) for name in names for digest in names[name]}
        if own <= owners:
            completed.add(key)
        if is_bad := BAD_STEPS in {stage.steps for stage in job.stages_left()}:
            bad.add(key)
        outcomes = [*["completed"] * (key in completed), *["failed"] * (key in failed)]
        if len(outcomes) != 1:
            wrong.append(f"{_shown(key)} has {outcomes or 'no outcome'}")
        elif key in failed and not is_bad and failed[key].error != "NameTakenError":
            wrong.append(
                f"{_shown(key)} failed: {failed[key].error}: {failed[key].reason}"
            )
        elif key in completed and is_bad:
            wrong.append(f"{_shown(key)} cannot be drawn, and is completed")
    wrong += [
        f"{_shown(key)} failed, which nobody has sent"
        for key in failed.keys() - jobs.keys()
    ]
    ids = {key.id for key in completed}
    good = {key.id for key in jobs.keys() - bad}
    wrong += [f"of {name}, none is completed" for name in good - ids]
    digests = {
        key: [each.stage_digest for each in job.stages_left()]
        for key, job in jobs.items()
    }
    known = {key: failed[key] for key in jobs.keys() & failed.keys()}
    return Outcomes(completed, known, wrong, digests, bad)


async def _owners(
    storage: Storage, jobs: Iterable[StormJob], campaign: str, wrong: list[str]
) -> set[tuple[str, str, int]]:
    """The stored images, each with the digest of its stage, by its pixels, and its job's stages."""
    candidates = drawings(jobs)
    found = set[tuple[str, str, int]]()
    async for blob in storage.blobs.records(f"{campaign}/"):
        data = await storage.blobs.read(blob.name) or b""
        of = candidates[blob.name].items()
        drawn = [digest for digest, drawing in of if is_image_of(*drawing, data)]
        # A batch's first image may be drawn as another job's of that id: its pixels tell no more.
        if (owner := blob.metadata.get("digest", "?")) not in drawn:
            wrong.append(f"{blob.name} of {owner[:8]} is the picture of {drawn}")
        found.add((blob.name, owner, int(blob.metadata.get("stages", "1"))))
    return found


async def _failed(
    storage: Storage, campaign: str, wrong: list[str]
) -> dict[Key, dead_letter.FailedJob]:
    found = dict[Key, dead_letter.FailedJob]()
    async for message in visible(storage.poison):
        record = dead_letter.FailedJob.parse(message.body)
        if record is None:
            wrong.append(f"no record of a failed job: {message.body[:200]}")
            continue
        try:
            job = read_job(record.body or "", message.id)
        except errors.JobError as error:
            wrong.append(
                f"a failed job cannot be sent again: {error}: {message.body[:200]}"
            )
            continue
        if (job.campaign or CAMPAIGN) != campaign:
            continue
        found[key := _key(job)] = record
        if record.id != key.id or record.digest not in {
            None,
            key.digest,
            job.stage_digest,
        }:
            wrong.append(f"{_shown(key)} failed as {record.id} {record.digest}")
    return found


async def compare_counts(
    settings: StorageSettings, console: Console, truth: Outcomes, campaign: str
) -> None:
    """Adds to the errors what the client and the console say otherwise than is true."""
    true = {
        "completed": Counter(key.id for key in truth.completed),
        "failed": Counter(key.id for key in truth.failed),
    }
    told = {name: Counter[str]() for name in ("completed", "failed")}
    async with aio.Fleet(open_storage(settings)) as fleet:
        counts = (await fleet.campaigns())[campaign]
        async for result in fleet.results(campaign):
            told[result.status][result.id] += 1
        failed = Counter([each.id async for each in fleet.failed(campaign=campaign)])
        for job in true["completed"]:
            if (status := await fleet.job(job, campaign).status()) != "completed":
                truth.errors.append(
                    f"the client says that {job} is {status}: one is completed"
                )
    for outcome, of_client in (*told.items(), ("failed", failed)):
        for job in sorted(of_client.keys() | true[outcome].keys()):
            if (says := of_client[job]) != (is_ := true[outcome][job]):
                truth.errors.append(
                    f"the client says {says} of {job} {outcome}: they are {is_}"
                )
    status = json.loads(await console("status", "--json"))
    (row,) = [each for each in status["campaigns"] if each["campaign"] == campaign]
    listing = json.loads(await console("failed", campaign, "--json", "--limit", "0"))
    results = [
        json.loads(line)
        for line in (await console("results", campaign, "--json")).splitlines()
    ]
    failed_results = [each for each in results if each["outcome"] == "failed"]
    completed = len(truth.completed)
    failed_count = len(truth.failed)
    for what, says, is_ in (
        ("campaigns: completed", counts.completed, completed),
        ("campaigns: failed", counts.failed, failed_count),
        ("campaigns: cancelled", counts.cancelled, 0),
        ("campaigns: pending", counts.pending or 0, 0),
        ("status: completed", row["completed"], completed),
        ("status: failed", row["failed"], failed_count),
        ("status: pending", row["pending"] or 0, 0),
        ("status: messages", status["queue"]["messages"], 0),
        ("failed: count", listing["count"], failed_count),
        ("results: failed", len(failed_results), failed_count),
    ):
        if says != is_:
            truth.errors.append(f"{what} is {says}, and {is_} in truth")
    verified = json.loads(await console("verify", "--quarantine", "--yes", "--json"))
    if verified["quarantined"] or verified["different"]:
        truth.errors.append(f"verify finds honest workers wrong: {verified}"[:1000])


def check_reasons(truth: Outcomes) -> None:
    """Adds an error for each job whose name was taken that does not name both jobs."""
    for key in truth.taken:
        reason = truth.failed[key].reason
        holders = [each for each in truth.completed if each.id == key.id]
        for names in ([key], holders):
            if not any(
                digest[:8] in reason for each in names for digest in truth.digests[each]
            ):
                truth.errors.append(f"{_shown(key)} does not name both jobs: {reason}")


async def renamed(console: Console, truth: Outcomes) -> list[StormJob]:
    """The jobs whose names were taken, as `failed --export` has them, with names of their own."""
    exported = await console("failed", "--error", "NameTakenError", "--export")
    jobs = [json.loads(line) for line in exported.splitlines()]
    jobs = [job for job in jobs if job.get("steps") != BAD_STEPS]
    if (count := len(jobs)) != len(truth.taken):
        truth.errors.append(f"{count} jobs are exported, of {len(truth.taken)}")
    return [
        job | {"campaign": RENAMED, "id": f"{job['id']}.{number}"}
        for number, job in enumerate(jobs)
    ]


async def untruths(
    settings: StorageSettings,
    storage: Storage,
    sent: list[StormJob],
    console: Console,
    calm: Callable[[Storage], Awaitable[None]],
) -> tuple[list[str], int]:
    """What is wrong in the end, and how many names were taken; *calm* lets workers do the rest.

    Jobs whose names were taken are sent again under names of their own, and have to complete.
    """
    truth = await outcomes_of(storage, sent, CAMPAIGN)
    check_reasons(truth)
    await compare_counts(settings, console, truth, CAMPAIGN)
    again = await renamed(console, truth)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(f"{json.dumps(job)}\n" for job in again)
        file.flush()
        await console("load", file.name)
    await calm(storage)
    again = [{name: job[name] for name in job if name != "failure"} for job in again]
    then = await outcomes_of(storage, again, RENAMED)
    await compare_counts(settings, console, then, RENAMED)
    wrong = [f"the name of {_shown(key)} is taken as well" for key in then.taken]
    return [*truth.errors, *then.errors, *wrong], len(truth.taken)


def _shown(key: Key) -> str:
    return f"{key.id} ({key.digest[:8]})"
