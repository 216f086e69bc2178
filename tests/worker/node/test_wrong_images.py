"""A node that draws wrong images is found within 200 jobs, and a good one never is."""

import asyncio
import dataclasses
import itertools
import json
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polling
from evaluation.stand_in import StandInEngine
from imagefleet import concurrency, errors, likeness
from imagefleet.storage.open import Storage
from worker.engine import contract
from worker.gpu_thread import EngineThread
from worker.metrics import WorkerMetrics
from worker.node import reference as references
from worker.node import self_check
from worker.node.self_check import NodeSelfCheck
from worker.node.watchdog import Suspects
from worker.stages.image import UPLOADS

RunPipeline = Callable[..., Any]  # the fixture of conftest.py
Draw = Callable[[contract.ImageRequest], contract.Pixels]

pytestmark = pytest.mark.parametrize("storage_settings", ["local"], indirect=True)

SIZE = (64, 64)
WEIGHTS_ID = "checkpoint"

ROUNDING = np.random.default_rng()

#: Images of jobs drawn right before the node breaks, and jobs sent.
GOOD, JOBS = 230, 460


def picture(request: contract.ImageRequest) -> contract.Pixels:
    """A picture that the prompt, the seed and each LoRA change, with another rounding each time."""
    loras = " ".join(lora.name for lora in request.loras)
    key = f"{request.prompt} {request.seed} {loras}".encode()
    random = np.random.default_rng(zlib.crc32(key))
    cells = random.uniform(30, 220, (4, 4, 3))
    pixels = np.kron(cells, np.ones((request.height // 4, request.width // 4, 1)))
    top, left = random.integers(0, request.height // 2, 2)
    pixels[top : top + request.height // 3, left : left + request.width // 3] = (
        cells[0, 0] / 2
    )
    rounding = ROUNDING.integers(-9, 10, pixels.shape) // 9  # -1, 0 or 1
    return (pixels + rounding).clip(0, 255).astype(np.uint8)


def broken_decoder() -> Draw:
    def draw(request: contract.ImageRequest) -> contract.Pixels:
        pixels = picture(request)
        pixels[8:16, 8:16] = np.random.default_rng(1).integers(0, 256, (8, 8, 3))
        return pixels

    return draw


def swapped_channels() -> Draw:
    return lambda request: picture(request)[..., ::-1].copy()


def cached_image() -> Draw:
    kept = picture(references.request("without_lora", SIZE, None))
    return lambda _: kept


def ignored_lora() -> Draw:
    return lambda request: picture(dataclasses.replace(request, loras=()))


def half_precision_noise() -> Draw:
    def draw(request: contract.ImageRequest) -> contract.Pixels:
        pixels = picture(request)
        noise = np.random.default_rng().normal(0, 0.02 * 255, pixels.shape)
        return (pixels + noise).clip(0, 255).astype(np.uint8)

    return draw


WAYS = [
    broken_decoder,
    swapped_channels,
    cached_image,
    ignored_lora,
    half_precision_noise,
]


class Checked:
    """Weights that a test can damage; the engine's LoRA is only a name here."""

    weights_id = WEIGHTS_ID

    def __init__(self) -> None:
        self.fault: str | None = None

    def find_fault(self) -> str | None:
        return self.fault

    def write_lora(self, path: Path) -> None:
        path.touch()


class BreakingEngine(StandInEngine):
    """Draws right until *good* jobs' images are drawn, and from then on in a *way* that is wrong.

    *drawn* are the seeds of jobs' images in order, with "canary" where one was drawn.
    """

    def __init__(self, way: Draw | None, good: int, tick_seconds: float = 0.02) -> None:
        super().__init__(
            capacity=32, size=SIZE, draw=self.draw_next, tick_seconds=tick_seconds
        )
        self.self_check = Checked()
        self.way, self.good = way, good
        self.drawn: list[int | str] = []
        self.wrong: set[str] = set()
        self.has_broken = threading.Event()

    def draw_next(self, request: contract.ImageRequest) -> contract.Pixels:
        is_job = str(request.prompt) == "a job"
        is_broken = sum(each != "canary" for each in self.drawn) >= self.good
        self.drawn.append(request.seed if is_job else "canary")
        if not is_broken:
            return picture(request)
        self.has_broken.set()
        if is_job:
            self.wrong.add(blob(request.seed))
        if self.way is None:
            self.self_check.fault = (
                "the weights on the device are not the checkpoint's: unet"
            )
            return picture(request)
        return self.way(request)


def blob(seed: int | str) -> str:
    return f"default/job{seed}.png"


async def send(storage: Storage, jobs: int) -> None:
    await storage.queue.send(
        json.dumps({"prompt": "a job", "id": f"job{seed}", "seed": seed, "steps": 5})
        for seed in range(1000, 1000 + jobs)
    )


async def records(storage: Storage) -> list[dict[str, Any]]:
    found = [name async for name in storage.blobs.names("-suspect/")]
    return [json.loads(await storage.blobs.read(name) or b"") for name in sorted(found)]


async def stored(storage: Storage) -> set[str]:
    return {name async for name in storage.blobs.names() if not name.startswith("-")}


def make_reference(folder: Path) -> Path:
    """The stand-in's reference, beside a model's file."""
    images = {
        kind: likeness.to_text(
            likeness.fingerprint(picture(references.request(kind, SIZE, Path("lora"))))
        )
        for kind in references.CANARY_IMAGES
    }
    model = folder / "model.safetensors"
    content = references.Reference(
        version=references.VERSION,
        weights=WEIGHTS_ID,
        width=SIZE[0],
        height=SIZE[1],
        steps=references.STEPS,
        tolerance=likeness.SAME_BELOW,
        images=images,
    )
    references.beside(model).write_text(content.model_dump_json(), encoding="utf-8")
    return model


@pytest.mark.parametrize(
    "way", [*WAYS, None], ids=lambda way: getattr(way, "__name__", "weights")
)
async def test_a_node_that_goes_wrong_is_found_within_200_jobs_and_its_images_are_recorded(
    storage: Storage,
    run_pipeline: RunPipeline,
    monkeypatch: pytest.MonkeyPatch,
    way: Callable[[], Draw] | None,
) -> None:
    if way is None:
        monkeypatch.setattr(self_check, "WEIGHTS_SECONDS", 0.2)
    await send(storage, JOBS)
    engine = BreakingEngine(way and way(), GOOD)
    with pytest.raises(errors.NodeError, match="this node draws wrong images"):
        await run_pipeline(engine)
    found, all_stored = await records(storage), await stored(storage)
    suspects = {name for record in found for name in record["images"]}
    if way is not None:
        assert engine.wrong
        assert len(engine.wrong & all_stored) <= 200
    # Every wrong image that is stored is on record, and no other since the last good check.
    assert engine.wrong & all_stored <= suspects
    assert (
        len(suspects - all_stored) <= UPLOADS
    )  # of those that were on their way at the end
    first_wrong = next(
        at for at, each in enumerate(engine.drawn) if blob(each) in engine.wrong
    )
    last_good = max(
        at for at, each in enumerate(engine.drawn[:first_wrong]) if each == "canary"
    )
    if way is not None:
        assert last_good > 80  # drawn among the jobs
        # But for those that were in the engine, and between it and the upload, at the time.
        assert not suspects & {
            blob(each) for each in engine.drawn[: max(0, last_good - 96)]
        }
    # What was in flight is back in the queue, and nothing else has left it unseen.
    depth = await storage.queue.depth()
    assert depth.messages >= JOBS - len(all_stored)
    assert (await storage.poison.depth()).messages == 0
    # A busy machine may find the wrong ones before any image was stored since the last check.
    assert len(found) <= 1
    for record in found:
        assert record["worker"] == "test-worker"
        assert record["since"] <= record["until"]


@pytest.mark.parametrize("way", WAYS)
async def test_a_node_that_is_broken_from_the_start_draws_no_job_where_there_is_a_reference(
    storage: Storage, run_pipeline: RunPipeline, tmp_path: Path, way: Callable[[], Draw]
) -> None:
    await send(storage, 10)
    engine = BreakingEngine(way(), good=0)
    with pytest.raises(errors.NodeError, match="this node draws wrong images"):
        await run_pipeline(engine, model=make_reference(tmp_path))
    assert set(engine.drawn) == {"canary"}
    assert not await stored(storage)
    assert not await records(storage)
    depth = await storage.queue.depth()
    assert (depth.messages, depth.leased) == (10, 0)


@pytest.mark.parametrize("way", [cached_image, ignored_lora])
async def test_a_cached_image_and_an_ignored_lora_are_found_at_the_start_without_a_reference(
    storage: Storage, run_pipeline: RunPipeline, way: Callable[[], Draw]
) -> None:
    engine = BreakingEngine(way(), good=0)
    with pytest.raises(errors.NodeError, match="has no effect on a canary"):
        await run_pipeline(engine)


async def test_a_campaign_of_good_images_is_drawn_without_an_alarm(
    storage: Storage,
    run_pipeline: RunPipeline,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await send(storage, 300)
    pipeline = await run_pipeline(
        BreakingEngine(None, good=1000), model=make_reference(tmp_path)
    )
    assert pipeline.metrics.images_stored == 300
    sample = pipeline.metrics.registry.get_sample_value
    assert sample("imagefleet_node_canaries_total", {"result": "failed"}) == 0
    assert sample("imagefleet_node_canaries_total", {"result": "passed"}) >= 3
    assert sample("imagefleet_suspect_images_total") == 0
    assert not [
        record for record in caplog.records if record.levelname in {"WARNING", "ERROR"}
    ]
    assert not await records(storage)


async def test_5000_good_images_raise_no_alarm(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    engine = BreakingEngine(None, good=10_000, tick_seconds=0)
    engine_thread = EngineThread(lambda: engine, why_idle=lambda: "starved", backlog=64)
    await engine_thread.start()
    metrics = WorkerMetrics()
    suspects = Suspects("worker", storage, metrics, concurrency.NEVER)
    checks = NodeSelfCheck(engine, engine_thread, itertools.count(), suspects)
    await checks.start_up(None)
    caplog.clear()
    watching = asyncio.create_task(checks.watch_images())
    for _ in range(5000):
        checks.generated((32, 32))
        await polling.until(lambda: watching.done() or not checks._due.is_set())
    await polling.until(lambda: not checks._one_at_a_time.locked())
    assert not watching.done()
    sample = metrics.registry.get_sample_value
    assert sample("imagefleet_node_canaries_total", {"result": "failed"}) == 0
    assert 45 <= sample("imagefleet_node_canaries_total", {"result": "passed"}) <= 65
    assert not [
        record for record in caplog.records if record.levelname in {"WARNING", "ERROR"}
    ]
    watching.cancel()
    await engine_thread.stop()
    checks.close()
