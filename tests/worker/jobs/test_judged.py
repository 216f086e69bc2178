"""Jobs whose images are judged before they are stored, on both storages."""

import asyncio
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from benchmarks.stand_in import StandInEngine
from bundled import NAME, bundle_of, packed
from imagefleet import errors
from imagefleet.job.message import read_job
from imagefleet.records import reader
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage
from judging import campaign as judged
from messages import (
    Drawing,
    blobs,
    failed_jobs,
    failing,
    message,
    records,
    redelivered,
)
from polling import until
from worker.engine import contract
from worker.judges.networks import Judges
from worker.metrics import CostMeter

pytestmark = pytest.mark.usefixtures("soon")

#: Contrasts of the eight images of a job, by their seeds from 0 on.
CONTRASTS = (10, 70, 30, 90, 20, 80, 60, 40)


#: The seed and contrast of the two best images of a job, by their names.
BEST_TWO = {"default/j.png": (3, 90), "default/j~1.png": (5, 80)}


def draw(request: contract.ImageRequest) -> contract.Pixels:
    """Stripes of a contrast that the seed decides."""
    half = CONTRASTS[request.seed % len(CONTRASTS)]
    pixels = np.full((16, 16, 3), 128 - half, np.uint8)
    pixels[::2] = 128 + half
    return pixels


def draw_alike(request: contract.ImageRequest) -> contract.Pixels:
    """One picture of blots, of a contrast that the seed decides."""
    return judged.picture(0, CONTRASTS[request.seed])


def engine(**options: Any) -> StandInEngine:
    return StandInEngine(draw=draw, **options)


class Striped(Drawing):
    """Notes what it draws."""

    def _draw_and_note(self, request: contract.ImageRequest) -> contract.Pixels:
        self.drawn.append(request)
        return draw(request)


def best(count: int, **fields: Any) -> str:
    named = {"id": "j", "seed": 0, "batch_size": 8, **fields}
    return message(**named, keep=f"contrast=25,best={count}")


async def ends(storage: Storage) -> dict[str, Record]:
    return {each.id: each async for each in reader.ended(storage, "default")}


async def counted(storage: Storage) -> tuple[int, int, int]:
    """The images, completed and dropped jobs by the records."""
    counts = await reader.counts(storage, "default")
    return counts.images, counts.completed, counts.dropped


async def kept(storage: Storage) -> dict[str, tuple[int | None, float]]:
    """The seed and contrast of each stored image, by its name, in their order."""
    found = sorted(await records(storage), key=lambda record: str(record.blob))
    return {str(each.blob): (each.seed, each.scores["contrast"]) for each in found}


async def test_an_image_below_a_minimum_is_not_stored_and_its_scores_are_recorded(
    storage: Storage, run_pipeline
):
    pipeline = await run_pipeline(
        engine(),
        sent=(
            message(id=f"j{seed}", seed=seed, keep="contrast=50") for seed in range(8)
        ),
    )
    assert await blobs(storage) == [f"default/j{seed}.png" for seed in (1, 3, 5, 6)]
    dropped = await ends(storage)
    assert {name: each.reason for name, each in dropped.items()} == {
        f"j{seed}": f"contrast {CONTRASTS[seed]} is below 50" for seed in (0, 2, 4, 7)
    }
    assert dropped["j0"].scores == {"contrast": 10}
    assert read_job(str(dropped["j0"].body), "none").id == "j0"
    assert (await kept(storage))["default/j3.png"] == (3, 90)
    assert await counted(storage) == (4, 4, 4)
    assert pipeline.metrics.outcomes == {"completed": 4, "dropped": 4}
    assert not (await storage.queue.depth()).messages
    assert not await failed_jobs(storage)


async def test_the_best_of_a_job_are_stored_under_its_first_names(
    storage: Storage, run_pipeline
):
    await run_pipeline(engine(), sent=[best(2)])
    assert await kept(storage) == BEST_TWO
    first, second = await records(storage)
    assert (first.images, first.keep and first.keep.best) == (2, 2)
    assert [each.number for each in first.dropped] == [0, 1, 2, 4, 6, 7]
    assert first.dropped[0].reason == "contrast 10 is below 25"
    assert first.dropped[1].reason == "2 of its job have a better contrast"
    assert second.dropped == ()
    assert await counted(storage) == (2, 1, 0)


async def test_images_that_end_one_after_the_other_are_judged_in_few_calls(
    storage: Storage, run_pipeline, monkeypatch
):
    def one(self: StandInEngine) -> list[contract.Finished]:
        others = [self._admitted.pop() for _ in range(len(self._admitted) - 1)]
        finished = tick(self)
        self._admitted.extend(reversed(others))
        return finished

    async def noted(*given: Any) -> list[dict[str, float]]:
        calls.append(given)
        return await scores(*given)

    tick = StandInEngine.tick
    scores = Judges.scores
    calls = list[Any]()
    monkeypatch.setattr(StandInEngine, "tick", one)
    monkeypatch.setattr(Judges, "scores", noted)
    await run_pipeline(engine(capacity=8, tick_seconds=0.05), sent=[best(2)])
    assert await kept(storage) == BEST_TWO
    assert len(calls) < len(CONTRASTS)


