"""Loads in bundles: the same jobs in the same ones, whatever ends a load in between."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from browsing import visible
from imagefleet import errors
from imagefleet.records import ledger
from imagefleet.storage import bundle
from imagefleet.storage.open import Storage
from loadgen import sources
from loadgen.load import Load, Summary
from loadgen.settings import LoadSettings

JOBS = 100


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines = (
        json.dumps({"prompt": f"cat {n}", "id": f"{n}", "steps": 4})
        for n in range(JOBS)
    )
    path = tmp_path / "jobs.jsonl"
    path.write_text("\n".join(lines))
    return path


def read(file: Path) -> str:
    return file.read_text()


def write(file: Path, text: str) -> None:
    file.write_text(text)


async def load(storage: Storage, file: Path, **changes: Any) -> Summary:
    names = ("storage", "queue", "container", "files_container")
    known = {name: getattr(storage.settings, name) for name in names}
    restart = changes.pop("restart", False)
    settings = LoadSettings(**{**known, "bundle": 16, "verify_share": 0, **changes})
    source = sources.open_source(str(file), campaign="spring")
    return await Load(storage, source, settings, restart=restart).run(lambda _: None)


async def bodies(storage: Storage) -> list[str]:
    return [message.body async for message in visible(storage.queue)]


def names(found: list[str]) -> Counter[str]:
    return Counter(bundle.read(body).name for body in found if '"bundle"' in body)


async def messages(storage: Storage) -> list[str]:
    """The plain messages in the main queue, bundles as they are."""
    queue = storage.queues["normal"]
    return [leased.body for _ in range(8) for leased in await queue.receive(32, 60)]


async def test_a_bundle_is_the_messages_that_would_be_sent_one_by_one(
    storage: Storage, file: Path
):
    summary = await load(storage, file)
    assert (summary.sent, summary.confirmed, summary.new) == (JOBS, JOBS, JOBS)
    assert (await storage.queue.depth()).messages == JOBS
    found = await messages(storage)
    assert len(found) == 7
    expanded = [each for body in found for each in bundle.messages_of(body)]
    await storage.queue.clear()
    await load(storage, file, bundle=1, restart=True)
    assert Counter(expanded) == Counter(await messages(storage))


async def test_a_load_that_begins_again_makes_the_same_bundles(
    storage: Storage, file: Path, monkeypatch
):
    async def forget(_: object) -> None:  # killed before it is noted
        raise errors.TransientError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(ledger.Ledgers, "note", forget)
        await load(storage, file)
    await load(storage, file)
    found = names(await messages(storage))
    assert set(found.values()) == {2}
    assert len(found) == 7


async def test_what_was_sent_is_left_out_and_the_rest_keeps_the_name_of_its_bundle(
    storage: Storage, file: Path
):
    whole = read(file)
    write(file, "\n".join(whole.splitlines()[:20]))
    await load(storage, file)
    first = names(await messages(storage))
    write(file, whole)
    summary = await load(storage, file)
    assert (summary.new, summary.as_before) == (80, 20)
    second = names(await messages(storage))
    assert len(first) == 2
    # The second bundle of the first load was short: it is another one now.
    assert not set(first) & set(second)


async def test_two_loads_of_other_jobs_share_no_name(storage: Storage, file: Path):
    await load(storage, file)
    first = names(await messages(storage))
    write(file, read(file).replace("cat", "dog").replace('"id": "', '"id": "d'))
    await load(storage, file)
    assert not set(first) & set(names(await messages(storage)))


async def test_names_cannot_be_made_without_the_storages_secret(
    storage: Storage, file: Path
):
    await load(storage, file)
    (secret,) = [name async for name in storage.packs.names("-load/")]
    assert len(secret) == len("-load/") + 32
    found = await messages(storage)
    body = found[0]
    unsigned = bundle.messages_of(body)
    assert (
        bundle.name_by(secret.removeprefix("-load/"), unsigned)
        == bundle.read(body).name
    )
    assert bundle.name_by("another", unsigned) != bundle.read(body).name


async def test_the_default_leaves_many_workers_something_to_do():
    assert bundle.jobs_per_bundle(999) == 1
    assert bundle.jobs_per_bundle(10_000) == 20
    assert bundle.jobs_per_bundle(1_000_000) == 64
    heavy = [
        json.dumps(
            {"id": f"{n}", "prompt": "a", "steps": 50, "width": 1024, "height": 1024}
        )
        for n in range(8)
    ]
    sent = bundle.bundled(list(map(bundle.Sent, heavy)), 64, bundle.any_name)
    assert len(sent) == 8
