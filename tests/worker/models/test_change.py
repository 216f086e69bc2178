"""Workers with several models: each job is drawn with its own, or moved to where it is."""

import asyncio
import hashlib
import io
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

import polling
from benchmarks.stand_in import StandInEngine, draw_noise
from browsing import visible
from imagefleet import errors
from imagefleet.storage.open import Storage
from imagefleet.telemetry import host
from storages import local_only
from worker.engine import contract
from worker.gpu_thread import EngineThread
from worker.models import change, checkpoints
from worker.models.change import WorkerModels
from worker.models.checkpoints import Checkpoint
from worker.pipeline import Pipeline
from worker.settings import WorkerSettings

MakeSettings = Callable[..., WorkerSettings]

MODELS = ("first", "second", "third")


class Engines:
    """Loads stand-ins that leave their model's own grey in a corner."""

    def __init__(self, settings: MakeSettings, *names: str) -> None:
        self.loaded: list[str] = []
        self.fetched: list[str] = []
        self.broken: set[str] = set()
        self.drawing = threading.Event()
        self.checkpoints = [Checkpoint(name, settings(model=name)) for name in names]

    def load(self, checkpoint: Checkpoint) -> contract.Engine:
        self.loaded.append(checkpoint.name)
        if checkpoint.name in self.broken:
            raise errors.SetupError("it is damaged")
        grey = MODELS.index(checkpoint.name)

        def draw(request: contract.ImageRequest) -> contract.Pixels:
            self.drawing.set()
            image = draw_noise(request)
            image[:4, :4] = grey
            return image

        engine = StandInEngine(draw=draw, tick_seconds=0.01, capacity=2)
        engine.model_name = checkpoint.name
        return engine

    async def fetch(self, checkpoint: Checkpoint) -> Checkpoint:
        self.fetched.append(checkpoint.name)
        return checkpoint

    def models(self) -> WorkerModels:
        return WorkerModels(self.checkpoints, self.fetch, self.load)


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(change, "IDLE_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(change, "LOOK_SECONDS", 0.02)
    for name in MODELS:  # what is read ahead
        (tmp_path / name).write_bytes(f"weights of {name}".encode())
    monkeypatch.chdir(tmp_path)


async def work(
    storage: Storage,
    settings: WorkerSettings,
    models: WorkerModels,
    stop: asyncio.Event | None = None,
) -> Pipeline:
    pipeline = Pipeline(storage, None, settings)
    await pipeline.run(stop or asyncio.Event(), asyncio.Event(), models)
    return pipeline


def job(number: int, model: str | None = None) -> str:
    named = {"model": model} if model else {}
    return json.dumps({"prompt": "a", "id": f"{model}-{number}", **named})


async def greys(storage: Storage) -> dict[str, int]:
    found = {}
    async for name in storage.blobs.names("default/"):
        data = await storage.blobs.read(name)
        pixel = Image.open(io.BytesIO(data)).getpixel((0, 0))
        assert isinstance(pixel, tuple)
        found[name.removeprefix("default/").rpartition("-")[0]] = pixel[0]
    return found


async def test_each_job_is_drawn_with_the_model_that_it_names(
    storage: Storage, worker_settings: MakeSettings
):
    engines = Engines(worker_settings, *MODELS)
    for model in (None, *MODELS):
        await storage.models.send([job(number, model) for number in range(5)])
    pipeline = await work(storage, worker_settings(), engines.models())
    expected = {"None": 0, "first": 0, "second": 1, "third": 2}
    assert await greys(storage) == expected
    assert pipeline.metrics.outcomes == {"completed": 20}
    assert pipeline.metrics.images_stored == 20
    assert sorted(engines.loaded) == sorted(MODELS), "each is loaded once"
    read = pipeline.metrics.registry.get_sample_value
    assert read("imagefleet_model_switches_total", {"model": "second"}) == 1
    assert (read("imagefleet_model_switch_seconds_total") or 0) > 0
    assert read("imagefleet_model_images_total", {"model": "third"}) == 5
    jobs = {"model": "first", "outcome": "completed"}
    assert read("imagefleet_model_jobs_total", jobs) == 10
    for model in MODELS:
        assert await storage.models.is_served(model)


@local_only
async def test_a_worker_whose_queues_run_dry_does_not_wait_for_its_next_look_at_the_others(
    storage: Storage,
    worker_settings: MakeSettings,
    monkeypatch,
):
    monkeypatch.setattr(change, "LOOK_SECONDS", 60.0)
    for model in ("first", "second"):
        await storage.models.send([job(number, model) for number in range(3)])
    models = Engines(worker_settings, "first", "second").models()
    pipeline = await work(storage, worker_settings(), models)
    assert pipeline.metrics.images_stored == 6


@local_only
async def test_an_image_names_the_hash_of_its_own_model(
    storage: Storage, worker_settings: MakeSettings
):
    for model in MODELS:
        await storage.models.send([job(1, model)])
    await work(storage, worker_settings(), Engines(worker_settings, *MODELS).models())
    for model in MODELS:
        (name,) = [each async for each in storage.blobs.names(f"default/{model}-1")]
        data = await storage.blobs.read(name)
        parameters = Image.open(io.BytesIO(data)).info["parameters"]
        sha256 = hashlib.sha256(f"weights of {model}".encode()).hexdigest()
        assert f"Model hash: {sha256[:10]}, Model: {model}," in parameters


async def test_a_job_in_the_wrong_queue_is_moved_to_its_models_and_keeps_id_and_priority(
    storage: Storage, worker_settings: MakeSettings
):
    await storage.queues["high"].send(['{"prompt": "a", "model": "second"}'])
    async for message in visible(storage.queues["high"]):
        first_id = message.id
    await storage.queues["normal"].send([job(1, "second"), job(2, "first")])
    engines = Engines(worker_settings, "first")
    pipeline = await work(storage, worker_settings(), engines.models())
    assert pipeline.metrics.outcomes == {"moved": 2, "completed": 1}
    assert (await storage.poison.depth()).messages == 0
    (moved,) = [
        each.body async for each in visible(storage.models.of("second")["high"])
    ]
    assert json.loads(moved)["id"] == first_id
    await storage.models.send([job(3, "second")])
    engines = Engines(worker_settings, "first", "second")
    pipeline = await work(storage, worker_settings(), engines.models())
    assert pipeline.metrics.outcomes == {"completed": 3}
    assert (await greys(storage))["second"] == 1


@local_only
async def test_a_job_that_cannot_be_moved_is_handed_back_and_never_poison(
    storage: Storage,
    worker_settings: MakeSettings,
    monkeypatch,
):
    async def refuse(*_: object) -> None:
        raise errors.SetupError("the SAS token may not add messages")

    released = asyncio.Event()
    release = type(storage.queues["normal"]).release

    async def noting(*arguments: Any, **options: Any) -> None:
        await release(*arguments, **options)
        released.set()

    monkeypatch.setattr(type(storage.queues["normal"]), "release", noting)
    monkeypatch.setattr(storage.models, "send", refuse)
    await storage.queues["normal"].send([job(1, "second")])
    engines = Engines(worker_settings, "first")
    stop = asyncio.Event()
    running = asyncio.create_task(
        work(storage, worker_settings(until_empty=False), engines.models(), stop)
    )
    await released.wait()
    stop.set()
    pipeline = await running
    assert pipeline.metrics.outcomes == {"handed_back": 1}
    depth = await storage.queues["normal"].depth()
    assert (depth.messages, depth.oldest_age_seconds) == (1, None), (
        "later, not at once again"
    )
    assert (await storage.poison.depth()).messages == 0


@local_only
async def test_a_model_that_cannot_be_loaded_leaves_its_jobs_to_others(
    storage: Storage, worker_settings: MakeSettings
):
    engines = Engines(worker_settings, "first", "second")
    engines.broken = {"second"}
    await storage.models.send([job(1, "second"), job(2, "first")])
    models = engines.models()
    await work(
        storage, worker_settings(), models
    )  # which ends: what is left is not its own
    assert models.names == ["first"]
    assert await greys(storage) == {"first": 0}
    assert (await storage.models.of("second")["normal"].depth()).messages == 1


@local_only
async def test_a_worker_begins_with_a_model_whose_jobs_wait_and_fetches_no_other(
    storage: Storage, worker_settings: MakeSettings
):
    engines = Engines(worker_settings, "first", "second")
    await storage.models.send([job(1, "second")])
    models = engines.models()
    await models.begin(storage.models.served(models.names))
    assert (models.current.name, engines.fetched) == ("second", ["second"])
    await work(storage, worker_settings(), models)
    assert engines.loaded == ["second"]
    assert models.served_now() == {"second"}, "jobs without a model are the first's"
    assert await greys(storage) == {"second": 1}


@local_only
async def test_a_worker_whose_beginning_fails_goes_on_with_the_model_of_jobs_without_one(
    storage: Storage, worker_settings: MakeSettings
):
    engines = Engines(worker_settings, "first", "second")
    engines.broken = {"second"}
    await storage.models.send([job(1, "second")])
    models = engines.models()
    await models.begin(storage.models.served(models.names))
    await storage.models.send([job(2)])
    await work(storage, worker_settings(), models)
    assert models.names == ["first"]
    assert engines.fetched[-1] == "first"
    assert await greys(storage) == {"None": 0}
    assert (await storage.models.of("second")["normal"].depth()).messages == 1


@local_only
async def test_the_next_models_weights_are_read_while_the_last_images_are_drawn(
    storage: Storage,
    worker_settings: MakeSettings,
    monkeypatch,
):
    monkeypatch.setattr("worker.models.change.SHORTEST_STAY_SECONDS", 0.05)
    engines = Engines(worker_settings, "first", "second")
    drawn_meanwhile = threading.Event()

    def slow(checkpoint: Checkpoint) -> None:
        if checkpoint.name == "second":
            engines.drawing.clear()
            assert engines.drawing.wait(), "nothing was drawn while they were read"
            drawn_meanwhile.set()

    await storage.models.send([job(number, "first") for number in range(60)])
    await storage.models.send([job(1, "second")])
    monkeypatch.setattr("worker.models.change.STAY_PER_CHANGE", 0)
    models = engines.models()
    models.read = slow
    await work(storage, worker_settings(prefetch_seconds=0), models)
    assert drawn_meanwhile.is_set()
    assert await greys(storage) == {"first": 0, "second": 1}


@local_only
async def test_a_long_job_is_put_off_for_another_model_and_loses_no_image_that_is_begun(
    storage: Storage,
    worker_settings: MakeSettings,
    monkeypatch,
):
    monkeypatch.setattr("worker.models.change.SHORTEST_STAY_SECONDS", 0.05)
    monkeypatch.setattr("worker.models.change.STAY_PER_CHANGE", 0)
    finish = Pipeline._finish

    async def finish_begun(
        self: Pipeline, generate: Any, seconds: float, *given: Any, puts_off: bool
    ) -> bool:
        """What was pulled is not waited for, and what was begun as long as it takes."""
        most = seconds if puts_off else 0.05
        return await finish(self, generate, most, *given, puts_off=puts_off)

    monkeypatch.setattr(Pipeline, "_finish", finish_begun)
    drawn = []

    plain = draw_noise

    def noted(request: contract.ImageRequest) -> contract.Pixels:
        drawn.append(request.seed)
        return plain(request)

    monkeypatch.setattr(sys.modules[__name__], "draw_noise", noted)
    long = {"prompt": "a", "id": "long", "model": "first", "seed": 0, "n_iter": 300}
    await storage.models.send([json.dumps(long)])
    await storage.models.send([job(1, "second")])
    engines = Engines(worker_settings, "first", "second")
    pipeline = await work(storage, worker_settings(), engines.models())
    assert pipeline.metrics.outcomes["completed"] == 2
    assert pipeline.metrics.outcomes["handed_back"] >= 1, "it was drawn in one go"
    assert len(drawn) == 301, "some were drawn twice"


@local_only
async def test_a_stop_during_a_change_loses_nothing(
    storage: Storage, worker_settings: MakeSettings
):
    engines = Engines(worker_settings, "first", "second")
    stop = asyncio.Event()
    loading = threading.Event()
    go_on = threading.Event()
    load = engines.load

    def slow(checkpoint: Checkpoint) -> contract.Engine:
        if checkpoint.name == "second":
            loading.set()
            go_on.wait()
        return load(checkpoint)

    engines.load = slow  # type: ignore[method-assign]
    await storage.models.send([job(1, "second")])
    running = asyncio.create_task(
        work(storage, worker_settings(), engines.models(), stop)
    )
    await asyncio.to_thread(loading.wait)
    stop.set()
    await polling.turn(50)
    go_on.set()
    await running
    assert (await storage.models.of("second")["normal"].depth()).messages == 1


# Which models


@local_only
async def test_all_models_of_the_storage_are_found_by_a_star(
    storage: Storage, worker_settings: MakeSettings
):
    for name in ("b.safetensors", "a.tar", "manifest.json", "a.txt"):
        await storage.files.create(f"models/{name}", b"", "x/y", {})
    for text in ("store:*", "store:models/*"):
        found = await checkpoints.find(worker_settings(model=text), storage.files)
        assert [each.name for each in found] == ["a", "b"]
        assert found[0].settings.model == "store:a.tar"
    found = await checkpoints.find(
        worker_settings(model="first,store:*"), storage.files
    )
    assert [each.name for each in found] == ["first", "a", "b"]


@local_only
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "store:*"}, "there is no model in models/"),
        ({"model": "x/first,y/first"}, "two models have the name 'first'"),
        (
            {"model": "first,m\u00f6del"},
            "no job can name the model 'm\u00f6del': rename it",
        ),
        (
            {"model": "first,second", "model_sha256": "0" * 64},
            "--model-sha256 is for one model",
        ),
        ({"model": ",".join(map(str, range(51)))}, "a worker serves 50 at most"),
    ],
)
async def test_models_that_cannot_be_told_apart_are_refused(
    storage: Storage,
    worker_settings: MakeSettings,
    changes: dict[str, Any],
    message: str,
):
    with pytest.raises(errors.SetupError, match=message):
        await checkpoints.find(worker_settings(**changes), storage.files)


