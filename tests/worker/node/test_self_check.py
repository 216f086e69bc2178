"""Single parts of a node's checks: one failure, alarms, references, the list of quarantined."""

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polling
from evaluation.stand_in import StandInEngine, draw_noise
from imagefleet import concurrency, errors, likeness
from imagefleet.storage.open import Storage
from worker.engine import contract
from worker.gpu_thread import EngineThread
from worker.metrics import WorkerMetrics
from worker.node import quarantine, reference, self_check, watchdog
from worker.node.reference import Reference
from worker.node.self_check import NodeSelfCheck
from worker.node.watchdog import Suspects
from worker.settings import WorkerSettings

RunPipeline = Callable[..., Any]  # the fixture of conftest.py

pytestmark = pytest.mark.parametrize("storage_settings", ["local"], indirect=True)

SIZE = (32, 32)


class Weights:
    weights_id = "checkpoint"

    def __init__(self) -> None:
        self.faults: list[str | None] = []

    def find_fault(self) -> str | None:
        return self.faults.pop(0) if self.faults else None

    def write_lora(self, path: Path) -> None:
        path.touch()


class Engine(StandInEngine):
    """Draws one plain colour ramp a seed and LoRA, and what *wrong* has in place of the next."""

    def __init__(self) -> None:
        super().__init__(size=SIZE, draw=self.draw_next)
        self.self_check = Weights()
        self.wrong: list[contract.Pixels | None] = []
        self.sizes: list[tuple[int, int]] = []
        self.scales = set[float]()
        self.is_dark = False

    def draw_next(self, request: contract.ImageRequest) -> contract.Pixels:
        self.sizes.append((request.width, request.height))
        self.scales.add(request.cfg_scale)
        wrong = self.wrong.pop(0) if self.wrong else None
        if self.is_dark:
            return right(request) // 2
        return right(request) if wrong is None else wrong


def right(request: contract.ImageRequest) -> contract.Pixels:
    random = np.random.default_rng([request.seed, len(request.loras)])
    ramp = np.linspace(0, 100, request.width)[None, :, None] + random.uniform(
        0, 150, (4, 1, 3)
    )
    return np.repeat(ramp, request.height // 4, 0).astype(np.uint8)


BAD = np.random.default_rng(0).integers(0, 256, (*SIZE, 3)).astype(np.uint8)


@asynccontextmanager
async def checks_of(engine: Engine, storage: Storage) -> AsyncIterator[NodeSelfCheck]:
    engine_thread = EngineThread(lambda: engine, why_idle=lambda: "starved", backlog=64)
    await engine_thread.start()
    metrics = WorkerMetrics()
    made = NodeSelfCheck(
        engine,
        engine_thread,
        itertools.count(),
        Suspects("a worker", storage, metrics, concurrency.NEVER),
    )
    try:
        yield made
    finally:
        await engine_thread.stop()
        made.close()


async def recorded(storage: Storage) -> list[dict[str, Any]]:
    names = [name async for name in storage.blobs.names("-suspect/")]
    return [json.loads(await storage.blobs.read(name) or b"") for name in names]


async def test_one_wrong_canary_marks_images_and_the_second_of_ten_gives_the_node_up(
    storage: Storage,
) -> None:
    engine = Engine()
    async with checks_of(engine, storage) as checks:
        await checks.start_up(None)
        checks.suspects.storing("default/a.png", checks.suspects.since("images") + 1)
        engine.wrong = [BAD]
        assert not await checks._check_or_give_up(("with_lora",))
        assert checks.trusted.is_set()
        (record,) = await recorded(storage)
        assert record["images"] == ["default/a.png"]
        assert record["worker"] == "a worker"
        assert await checks._check_or_give_up(("other_seed",))
        engine.wrong = [BAD]
        with pytest.raises(errors.NodeError, match="the second time within 10 checks"):
            await checks._check_or_give_up(("with_lora",))
        assert not checks.trusted.is_set()
        sample = checks.suspects.metrics.registry.get_sample_value
        assert sample("imagefleet_node_faults_total", {"fault": "wrong_images"}) == 1
        assert sample("imagefleet_suspect_images_total") == 1


async def test_weights_that_differ_once_were_read_wrongly_and_twice_are_a_fault(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "WEIGHTS_SECONDS", 0.01)
    engine = Engine()
    async with checks_of(engine, storage) as checks:
        engine.self_check.faults = ["unet", None, None, None]
        watching = asyncio.create_task(checks.watch_weights())
        await polling.until(lambda: not engine.self_check.faults)
        assert not watching.done()
        engine.self_check.faults = ["unet", "unet"]
        with pytest.raises(errors.NodeError, match="unet"):
            await watching
        assert checks.fault is not None
        assert checks.fault.kind == "weights"


@pytest.mark.parametrize(("is_unguided", "scale"), [(True, 1.0), (False, 3.0)])
async def test_canaries_take_as_many_rows_as_the_jobs(
    storage: Storage, is_unguided: bool, scale: float
) -> None:
    engine = Engine()
    engine.is_unguided = is_unguided
    async with checks_of(engine, storage) as checks:
        await checks.start_up(None)
        assert engine.scales == {scale}


async def test_a_job_of_another_size_is_checked_in_its_size_once_the_node_was_proved_in_its_own(
    storage: Storage,
) -> None:
    engine = Engine()
    async with checks_of(engine, storage) as checks:
        await checks.start_up(None)
        checks.generated((64, 32))
        engine.sizes.clear()
        for _ in range(2):
            assert await checks._check_or_give_up(("with_lora",))
        assert engine.sizes == [SIZE, (64, 32), (64, 32)]


# References


def reference_for(engine: Engine, **changes: object) -> Reference:
    images = {
        kind: likeness.to_text(
            likeness.fingerprint(right(reference.request(kind, SIZE, Path("lora"))))
        )
        for kind in reference.CANARY_IMAGES
    }
    fields = {
        "version": reference.VERSION,
        "weights": engine.self_check.weights_id,
        "width": SIZE[0],
        "height": SIZE[1],
        "steps": reference.STEPS,
        "tolerance": likeness.SAME_BELOW,
        "images": images,
        **changes,
    }
    return Reference.model_validate(fields)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"weights": "another"}, "other weights"),
        ({"version": 0}, "another version"),
        ({"width": 64}, "another version"),
    ],
)
async def test_a_reference_of_another_model_or_version_is_ignored_with_a_warning(
    storage: Storage,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    why: str,
) -> None:
    engine = Engine()
    images = dict.fromkeys(
        reference.CANARY_IMAGES, likeness.to_text(likeness.fingerprint(BAD))
    )
    async with checks_of(engine, storage) as checks:
        await checks.start_up(reference_for(engine, images=images, **changes))
    (warning,) = caplog.records
    assert why in warning.getMessage()
    assert "`imagefleet files make canary` makes" in warning.getMessage()


