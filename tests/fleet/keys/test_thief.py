"""After all that a stolen worker's token allows, the answers about honest jobs are as before."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import pytest

import exported
import thief
from fleet.gallery.campaign import Campaign
from fleet.gallery.index import Filter, Tab
from fleet.gallery.server import _prompt
from fleet.monitor.exporter import Exporter
from fleet.settings import ExporterSettings
from fleet.webhooks.events import Event, Source, State
from imagefleet import aio, errors
from imagefleet.job.message import read_job
from imagefleet.records.batch import Submission, Watch
from imagefleet.records.ledger import Ledgers
from imagefleet.signing import SigningKey
from imagefleet.storage.azure.roles import ROLES, Role
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from worker.files import manifest

pytestmark = pytest.mark.long

Imagefleet = Callable[..., Any]
RunWorker = Callable[..., Awaitable[None]]


@pytest.fixture
def storage_settings(azurite_settings: StorageSettings) -> StorageSettings:
    """Tokens are Azure's."""
    return azurite_settings


@pytest.fixture
def ask(
    in_process,
    storage_settings: StorageSettings,
    monkeypatch,
) -> Imagefleet:
    for name in ("storage", "queue", "container", "files_container"):
        monkeypatch.setenv(
            f"IMAGEFLEET_{name.upper()}", str(getattr(storage_settings, name))
        )

    def run(*arguments: str) -> Any:
        return in_process(*arguments)

    return run


def bodies(*ids: str, **fields: object) -> dict[str, str]:
    """Jobs of the campaign `spring`."""
    known = {"campaign": "spring", "steps": 20, **fields}
    return {
        each: json.dumps({"id": each, "prompt": f"a house {each}", **known})
        for each in ids
    }


@pytest.fixture
async def role(
    request,
    storage: Storage,
    tmp_path,
    monkeypatch,
) -> Role:
    """Whose tokens were stolen; with the param `signed` the fleet's jobs are."""
    if request.param == "signed":
        key = SigningKey.create(tmp_path / "key.pem")
        monkeypatch.setenv("IMAGEFLEET_SIGNING_KEY", str(tmp_path / "key.pem"))
        monkeypatch.setenv("IMAGEFLEET_TRUSTED_KEY", key.public)
        await storage.create()
        for kind in ("loras", "embeddings"):
            name = f"{kind}/manifest.json"
            listed = manifest.encode(kind, {}, key)
            await storage.files.create(name, listed, "application/json", {})
    return (
        ROLES["worker"].for_chains() if request.param == "chains" else ROLES["worker"]
    )


@pytest.fixture
async def loot(
    role: Role,
    storage: Storage,
    storage_settings: StorageSettings,
    run_worker: RunWorker,
) -> thief.Loot:
    """An honest campaign: some jobs drawn, all of them twice, one failed, and some that wait."""
    drawn = bodies("a", "b", "c", "d")
    failed = bodies("bad", prompt="a house <lora:none:1>")
    waiting = bodies("late", "later")
    prey = bodies("prey-1", "prey-2", "prey-3")
    async with aio.connect(
        **storage_settings.model_dump(exclude_defaults=True)
    ) as fleet:
        await fleet.submit(
            [read_job(body, "none") for body in {**drawn, **failed}.values()]
        )
        await run_worker("w1")
        second = [
            read_job(body, "none") for body in bodies(*drawn, verify=True).values()
        ]
        await storage.queue.send([job.to_message(fleet.signer) for job in second])
        await run_worker("w2")
        await fleet.submit([read_job(body, "none") for body in prey.values()])
        await fleet.submit([read_job(body, "none") for body in waiting.values()])
        # As a worker that leased them has read them.
        drawn = {
            name: read_job(body, "none").to_message(fleet.signer)
            for name, body in drawn.items()
        }
    return thief.Loot("spring", drawn, failed, waiting, prey, ("w1", "w2"))


#: What changes by itself, or is what a thief may change: the number of what does not fit.
VOLATILE = {
    "misfits",
    "unfit",
    "unknown",
    "damaged",
    "folder",
    "at",
    "oldest_age_seconds",
    "damage",
    "unfit_records",
    "messages",
    "images_per_second",
    "seconds",
    "made_at",
    "last_at",
    "first_at",
    "seconds_left",
}


