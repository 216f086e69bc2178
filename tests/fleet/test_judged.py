"""A judged campaign at the console: what each command counts, filters, sorts and draws again."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.gallery.index import Filter, Index
from imagefleet.records import reader
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet
from judging import campaign as judged
from storages import local_only
from worker.engine import contract

RunWorker = Callable[..., Any]

pytestmark = local_only

#: Contrasts of the images, by their seeds.
CONTRASTS = (20, 110, 60, 90)


def draw(request: contract.ImageRequest) -> contract.Pixels:
    return judged.picture(request.seed, CONTRASTS[request.seed])


@pytest.fixture
def run(
    imagefleet: Imagefleet, storage_settings: StorageSettings
) -> Callable[..., Any]:
    """Runs a command on the storage, in a thread; returns its standard output, or another one."""

    async def run(*arguments: str, code: int = 0, stream: str = "stdout") -> str:
        storage = ("--storage", storage_settings.storage)
        result = await asyncio.to_thread(imagefleet, *arguments, *storage)
        assert result.returncode == code, result.stderr
        return str(getattr(result, stream))

    return run


@pytest.fixture
async def spring(
    storage: Storage, run: Callable[..., Any], run_worker: RunWorker, tmp_path: Path
) -> str:
    """A campaign of four jobs, of which the two of the highest contrast are kept."""
    jobs = tmp_path / "jobs.jsonl"
    lines = [
        json.dumps({"id": f"j{seed}", "prompt": "a cat", "seed": seed})
        for seed in range(4)
    ]
    jobs.write_text("\n".join(lines))
    rule = ("--keep", "contrast=22", "--bundle", "1")
    await run("load", str(jobs), "--campaign", "spring", *rule)
    await run_worker("w", draw)
    return "spring"


async def scores(storage: Storage) -> dict[str, float]:
    found = [record async for record in reader.images(storage, "spring")]
    return {record.id: record.scores["contrast"] for record in found}


async def test_dropped_jobs_are_counted_wherever_jobs_are(
    storage: Storage, spring: str, run: Callable[..., Any]
):
    kept = await scores(storage)
    assert kept.keys() == {"j1", "j3"}
    (row,) = json.loads(await run("status", spring, "--json"))["campaigns"]
    numbers = [row[name] for name in ("sent", "completed", "dropped", "pending")]
    assert numbers == [4, 2, 2, 0]
    job = json.loads(await run("status", f"{spring}/j0", "--json"))
    assert job["state"] == "dropped"
    assert job["reason"].endswith("is below 22")
    report = json.loads(await run("report", spring, "--json"))
    assert (report["images"], report["dropped"], report["images_dropped"]) == (2, 2, 2)
    assert report["kept_share"] == 0.5
    dropped = await run("results", spring, "--outcome", "dropped", "--json")
    assert {json.loads(line)["id"] for line in dropped.splitlines()} == {"j0", "j2"}


async def test_results_and_exports_are_filtered_and_sorted_by_score(
    storage: Storage, spring: str, run: Callable[..., Any], tmp_path: Path
):
    kept = await scores(storage)
    best = sorted(kept, key=lambda name: -kept[name])
    found = await run("results", spring, "--keep", "contrast=0", "--json")
    assert [json.loads(line)["id"] for line in found.splitlines()] == best
    first = ("--keep", f"contrast={max(kept.values())}")
    for some in (first, ("--keep", "contrast=0", "--limit", "1")):
        folder = tmp_path / some[-1]
        await run("results", spring, *some, "--download", str(folder))
        assert [each.stem for each in folder.glob("*.png")] == best[:1]
    export = ("export", spring, str(tmp_path / "set"), *first)
    assert json.loads(await run(*export, "--json"))["images"] == 1
    assert "not in it" not in await run(*export, stream="stderr")


async def test_dropped_jobs_are_drawn_again_by_another_rule_and_count_once(
    storage: Storage, spring: str, run: Callable[..., Any], run_worker: RunWorker
):
    softer = ("redo", spring, "--keep", "contrast=12", "--yes", "--json")
    would = json.loads(await run(*softer, "--dry-run"))
    assert (would["count"], would["refused"]) == (1, 0)  # the other's scores are known
    assert would["jobs"] == [{"campaign": "spring", "error": "dropped", "count": 1}]
    assert json.loads(await run(*softer)) == {"replayed": 1, "refused": []}
    counts = await reader.counts(storage, spring)
    assert (counts.pending, counts.dropped, counts.images) == (1, 1, 2)
    await run_worker("w", draw)
    assert (await reader.counts(storage, spring)).pending == 0
    assert (await scores(storage)).keys() == {"j1", "j2", "j3"}
    assert json.loads(await run(*softer)) == {"replayed": 0, "refused": []}
    for other in (["--worker", "w"], ["--suspect"], ["spring", "--jobs", "jobs.jsonl"]):
        await run("redo", *other, "--keep", "contrast=1", "--yes", code=2)
    await run("redo", "--keep", "contrast=1", code=2)


async def test_the_gallery_chooses_and_sorts_rows_by_score(
    storage: Storage, spring: str
):
    index = Index()
    index.add([record async for record in reader.images(storage, spring)])
    index.add([record async for record in reader.ended(storage, spring)])
    kept = await scores(storage)

    def ids(**chosen: Any) -> list[str]:
        found = index.records(index.select(Filter(**chosen)).tolist())
        return [records[0].id for records in found.values()]

    assert ids(keep="contrast=0") == sorted(kept, key=lambda name: kept[name])
    assert len(ids(keep=f"contrast={max(kept.values())}")) == 1
    assert ids(keep="taste=1") == []
    assert sorted(ids(tab="dropped")) == ["j0", "j2"]
    assert index.counts() == (
        {"images": 2, "failed": 0, "cancelled": 0, "dropped": 2},
        4,
    )
    index.close()


async def test_a_sample_says_what_minima_keep_and_cost_of_what_was_drawn(
    storage: Storage, spring: str, run: Callable[..., Any], tmp_path: Path
):
    shown = json.loads(
        await run(
            *("score", spring, "--sample", "200", "--keep", "contrast=22", "--json"),
            *("--output", str(tmp_path / "curve.svg")),
        )
    )
    (spread,) = shown["scores"]
    assert (spread["name"], spread["images"], shown["images"]) == ("contrast", 4, 4)
    assert shown["rule"]["kept"] == 0.5
    dollars = shown["dollars_per_image"]
    assert shown["rule"]["dollars_per_thousand"] == pytest.approx(2000 * dollars)
    half = next(each for each in spread["minima"] if each["kept"] == 0.5)
    assert spread["least"] < half["minimum"] < spread["most"]
    assert "contrast of 4 images" in await run("score", spring, "--sample", "200")
    assert "<svg" in (tmp_path / "curve.svg").read_text()


async def test_pictures_without_scores_are_scored_for_a_sample(
    storage: Storage, run: Callable[..., Any], run_worker: RunWorker
):
    await storage.queue.send(
        json.dumps({"prompt": "a cat", "id": f"j{seed}", "seed": seed})
        for seed in range(4)
    )
    await run_worker("w", draw)
    shown = json.loads(
        await run(
            "score", "default", "--sample", "9", "--keep", "coherence=0.5", "--json"
        )
    )
    assert shown["scores"][0]["name"] == "coherence"
    assert shown["rule"]["kept"] == 1.0


async def test_a_near_duplicate_is_among_the_drawn_images_of_a_sample(
    run: Callable[..., Any], run_worker: RunWorker, tmp_path: Path
):
    (tmp_path / "jobs.txt").write_text("a cat\na dog\n")
    rule = ("--keep", "contrast=1,distinct=3", "--bundle", "1")
    await run("load", str(tmp_path / "jobs.txt"), "--campaign", "spring", *rule)
    await run_worker("w", lambda request: judged.picture(0, 80))
    shown = json.loads(await run("score", "spring", "--sample", "9", "--json"))
    assert (shown["images"], shown["scores"][0]["images"]) == (2, 2)
