"""The tokens of the role `worker` suffice for all of its work, and no letter of them is spare."""

import base64
import dataclasses
import json
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr

from benchmarks.stand_in import StandInEngine, draw_noise
from bundled import bundle_of
from bundled import job as job_message
from fleet.keys import mint
from imagefleet import errors
from imagefleet.files.kinds import TEXT
from imagefleet.records import reader
from imagefleet.storage.azure.roles import OPTIONAL, RESOURCES, ROLES, Role, name_of
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import Priority, Resource, StorageSettings
from worker import process
from worker.engine import contract
from worker.engine.pixel import text_states
from worker.leases import Lease, LeaseKeeper
from worker.metrics import Outcome
from worker.settings import WorkerSettings

#: Beside images, what says something about jobs and workers.
NOTES = ("-records/", "-models/", "-serving/")

#: The shortest lease, renewed after half of it.
LEASE_SECONDS = 2

WORKER = ROLES["worker"]

Load = Callable[[], StandInEngine]

#: Each permission of the role and what the worker cannot do without it.
NEEDED: dict[tuple[Resource, str], str] = {
    ("queue", "r"): "count and peek at messages",
    ("queue", "u"): "renew and hand back leased messages",
    ("queue", "p"): "lease and delete messages",
    ("poison", "a"): "add messages",
    ("blob", "c"): "create blobs",
    ("blob", "a"): "append to records",
    ("packs", "c"): "create blobs",
    ("packs", "r"): "read blobs",
    ("files", "r"): "read blobs",
}

