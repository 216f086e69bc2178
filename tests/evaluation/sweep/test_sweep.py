"""`imagefleet sweep`: one campaign of captions x settings, sent once."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import forks
import polling
from browsing import visible
from cli import console, options
from evaluation.sweep import manifest
from evaluation.sweep.source import CaptionFile, SweepSource, all_groups
from fleet.keys import mint
from imagefleet.caption import caption_of
from imagefleet.job.message import read_job
from imagefleet.records import ledger
from imagefleet.records.record import Record, of_job
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from in_process import Imagefleet, assert_refused, told

pytestmark = pytest.mark.slow

SETTINGS = (
    "--set",
    "cfg_scale=1.5,7",
    "--set",
    "sampler_name=PLMS",
    "--set",
    "steps=50",
)
SWEEP = ("--campaign", "curve", *SETTINGS)


@pytest.fixture
def captions(tmp_path) -> Path:
    path = tmp_path / "c.txt"
    path.write_text("a red house\na (blue) boat\na green hill\n")
    return path


def bodies_in(settings: StorageSettings) -> list[JSONDict]:
    async def browse() -> list[JSONDict]:
        async with open_storage(settings) as storage:
            return [json.loads(each.body) async for each in visible(storage.queue)]

    return asyncio.run(browse())


def local(folder: Path) -> StorageSettings:
    return StorageSettings(storage=f"local:{folder / 'imagefleet-data'}")


def test_a_dry_run_says_the_groups_and_touches_nothing(
    in_process: Imagefleet, captions: Path, tmp_path
):
    shown = in_process("sweep", "c.txt", *SWEEP, "--dry-run")
    as_json = in_process("sweep", "c.txt", *SWEEP, "--dry-run", "--json")

    assert shown.returncode == console.EXIT_DONE, shown.stderr
    assert "3 captions x 2 groups: 6 jobs" in shown.stdout
    assert "cfg-1.5" in shown.stdout
    found = json.loads(as_json.stdout)
    assert [each["name"] for each in found["groups"]] == ["cfg-1.5", "cfg-7.0"]
    assert found["captions"]["sha256"] in shown.stdout
    assert list(tmp_path.iterdir()) == [captions]


def test_the_stages_of_a_chain_are_in_each_job(
    in_process: Imagefleet, captions: Path, tmp_path
):
    stages = [
        {"model": "upscaler", "cfg_scale": 1.5, "steps": 20, "denoising_strength": 0.5}
    ]
    chained = ("--set", "model=base", "--set", f"then={json.dumps(stages)}")
    elsewhere = ("--model", "base", "--model", "upscaler")
    models = tmp_path / "imagefleet-data" / "files" / "models"
    models.mkdir(parents=True)
    (models / "sdxl.safetensors").touch()

    unknown = in_process("sweep", "c.txt", *SWEEP, *chained, "--model", "base")
    result = in_process("sweep", "c.txt", *SWEEP, *chained, *elsewhere, "--json")

    assert "no worker can have the model 'upscaler'" in unknown.stderr
    assert told(result)["sent"] == 6
    again = in_process(
        "sweep", "c.txt", *SWEEP, "--set", "model=base", "--model", "base"
    )
    assert "another field of all its jobs differs" in again.stderr

    async def read() -> list[JSONDict]:
        async with open_storage(local(tmp_path)) as storage:
            queue = storage.models.of("base")["normal"]
            return [json.loads(each.body) async for each in visible(queue)]

    jobs = asyncio.run(read())
    assert len(jobs) == 6
    assert {each.get("cfg_scale", 7) for each in jobs} == {1.5, 7}
    assert all(each["then"] == stages for each in jobs)


def test_a_sweep_fills_the_queue_and_leaves_its_manifest(
    in_process: Imagefleet, captions: Path, tmp_path
):
    shared = (
        "--set",
        "width=64",
        "--set",
        "height=72",
        "--set",
        "negative_prompt=bad, worse",
    )
    result = in_process("sweep", "c.txt", *SWEEP, *shared)
    jobs = bodies_in(local(tmp_path))

    assert result.returncode == console.EXIT_DONE, result.stderr
    assert "6 jobs sent" in result.stderr
    assert {job["id"] for job in jobs} == {
        manifest.job_id(group, number)
        for group in ("cfg-1.5", "cfg-7.0")
        for number in range(3)
    }
    assert {(job["width"], job["height"], job["negative_prompt"]) for job in jobs} == {
        (64, 72, "bad, worse")
    }

    async def read() -> tuple[manifest.Sweep | None, int | None]:
        async with open_storage(local(tmp_path)) as storage:
            return await manifest.read(storage, "curve"), await ledger.Ledger(
                storage, "curve"
            ).count()

    found, jobs_sent = asyncio.run(read())
    assert found is not None
    assert [
        (each.name, each.guidance, each.sampler, each.steps) for each in found.groups
    ] == [
        ("cfg-1.5", 1.5, "plms", 50),
        ("cfg-7.0", 7.0, "plms", 50),
    ]
    assert found.captions == manifest.digest(
        ["a red house", "a (blue) boat", "a green hill"]
    )
    assert jobs_sent == 6


def test_the_same_sweep_again_adds_nothing(
    in_process: Imagefleet, captions: Path, tmp_path
):
    first = in_process("sweep", "c.txt", *SWEEP, "--json")
    again = in_process("sweep", "c.txt", *SWEEP, "--json")
    other = in_process("sweep", "c.txt", *SWEEP, "--seed", "3")

    numbers = [json.loads(each.stdout)["sent"] for each in (first, again)]
    assert numbers == [6, 0]
    assert len(bodies_in(local(tmp_path))) == 6
    assert_refused(other, "campaign curve is another sweep already: its seed")

    restarted = in_process("sweep", "c.txt", *SWEEP, "--restart", "--json")
    refused = in_process("sweep", "c.txt", *SWEEP, "--seed", "3", "--restart")
    assert json.loads(restarted.stdout)["sent"] == 6
    assert refused.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert set(Counter(job["id"] for job in bodies_in(local(tmp_path))).values()) == {2}


def test_a_killed_sweep_goes_on_where_its_ledger_ends(
    in_process: Imagefleet, start: Callable[..., forks.Fork], tmp_path
):
    (tmp_path / "c.txt").write_text(
        "".join(f"caption {number}\n" for number in range(400))
    )
    arguments = (
        "sweep",
        "c.txt",
        "--campaign",
        "curve",
        "--set",
        "cfg_scale=1,2,3,4,5",
    )
    process = start(*arguments, "--quiet", "--rate", "2000")

    async def noted() -> int:
        async with open_storage(local(tmp_path)) as storage:
            return await ledger.Ledger(storage, "curve").count() or 0

    def known() -> int:
        return asyncio.run(noted())

    polling.until_in_thread(
        known, lambda jobs: process.poll() is not None or jobs >= 100
    )
    process.kill()
    process.wait()
    queued = len(bodies_in(local(tmp_path)))
    assert 100 <= queued < 2_000

    before = known()
    result = in_process(*arguments, "--json")

    ids = Counter(job["id"] for job in bodies_in(local(tmp_path)))
    assert json.loads(result.stdout)["sent"] == 2_000 - before
    assert json.loads(result.stdout)["finished"] is True
    assert (len(ids), ids.total()) == (2_000, 2_000 - before + queued)
    counted = json.loads(in_process("status", "--json").stdout)["campaigns"]
    assert [each["sent"] for each in counted] == [2_000]


def test_the_tokens_of_an_operator_suffice(
    in_process: Imagefleet,
    azurite_settings: StorageSettings,
    captions: Path,
):
    async def messages() -> int:
        async with open_storage(azurite_settings) as owner:
            await owner.create()
            return (await owner.queue.depth()).messages

    assert asyncio.run(messages()) == 0
    minted = mint.Minter(azurite_settings).mint(ROLES["operator"], timedelta(hours=1))
    names = ("queue", "container", "files_container")
    flags = [
        f"{options.flag(name)}={getattr(azurite_settings, name)}" for name in names
    ]
    flags += [f"--storage={minted.storage}", f"--sas={minted.sas}", "--verify-share=0"]

    for _ in range(2):
        result = in_process("sweep", "c.txt", *SWEEP, *flags)
        assert result.returncode == console.EXIT_DONE, result.stderr
    assert asyncio.run(messages()) == 6


def test_the_images_of_a_sweep_say_their_group_in_their_records(captions: Path):
    swept = SweepSource(
        CaptionFile(captions), all_groups([1.5, 7], ["PLMS"], [50]), "curve"
    )
    found = [
        Record(outcome="completed", at=datetime.now(UTC), **of_job(job))
        for job in (read_job(body, "unused") for body in swept.bodies())
    ]

    assert Counter(record.id.rpartition("_")[0] for record in found) == {
        "cfg-1.5": 3,
        "cfg-7.0": 3,
    }
    assert {caption_of(record) for record in found} == set(CaptionFile(captions).read())
    by_caption = {(record.id.rpartition("_")[2], record.seed) for record in found}
    assert len(by_caption) == 3, "one seed in both groups"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--set", "cfg_scale=1.5,x"), "guidance: should be a valid number"),
        (("--set", "steps=20.5"), "steps: should be a valid integer"),
        (("--set", "lora_strength=1"), "--set lora_strength goes with --set lora=NAME"),
        (("--set", "steps"), "--set steps: should be FIELD=VALUES"),
        (("--set", "seed=1"), "--set seed: it follows from the caption and --seed"),
        (("--set", "stepz=1"), "set stepz: a job has no such field"),
        (("--set", "width=63"), "width: "),
        ((*SETTINGS, "--set", "steps=20"), "--set steps is there twice"),
        (("--model", "sd15"), "--model sd15 is none of --set model"),
        (("--campaign", "../x"), "--campaign: use 1 to 128 letters"),
        (("--set", "model=a,b,a"), "two groups would have the name"),
        (("--set", "then=x"), "then: should be"),
        (("--set", 'then=[{"model": "a", "id": "b"}]'), "stage 2: id is the job's"),
        (("--set", "model=none"), "no worker can have the model 'none'"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_sent(
    in_process: Imagefleet,
    captions: Path,
    tmp_path,
    arguments: tuple[str, ...],
    sentence: str,
):
    (tmp_path / "imagefleet-data" / "files" / "models").mkdir(parents=True)
    (tmp_path / "imagefleet-data" / "files" / "models" / "sdxl.safetensors").touch()
    result = in_process("sweep", "c.txt", "--campaign", "curve", *arguments)

    assert result.returncode != console.EXIT_DONE
    assert sentence in result.stderr
    corrected = in_process("sweep", "c.txt", "--campaign", "curve", "--json")
    assert json.loads(corrected.stdout)["sent"] == 3, (
        "the mistake left no manifest behind"
    )