async def test_what_an_earlier_delivery_has_stored_stays_the_choice(
    storage: Storage, run_pipeline, monkeypatch
):
    create = storage.blobs.create
    second = failing(create, errors.TransientError("503 server busy"), 5)

    async def created(name: str, *given: Any, **named: Any) -> bool:
        store = second if name == "default/j~1.png" else create
        return await store(name, *given, **named)

    monkeypatch.setattr(storage.blobs, "create", created)
    pipeline = await run_pipeline(engine(), sent=[best(2)])
    assert pipeline.metrics.outcomes == {"retried": 1, "completed": 1}
    assert await kept(storage) == BEST_TWO
    assert await counted(storage) == (2, 1, 0)


async def test_a_worker_that_dies_before_its_records_loses_no_score(
    storage: Storage, run_pipeline
):
    bodies = [best(2), message(id="one", seed=3, keep="contrast=50,distinct=3")]
    await run_pipeline(engine(), sent=bodies)
    before = sorted(await records(storage), key=lambda record: str(record.blob))
    async for name in storage.blobs.names("-records/"):
        assert await storage.blobs.delete(name)
    await redelivered(storage, *bodies)
    drawing = Striped()
    pipeline = await run_pipeline(drawing)
    assert sorted(drawing.seeds) == list(range(8))  # for the scores of those not stored
    assert pipeline.metrics.outcomes == {"duplicate": 2}
    facts = ("blob", "seed", "scores", "dropped", "phash", "images")
    after = sorted(await records(storage), key=lambda record: str(record.blob))
    for name in facts:
        told = [getattr(record, name) for record in before]
        assert [getattr(record, name) for record in after] == told, name


async def test_a_bundle_stores_what_passes_and_ends_the_others_in_its_pack(
    storage: Storage, run_pipeline
):
    jobs = [
        read_job(message(id=f"j{seed}", seed=seed, keep="contrast=50"), "none")
        for seed in range(8)
    ]
    bundle = bundle_of([job.to_message() for job in jobs])
    pipeline = await run_pipeline(engine(), sent=[bundle])
    found = await packed(storage)
    assert found.images.keys() == {"j1", "j3", "j5", "j6"}
    assert found.ends == {f"j{seed}": ["dropped"] for seed in (0, 2, 4, 7)}
    assert found.parts == [f"default/{NAME}~1.tar"]
    assert pipeline.metrics.outcomes == {"completed": 4, "dropped": 4}
    assert await counted(storage) == (4, 4, 4)


async def test_one_image_that_cannot_be_drawn_retries_the_whole_choice(
    storage: Storage, run_pipeline
):
    left = [errors.TransientError("out of memory")]

    def draw_or_fail(request: contract.ImageRequest) -> contract.Pixels:
        if request.seed == 6 and left:
            raise left.pop()
        return draw(request)

    pipeline = await run_pipeline(StandInEngine(draw=draw_or_fail), sent=[best(3)])
    assert pipeline.metrics.outcomes == {"retried": 1, "completed": 1}
    assert [seed for seed, _ in (await kept(storage)).values()] == [1, 3, 5]


@pytest.mark.parametrize("failing", [None, 6])
async def test_what_is_drawn_for_a_choice_and_not_stored_is_counted_as_wasted(
    storage: Storage, run_pipeline, monkeypatch, failing: int | None
):
    wasted = Counter[str]()
    monkeypatch.setattr(CostMeter, "lost", lambda _, reason: wasted.update([reason]))
    drawn = []

    def draw_or_fail(request: contract.ImageRequest) -> contract.Pixels:
        drawn.append(request.seed)
        if request.seed == failing and drawn.count(failing) == 1:
            raise errors.TransientError("out of memory")
        return draw(request)

    # One by one, so that some are judged before one fails.
    drawing = StandInEngine(draw=draw_or_fail, capacity=1, tick_seconds=0.05)
    pipeline = await run_pipeline(drawing, sent=[best(2)])
    assert pipeline.metrics.outcomes["retried"] == (failing is not None)
    assert await kept(storage) == BEST_TWO
    assert len(drawn) == 2 + wasted.total()
    await redelivered(storage, best(2))
    await run_pipeline(drawing)
    assert wasted["duplicate"] == 2
    assert len(drawn) == 2 + wasted.total()