LORA = json.dumps({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()

#: Random and as long as a message: it fits into no record, and goes into a blob of its own.
HUGE = base64.b64encode(os.urandom(49_050)).decode()

JOBS = [
    {"id": "plain", "prompt": "a house"},
    {"id": "taken", "prompt": "a house"},
    {"id": "styled", "prompt": "a house <lora:fox:1>"},
    {"id": "slow", "prompt": "a slow house"},
    {"id": "retried", "prompt": "a house at the second attempt"},
    {"id": "bad", "prompt": "a house", "sampler_name": "none"},
    {"id": "huge", "prompt": "a house", "unknown": HUGE},
    {"id": "drawn", "prompt": "a house <lora:missing:1>"},
]

PRIORITY_OF: dict[str, Priority] = {"plain": "high", "drawn": "low"}

#: The second of them fails at first, so what is stored of the bundle is read.
BUNDLE = ("a house", "a house at the second attempt, too")

ENDS = {"completed": 6, "duplicate": 2, "retried": 2, "failed": 3}


class Engine(StandInEngine):
    """Draws one image at a time: one until its lease is renewed, one fails at first."""

    def __init__(self, renewed: threading.Event) -> None:
        super().__init__(capacity=1, draw=self._draw_or_fail)
        self._failed: set[str] = set()
        self._renewed = renewed

    def _draw_or_fail(self, request: contract.ImageRequest) -> contract.Pixels:
        if "slow" in str(request.prompt):
            self._renewed.wait()
        prompt = str(request.prompt)
        if "second attempt" in prompt and prompt not in self._failed:
            self._failed.add(prompt)
            raise errors.TransientError("a failure")
        return draw_noise(request)


@pytest.fixture
async def owner(azurite_settings: StorageSettings) -> AsyncIterator[Storage]:
    """The storage with a LoRA, the jobs, and an image of one of them."""
    async with open_storage(azurite_settings) as storage:
        await storage.create()
        lora = len(LORA).to_bytes(8, "little") + LORA + b"x"
        await storage.files.create("loras/fox.safetensors", lora, "text/plain", {})
        for image in ("taken", "drawn"):
            await storage.blobs.create(
                f"default/{image}.png", b"another's", "image/png", {}
            )
        for job in JOBS:
            await storage.queues[PRIORITY_OF.get(job["id"], "normal")].send(
                [json.dumps(job)]
            )
        pair = (job_message(n, prompt=prompt) for n, prompt in enumerate(BUNDLE))
        await storage.queue.send([bundle_of(pair)])
        for message in await storage.queues["low"].receive(1, 60):
            await storage.queues["low"].release(
                message
            )  # as a worker that stored no record
        yield storage


@pytest.fixture(autouse=True)
def _hasty_worker(monkeypatch) -> None:
    monkeypatch.setattr("worker.pull.UNTIL_EMPTY_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr("worker.settle.FIRST_RETRY_SECONDS", 0.05)


@pytest.fixture
def load(monkeypatch) -> Iterator[Load]:
    """Loads an engine that draws the slow image until its lease was renewed, or cannot be."""
    renewed = threading.Event()
    renew = LeaseKeeper._renew

    async def note(self: LeaseKeeper, lease: Lease) -> None:
        try:
            await renew(self, lease)
        finally:
            if "slow" in lease.message.body:
                renewed.set()

    monkeypatch.setattr(LeaseKeeper, "_renew", note)
    monkeypatch.setattr("worker.gpu_thread.STOP_SECONDS", 0.1)  # it may be drawing
    yield lambda: Engine(renewed)
    renewed.set()


async def work(
    settings: StorageSettings,
    role: Role,
    cache: Path,
    load: Load,
) -> Counter[Outcome]:
    """What becomes of the jobs of a whole worker with the tokens of *role*."""
    minted = mint.Minter(settings).mint(role, timedelta(hours=1))
    outcomes: Counter[Outcome] = Counter()
    worker = WorkerSettings(
        **settings.model_dump(exclude={"storage", "sas"}),
        storage=minted.storage,
        sas=SecretStr(minted.sas),
        model="stand-in",
        cache=cache,
        name="a worker",
        lease_seconds=LEASE_SECONDS,
        until_empty=True,
    )
    await process.run_worker(
        worker, load=load, on_settled=lambda outcome: outcomes.update([outcome])
    )
    return outcomes


async def test_a_workers_tokens_suffice_for_all_that_it_does(
    azurite_settings: StorageSettings, owner: Storage, load: Load, tmp_path
):
    outcomes = await work(azurite_settings, WORKER, tmp_path, load)
    del outcomes["handed_back"]  # of what was pulled beyond a bundle
    assert outcomes == ENDS
    names = [name async for name in owner.blobs.names() if not name.startswith(NOTES)]
    folders = Counter(name.partition("/")[0] for name in names)
    assert folders == {"default": 6}
    assert await owner.blobs.read("default/taken.png") == b"another's"
    assert (await owner.poison.depth()).messages == 3
    images = {name for name in names if name.startswith("default/")} - {
        "default/taken.png"
    }
    images |= {"default/j0.png", "default/j1.png"}  # in packs
    assert {record.blob async for record in reader.images(owner, "default")} == images


class WithoutEncoder(StandInEngine):
    """A stage of a cascade that is given what the encoder says of the prompts."""

    text_encoder = "t5"


async def test_a_workers_tokens_suffice_to_read_text_states(
    azurite_settings: StorageSettings, tmp_path
):
    data = len(LORA).to_bytes(8, "little") + LORA + b"x"
    async with open_storage(azurite_settings) as storage:
        await storage.create()
        for prompt in ("a house", ""):
            name = f"{TEXT.folder}/{text_states.stem(prompt, 't5')}.safetensors"
            await storage.files.create(name, data, "text/plain", {})
        for prompt in ("a house", "another"):
            await storage.queue.send(
                [json.dumps({"id": prompt.split()[-1], "prompt": prompt})]
            )
    outcomes = await work(azurite_settings, WORKER, tmp_path, WithoutEncoder)
    assert outcomes == {"completed": 1, "failed": 1}


def test_each_permission_of_the_role_has_its_work():
    assert set(NEEDED) == {
        (resource, letter)
        for resource in RESOURCES
        # They have the letters of the other job queue.
        if resource not in OPTIONAL
        for letter in WORKER.letters(resource)
    }


@pytest.mark.parametrize(("resource", "letter"), NEEDED)
async def test_without_any_one_permission_a_worker_cannot_do_its_work(
    azurite_settings: StorageSettings,
    owner: Storage,
    load: Load,
    tmp_path,
    resource: Resource,
    letter: str,
):
    rest = getattr(WORKER, resource).replace(letter, "")
    less = dataclasses.replace(WORKER, **{resource: rest})
    with pytest.raises(errors.SetupError) as caught:
        await work(azurite_settings, less, tmp_path, load)
    complaint = caught.value.message
    names = [name_of(azurite_settings, resource)]
    if resource == "queue":
        names = list(azurite_settings.queues_of(None).values())
    assert any(repr(name) in complaint for name in names)
    what = (
        f"may not {NEEDED[resource, letter]}" if rest else "there is no SAS token for"
    )
    assert what in complaint
    assert "`imagefleet keys mint worker`" in complaint