@local_only
async def test_one_path_with_a_comma_is_one_model(
    worker_settings: MakeSettings, tmp_path
):
    (tmp_path / "a,b").mkdir()
    assert checkpoints.given(worker_settings(model=tmp_path / "a,b")) == [
        str(tmp_path / "a,b")
    ]
    assert checkpoints.given(worker_settings(model="c,d")) == ["c", "d"]


async def test_an_engine_that_is_replaced_delivers_nothing_to_the_next_ones_jobs():
    """Tickets begin anew: an image of before would pass for another job's."""
    thread = EngineThread(backlog=1)
    engine = await thread.start(lambda: StandInEngine(capacity=2))
    request = contract.ImageRequest("a", "", (), "euler", 1, 7.0, 1, 16, 16)
    for ticket in range(4):  # more than the backlog: nobody takes them
        await thread.submit(ticket, engine.prepare(request))
    await thread.replace(lambda: StandInEngine(capacity=3))
    assert thread.capacity == 3
    assert thread.in_engine == 0
    await thread.submit(77, engine.prepare(request))
    assert (await thread.finished()).finished.ticket == 77
    with pytest.raises(errors.SetupError, match="broken"):
        await thread.replace(_fail)
    assert not await thread.submit(1, engine.prepare(request)), "there is no engine"
    await thread.replace(StandInEngine)
    await thread.submit(5, engine.prepare(request))
    assert (await thread.finished()).finished.ticket == 5
    await thread.stop()