async def test_a_reference_finds_a_node_that_is_wrong_from_the_start(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    async with checks_of(engine, storage) as checks:
        await checks.start_up(reference_for(engine))
        assert not caplog.records
    engine.is_dark = True
    async with checks_of(engine, storage) as checks:
        with pytest.raises(errors.NodeError, match="from its reference, 10 at most"):
            await checks.start_up(reference_for(engine))


@pytest.mark.parametrize(
    "damage", [b"", b"[]", b'{"version": 1}', b"\xff", b"{" * 70_000]
)
async def test_a_damaged_reference_is_a_warning(
    storage: Storage,
    worker_settings: Callable[..., WorkerSettings],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: bytes,
) -> None:
    (tmp_path / "model.canary.json").write_bytes(damage)
    settings = worker_settings(model=tmp_path / "model.safetensors")
    assert await reference.find(settings, storage.files, concurrency.NEVER) is None
    assert "cannot be read" in caplog.text


async def test_a_reference_is_found_in_the_storage_in_the_folder_and_beside_the_file(
    storage: Storage, worker_settings: Callable[..., WorkerSettings], tmp_path: Path
) -> None:
    engine = Engine()
    data = reference_for(engine).model_dump_json().encode()

    async def found(model: object) -> Reference | None:
        settings = worker_settings(model=model)
        return await reference.find(settings, storage.files, concurrency.NEVER)

    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "canary.json").write_bytes(data)
    (tmp_path / "one.canary.json").write_bytes(data)
    await storage.files.replace(
        "models/two.canary.json", data, "application/json", None
    )
    for model in (tmp_path / "folder", tmp_path / "one.safetensors"):
        assert await found(model) == reference_for(engine)
    assert await found("store:two.tar") == reference_for(engine)
    assert await found("store:other.tar") is None
    assert await found(tmp_path / "other.safetensors") is None


# Suspects