#: What counts messages and images that are the thief's: `SECURITY.md` lists each.
CAN = {
    "export dry run",
    "redo w1 dry run",
    "redo w2 dry run",
}

#: Of a report, what no second drawing changes: by whom, and for how long it was drawn, is what
#: its record says, as `SECURITY.md` has it.
COUNTED = ("jobs", "images", "images_redelivered", "failed")


def stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: stable(each) for name, each in value.items() if name not in VOLATILE
        }
    return [stable(each) for each in value] if isinstance(value, list) else value


def differences(before: Any, after: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    """The values that are others, by the way to them."""
    if isinstance(before, dict) and isinstance(after, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for name in {**before, **after}:
            found |= differences(before.get(name), after.get(name), f"{where}/{name}")
        return found
    if isinstance(before, list) and isinstance(after, list) and before != after:
        gone = [each for each in before if each not in after]
        return {where: (gone, [each for each in after if each not in before])}
    return {} if before == after else {where: (before, after)}


def pictures(folder: Path, loot: thief.Loot) -> dict[str, str]:
    """The hash of each picture of an honest job that was written."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.png"))
        if path.stem in loot.honest
    }


def of_honest(lines: Iterable[JSONDict], loot: thief.Loot) -> list[Any]:
    """Each line about an honest job once, in order."""
    told = {
        json.dumps(stable(each), sort_keys=True)
        for each in lines
        if each["id"] in loot.honest
    }
    return sorted(told)


def commands(ask: Imagefleet, loot: thief.Loot, tmp_path: Path, run: str) -> JSONDict:
    """What each command says about the honest campaign and its jobs."""
    found: JSONDict = {}

    def told(*arguments: str) -> Any:
        result = ask(*arguments, "--json")
        assert result.returncode in {0, 4}, (arguments, result.stderr)
        return stable(json.loads(result.stdout))

    def lines(*arguments: str) -> list[Any]:
        result = ask(*arguments)
        assert result.returncode == 0, (arguments, result.stderr)
        return [json.loads(line) for line in result.stdout.splitlines()]

    for job_id in ("a", "bad", "late"):
        found[f"job {job_id}"] = told("status", f"spring/{job_id}")
    status = told("status", "spring")
    found["status spring"] = {name: status[name] for name in status if name != "queues"}
    found["campaigns"] = [
        each
        for each in told("status")["campaigns"]
        if each.get("campaign", "spring") == "spring"
    ]
    found["results"] = of_honest(lines("results", "spring", "--json"), loot)
    failed = ("results", "spring", "--outcome", "failed", "--json")
    found["results failed"] = of_honest(lines(*failed), loot)
    ask("results", "spring", "--download", f"images-{run}")
    found["download"] = pictures(tmp_path / f"images-{run}", loot)
    found["export dry run"] = told("export", "spring", f"shards-{run}", "--dry-run")
    ask("export", "spring", f"shards-{run}")
    found["exported"] = [
        {name: row[name] for name in ("id", "prompt", "worker")}
        | {"sha256": hashlib.sha256(data).hexdigest()}
        for row, _, data in exported.samples(tmp_path / f"shards-{run}")
        if row["id"] in loot.honest
    ]
    report = told("report", "spring")
    found["report"] = {name: report[name] for name in COUNTED}
    found["failed"] = told("failed", "spring")
    for verb in ("replay", "discard"):
        found[f"{verb} dry run"] = told(verb, "spring", "--dry-run")
    for worker in loot.workers:
        found[f"redo {worker} dry run"] = told(
            "redo", "spring", "--worker", worker, "--dry-run"
        )
    verify = told("verify", "spring")
    found["accused"] = [
        each["worker"]
        for each in verify["workers"]
        if each["draws_wrong"]
        and each["compared"] == each["different"]
        and each["worker"] in loot.workers
    ]
    return found


async def picture_of(result: aio.Result) -> str:
    """The hash of a result's picture, or why there is none."""
    try:
        return hashlib.sha256(await result.data()).hexdigest()
    except errors.FleetError as error:
        return error.message


async def events_of(storage: Storage, *, each_job: bool) -> list[Event]:
    """What `imagefleet webhooks` would send."""
    state = State(address="https://example.com/hook", campaign="spring")
    source = Source(storage, state, "a fleet", each_job=each_job)
    while await source.read():
        pass
    await source.find_ends(is_patient=False)
    return list(state.waiting.values())


async def programs(
    loot: thief.Loot, storage: Storage, settings: StorageSettings
) -> JSONDict:
    """What the gallery, the exporter, webhooks and the client say."""
    found: JSONDict = {}
    sent = [
        each for each in await events_of(storage, each_job=True) if "id" in each.data
    ]
    found["webhooks of jobs"] = of_honest(
        ({**each.data, "event": each.id} for each in sent), loot
    )
    found["webhooks"] = [each.type for each in await events_of(storage, each_job=False)]
    campaign = Campaign(storage, "spring", 0.0)
    while not campaign.is_complete:
        await campaign.refresh()
    found["gallery counts"] = campaign.index.counts()
    for tab in get_args(Tab):
        view = await campaign.view(Filter(tab=tab))
        rows = campaign.index.records(view.seqs.tolist()).values()
        found[f"gallery {tab}"] = sorted((each[0].id, _prompt(each)) for each in rows)
    await campaign.close()
    exporter = Exporter(storage, ExporterSettings(**settings.model_dump()))
    await exporter.sample()
    queue = {
        "queue": storage.queue.name,
        "fleet": ExporterSettings(**settings.model_dump()).fleet_name,
    }
    found["exporter"] = exporter.registry.get_sample_value(
        "imagefleet_queue_messages", queue
    )
    async with aio.connect(**settings.model_dump(exclude_defaults=True)) as fleet:
        submission = Submission(storage, Ledgers(storage))
        wanted = [read_job(loot.honest[name], "none") for name in sorted(loot.honest)]
        list(submission.messages(wanted, None))
        watch = Watch(storage, submission.jobs.values(), {})
        while watch.is_behind:
            await watch.poll()
        results = [aio.Result(**each.fields(), fleet=fleet) for each in watch.found]
        listed = [each async for each in fleet.results("spring")]
        for name, some in (("waited for", results), ("client", listed)):
            found[name] = sorted(
                [
                    (
                        each.id,
                        each.status,
                        each.blobs,
                        each.blobs and await picture_of(each),
                    )
                    for each in some
                    if each.id in loot.honest
                ]
            )
    return found


#: One after the other in one storage.
TOGETHER = (
    pytest.param([*thief.ATTACKS], "worker", id="all of them"),
    pytest.param([*thief.ATTACKS], "signed", id="all of them, signed"),
)


#: One attack might hide another's harm: each is tried in the company of a few others as well, by
#: the role that may do all that a plain worker's may.
IN_GROUPS = [
    pytest.param([*thief.ATTACKS][group::4], "chains", id=f"group {group}")
    for group in range(4)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attacks", "role"), [*TOGETHER, *IN_GROUPS], indirect=["role"]
)
async def test_no_answer_about_honest_jobs_changes(
    attacks: list[str],
    role: Role,
    ask,
    loot: thief.Loot,
    storage: Storage,
    storage_settings: StorageSettings,
    tmp_path,
):

    async def answers(run: str) -> JSONDict:
        told = await asyncio.to_thread(commands, ask, loot, tmp_path, run)
        return told | await programs(loot, storage, storage_settings)

    before = await answers("before")
    async with thief.stealing(storage_settings, role) as stolen:
        for attack in attacks:
            await thief.ATTACKS[attack](stolen, loot)

    after = await answers("after")

    assert before["download"].keys() == {f"{each}.png" for each in loot.drawn}
    found = differences(before, after)
    changed = {way.split("/")[1] for way in found}
    assert changed <= CAN, found
    assert attacks != [*thief.ATTACKS] or changed == CAN, (
        "SECURITY.md says that these do"
    )