def _fail() -> contract.Engine:
    raise errors.SetupError("it is broken")


async def test_an_engine_that_takes_the_next_model_stays_and_one_that_cannot_is_closed():
    closed = []

    class Engine(StandInEngine):
        def close(self) -> None:
            closed.append(self.capacity)

    thread = EngineThread(backlog=1)
    first = await thread.start(lambda: Engine(capacity=2))
    request = contract.ImageRequest("a", "", (), "euler", 1, 7.0, 1, 16, 16)
    assert await thread.replace(_fail, lambda: True) is first
    assert closed == []
    await thread.submit(1, first.prepare(request))
    assert (await thread.finished()).finished.ticket == 1

    second = await thread.replace(lambda: Engine(capacity=3), lambda: False)
    assert (closed, second.capacity) == ([2], 3)

    def raises() -> bool:
        raise RuntimeError("some weights are the next model's, and some are not")

    third = await thread.replace(lambda: Engine(capacity=4), raises)
    assert (closed, third.capacity) == ([2, 3], 4)
    await thread.submit(2, third.prepare(request))
    assert (await thread.finished()).finished.ticket == 2
    await thread.stop()


@local_only
@pytest.mark.parametrize("free", [2, 1])
async def test_weights_are_read_for_the_engine_where_there_is_memory_for_them(
    storage: Storage,
    worker_settings: MakeSettings,
    monkeypatch,
    tmp_path,
    free: int,
):
    engines = Engines(worker_settings, "first", "second")
    path = tmp_path / "second.safetensors"
    path.write_bytes(bytes(1000))
    second = Checkpoint("second", worker_settings(model=path))
    monkeypatch.setattr(host, "free_memory_bytes", lambda: 1000 * free)
    read = []

    def take_weights(checkpoint: Checkpoint) -> Callable[[], bool]:
        read.append(checkpoint.name)
        return lambda: True

    models = WorkerModels([second], engines.fetch, engines.load, take_weights)
    take = await models.prepare(second)
    assert (take is not None) == (free == 2) == (read == ["second"])