async def test_a_worker_that_drains_hands_back_what_it_has_only_judged(
    storage: Storage, run_pipeline
):
    stop = asyncio.Event()
    drawing = Striped(capacity=2)
    running = asyncio.create_task(
        run_pipeline(
            drawing, sent=[best(2)], stop=stop, until_empty=False, lease_seconds=300
        )
    )
    await until(lambda: drawing.seeds)
    stop.set()
    await running
    stored = await blobs(storage)
    assert len(stored) in {0, 2}, stored
    await run_pipeline(engine())
    assert [seed for seed, _ in (await kept(storage)).values()] == [3, 5]


@pytest.mark.parametrize("missing", ["taste", "clip"])
async def test_a_network_that_is_not_there_fails_the_job_before_it_is_drawn(
    storage: Storage, run_pipeline, missing: str
):
    if missing == "clip":  # on whose embedding a head judges
        await storage.files.create("judges/taste.safetensors", b"head", "", {})
    drawing = Drawing()
    await run_pipeline(drawing, sent=[message(id="j", keep="taste=5")])
    (failed,) = await failed_jobs(storage)
    assert f"the score {missing!r} is neither contrast nor" in failed.reason
    assert f"no judge {missing}.onnx in judges/" in failed.reason
    assert drawing.seeds == []


async def test_an_image_of_one_colour_is_a_broken_node_not_a_dropped_image(
    storage: Storage, run_pipeline
):
    blank = StandInEngine(draw=lambda _: np.zeros((16, 16, 3), np.uint8))
    await run_pipeline(
        blank, sent=[message(id="j", keep="contrast=50")], max_attempts=1
    )
    (failed,) = await failed_jobs(storage)
    assert "all one colour" in failed.reason
    assert [each.outcome for each in (await ends(storage)).values()] == ["failed"]


@pytest.mark.parametrize("first", ["a", "b"])
async def test_of_near_duplicates_the_better_one_counts_whichever_is_drawn_first(
    storage: Storage, run_pipeline, first: str
):
    alike = StandInEngine(draw=draw_alike)
    bodies = {
        name: message(id=name, seed=seed, keep="contrast=9,distinct=3")
        for name, seed in (("a", 7), ("b", 3))
    }
    await run_pipeline(alike, sent=[bodies[first]])
    (alone,) = await records(storage)
    assert alone.id == first
    await run_pipeline(alike, sent=set(bodies.values()) - {bodies[first]})
    (left,) = await records(storage)
    assert left.id == "b"
    assert (await ends(storage))["a"].reason == "near-duplicate of b"
    assert await counted(storage) == (1, 1, 1)


class Waiting(StandInEngine):
    """Goes on behind the estimate of its image once that has dropped it."""

    def tick(self) -> list[contract.Finished]:
        if self._estimated and not all(each.is_stopped for _, each in self._admitted):
            time.sleep(0.01)
            return []
        return super().tick()


EARLY = "contrast=25,early.contrast=25,best=2"


async def test_an_image_that_its_estimate_drops_is_drawn_no_further(
    storage: Storage, run_pipeline
):
    await run_pipeline(Waiting(draw=draw), sent=[message(id="j", seed=0, keep=EARLY)])
    (end,) = (await ends(storage)).values()
    assert (end.outcome, end.scores) == ("dropped", {"early.contrast": 10})
    assert end.reason == "early.contrast 10 is below 25"


async def test_the_best_are_never_chosen_early_and_a_drop_that_comes_too_late_changes_nothing(
    storage: Storage, run_pipeline, monkeypatch
):
    body = message(id="j", seed=0, batch_size=8, keep=EARLY)
    with monkeypatch.context() as late:
        late.setattr(contract.ImageRequest, "is_stopped", False)
        await run_pipeline(engine(), sent=[body])
    assert await kept(storage) == BEST_TWO
    first, _ = await records(storage)
    reasons = {each.number: each.reason for each in first.dropped}
    below = {seed: f"early.contrast {CONTRASTS[seed]} is below 25" for seed in (0, 4)}
    better = dict.fromkeys((1, 2, 6, 7), "2 of its job have a better contrast")
    assert reasons == {**better, **below}
    await redelivered(storage, body)
    again = Striped()
    await run_pipeline(again)
    assert len(again.drawn) == 16
    assert not any(each.is_stopped for each in again.drawn), (
        "as many as are stored are needed"
    )


async def test_an_estimate_that_fails_decides_nothing_and_its_job_comes_again(
    run_pipeline,
):
    left = [errors.TransientError("out of memory")]

    def draw_or_fail(request: contract.ImageRequest) -> contract.Pixels:
        if left:
            raise left.pop()
        return draw(request)

    body = message(id="j", seed=3, keep=EARLY)
    pipeline = await run_pipeline(StandInEngine(draw=draw_or_fail), sent=[body])
    assert pipeline.metrics.outcomes == {"retried": 1, "completed": 1}