async def test_a_record_that_cannot_be_stored_is_in_the_log_with_what_to_do(
    storage: Storage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> bool:
        raise errors.TransientError("no answer")

    monkeypatch.setattr(storage.blobs, "create", refuse)
    made = Suspects("w", storage, WorkerMetrics(), concurrency.NEVER)
    made.storing("default/a.png", made.began_at)
    await made.record(made.began_at, "wrong")
    (line,) = caplog.records
    assert "imagefleet redo --worker w --since" in line.getMessage()


async def test_a_record_has_what_was_generated_since_and_stays_bounded(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "MAX_IMAGES", 3)
    made = Suspects("odd/näme", storage, WorkerMetrics(), concurrency.NEVER)
    start = made.began_at
    await made.record(start, "nothing was stored")
    assert not await recorded(storage)
    made.storing("old.png", start + 1)
    made.good("images", start + 2)
    made.storing("new.png", start + 3)
    made.storing("not ours.png", start + 3)
    made.storing("-checks/spring/1.png", start + 3)
    made.not_stored("not ours.png")
    await made.record(made.since("images"), "wrong")
    (record,) = await recorded(storage)
    assert record["images"] == ["new.png"]
    assert set(record) == {"worker", "machine", "since", "until", "reason", "images"}
    (name,) = [name async for name in storage.blobs.names("-suspect/")]
    assert name.startswith("-suspect/odd_n_me/")
    for number in range(5):
        made.storing(f"{number}.png", start + 4)
    assert len(made._stored) == 3


# The list of quarantined nodes


async def put_list(storage: Storage, content: bytes) -> None:
    part = await storage.files.read_part(quarantine.BLOB, 0, 1)
    version = None if part is None else part.version
    await storage.files.replace(quarantine.BLOB, content, "application/json", version)


def listing(*names: str) -> bytes:
    nodes = [
        {"name": name, "reason": "wrong images", "at": "2026-01-01"} for name in names
    ]
    return json.dumps({"nodes": nodes}).encode()


@pytest.mark.parametrize("name", ["test-worker", "machine-7"])
async def test_a_quarantined_node_leases_nothing(
    storage: Storage,
    run_pipeline: RunPipeline,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setenv("SALAD_MACHINE_ID", "machine-7")
    await put_list(storage, listing("somebody else", name))
    await storage.queue.send(['{"prompt": "a cat"}'])
    with pytest.raises(
        errors.NodeError, match=rf"quarantined: {name} is in .*wrong images"
    ):
        await run_pipeline(load=lambda: pytest.fail("the model was loaded"))
    assert (await storage.queue.depth()).leased == 0


async def test_a_node_that_is_quarantined_while_it_works_hands_its_jobs_back(
    storage: Storage, run_pipeline: RunPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "PERIOD_SECONDS", 0.05)
    stored, is_read = threading.Event(), threading.Event()
    reason = quarantine.Quarantine.reason

    async def noting(self: quarantine.Quarantine) -> str | None:
        found = await reason(self)
        if found is not None:
            is_read.set()
        return found

    def draw(request: contract.ImageRequest) -> contract.Pixels:
        if stored.is_set():
            is_read.wait()
        return draw_noise(request)

    monkeypatch.setattr(quarantine.Quarantine, "reason", noting)
    await storage.queue.send(
        json.dumps({"prompt": "a cat", "id": str(n)}) for n in range(50)
    )
    running = asyncio.create_task(
        run_pipeline(StandInEngine(capacity=1, tick_seconds=0.01, draw=draw))
    )

    async def images() -> list[str]:
        return [name async for name in storage.blobs.names("default/")]

    await polling.until(images)
    stored.set()
    await put_list(storage, listing("test-worker"))
    with pytest.raises(errors.NodeError, match="this node is quarantined"):
        await running
    depth = await storage.queue.depth()
    assert depth.messages >= 10
    assert depth.leased == 0


@pytest.mark.parametrize(
    "content", [b"no JSON", b"{}", b'{"nodes": [7]}', b" " * 5_000_000]
)
async def test_a_list_that_cannot_be_read_stops_no_node_and_is_logged_once_a_minute(
    storage: Storage, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    await put_list(storage, content)
    looked = quarantine.Quarantine(storage.files, frozenset({"test-worker"}))
    assert await looked.reason() is None
    assert await looked.reason() is None
    (line,) = caplog.records
    assert (
        "quarantine.json in the container 'files' cannot be read" in line.getMessage()
    )
    await put_list(storage, listing("test-worker"))
    assert await looked.reason() is not None
