"""The engine as a library: results as they are done, failures by job, room for endless sources."""

import asyncio
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import imagefleet
from benchmarks.stand_in import StandInEngine, draw_noise
from imagefleet import errors
from imagefleet.files import demo
from tiny_detectors import write_detector
from worker.engine import contract
from worker.stages import library
from worker.stages.library import AsyncEngine, Engine

ROOT = Path(__file__).parents[3]

Make = Callable[..., Engine]

#: Draws the demo, and ends after a picture while it draws others, without closing the engine.
PROGRAM = """
import itertools, os, signal, sys
import imagefleet
from imagefleet.files import demo

def jobs():
    return (imagefleet.Job(prompt="a house", seed=each, steps=9) for each in itertools.count())

engine = imagefleet.Engine(demo.find_checkpoint(), device="cpu", slots=2)
drawing = engine.draw(jobs())
next(drawing)
"""


def draw(request: contract.ImageRequest) -> contract.Pixels:
    if "broken" in str(request.prompt):
        raise errors.JobError("the prompt is broken")
    if "gpu" in str(request.prompt):
        raise errors.NodeError("the GPU fell off the bus")
    return draw_noise(request)


@pytest.fixture
def make(monkeypatch, tmp_path) -> Iterator[Make]:
    """Makes an engine that draws noise."""
    made: list[Engine] = []
    monkeypatch.setattr(library.load, "load_engine", lambda _: StandInEngine(draw=draw))
    monkeypatch.setenv("HOME", str(tmp_path))

    def engine(**terms: Any) -> Engine:
        made.append(Engine(demo.find_checkpoint(), **terms))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def test_a_list_of_prompts_is_drawn_each_once(make: Make):
    jobs = [imagefleet.Job(prompt=f"house {number}", n_iter=2) for number in range(20)]

    found = list(make().draw(jobs))

    assert sorted(result.job.prompt for result in found) == sorted(
        job.prompt for job in jobs
    )
    assert all(len(result.images) == 2 and result.error is None for result in found)
    assert len({result.job.id for result in found}) == 20


def test_a_job_that_fails_is_a_result_and_stops_no_other(make: Make, tmp_path):
    prompts = ["a", "broken", "b, <lora:nowhere:1>", "c"]

    found = list(
        make(loras=tmp_path).draw(imagefleet.Job(prompt=text) for text in prompts)
    )

    failed = {
        result.job.prompt: str(result.error) for result in found if not result.images
    }
    assert failed.keys() == {"broken", "b, <lora:nowhere:1>"}
    assert failed["broken"] == "the prompt is broken"


def test_detectors_are_found_in_a_folder(make: Make, tmp_path):
    # The second is drawn with another seed than the picture.
    found = [(16, 32, 12, 12, 0.9), (48, 32, 12, 12, 0.8)]
    write_detector(tmp_path / "face.onnx", found)
    fields = {"prompt": "a", "seed": 3, "width": 128, "height": 128}
    jobs = []
    for name in ("", "face.pt", "hand.pt"):
        args = [{"ad_model": name}] if name else []
        scripts = {"ADetailer": {"args": args}}
        jobs.append({**fields, "id": f"a{name}", "alwayson_scripts": scripts})

    drawn = {each.job.id: each for each in make(detectors=tmp_path).draw(jobs)}

    assert "no detector hand.onnx" in str(drawn["ahand.pt"].error)
    plain, detailed = (np.asarray(drawn[name].images[0]) for name in ("a", "aface.pt"))
    changed = plain != detailed
    assert changed[60:68, 92:100].any()
    assert not changed[:16].any()


def test_a_detector_that_is_replaced_is_read_anew(make: Make, tmp_path):
    engine = make(detectors=tmp_path)
    scripts = {"ADetailer": {"args": [{"ad_model": "face.pt"}]}}
    job = {"prompt": "a", "seed": 3, "width": 128, "height": 128}
    drawn = []
    for found in (
        [(16, 32, 12, 12, 0.1)],
        [(16, 32, 12, 12, 0.9), (48, 32, 12, 12, 0.8)],
    ):
        write_detector(tmp_path / "face.onnx", found)
        (each,) = engine.draw([{**job, "alwayson_scripts": scripts}])
        drawn.append(np.asarray(each.images[0]))

    assert (drawn[0] != drawn[1]).any()


def test_a_source_that_never_ends_is_read_as_there_is_room(
    make: Make,
):
    read = itertools.count()
    engine = make()

    results = engine.draw(imagefleet.Job(prompt=str(number)) for number in read)
    found = list(itertools.islice(results, 30))
    results.close()  # type: ignore[attr-defined]

    assert len(found) == 30
    assert next(read) < 30 + 4 * 4
    assert [
        len(result.images) for result in engine.draw([imagefleet.Job(prompt="a")])
    ] == [1]


async def test_a_slow_source_keeps_no_result_back(make: Make):
    make()  # for its stand-in
    goes_on = asyncio.Event()

    async def jobs() -> AsyncIterator[imagefleet.Job]:
        yield imagefleet.Job(prompt="a")
        await goes_on.wait()
        yield imagefleet.Job(prompt="b")

    async with AsyncEngine(demo.find_checkpoint()) as engine:
        results = engine.draw(jobs())
        assert (await anext(results)).job.prompt == "a"
        goes_on.set()
        assert [each.job.prompt async for each in results] == ["b"]


def test_fields_are_drawn_as_jobs_and_what_is_neither_is_refused(
    make: Make,
):
    engine = make()

    (drawn,) = engine.draw([{"prompt": "a", "steps": 4}])

    assert (drawn.job.steps, len(drawn.images)) == (4, 1)
    with pytest.raises(errors.JobError, match="did you mean 'steps'"):
        list(engine.draw([{"prompt": "a", "stepz": 4}]))
    with pytest.raises(errors.JobError, match="and not 'str'"):
        list(engine.draw(["a red house"]))  # type: ignore[list-item]


def test_a_fork_is_refused_with_a_sentence(make: Make, monkeypatch):
    engine = make()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        with pytest.raises(errors.SetupError, match="make an engine in the process"):
            list(engine.draw([imagefleet.Job(prompt="a")]))


def test_a_broken_gpu_ends_the_drawing(make: Make):
    engine = make()

    with pytest.raises(errors.NodeError):
        list(engine.draw([imagefleet.Job(prompt="gpu"), imagefleet.Job(prompt="a")]))
    with pytest.raises(errors.NodeError):
        list(engine.draw([imagefleet.Job(prompt="a")]))


def test_what_is_no_checkpoint_or_setting_is_refused_at_once(tmp_path):
    with pytest.raises(errors.SetupError, match="checkpoint"):
        Engine(tmp_path)
    with pytest.raises(errors.SetupError, match="slots"):
        Engine(demo.find_checkpoint(), slots=-1)


def test_the_class_is_found_by_its_entry_point():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    for name, value in declared["entry-points"]["imagefleet"].items():
        assert metadata.EntryPoint(name, value, "imagefleet").load() is getattr(
            library, name
        )
        assert name in dir(imagefleet)


@pytest.mark.slow
def test_the_demo_is_drawn_with_loras_of_its_own_in_one_call():
    folder = demo.find_checkpoint()
    jobs = [
        imagefleet.Job(prompt=f"a red house{lora}", steps=steps, seed=1)
        for lora in ("", ", <lora:outline-style:1>")
        for steps in (3, 6)
    ]

    with Engine(folder, loras=folder / "loras", device="cpu", compile="off") as engine:
        found = list(engine.draw(jobs))

    pictures = {result.images[0].tobytes() for result in found}
    assert [result.error for result in found] == [None] * 4
    assert len(pictures) == 4


def test_a_fork_of_a_program_with_an_engine_ends(make: Make):
    make()

    child = multiprocessing.get_context("fork").Process(target=lambda: None)
    child.start()

    child.join()
    assert child.exitcode == 0


@pytest.mark.slow
def test_a_program_that_ends_without_closing_ends_as_it_wants_to(tmp_path):
    """A thread inside torch aborts the interpreter that ends beside it."""
    expected = {
        "sys.exit(3)": 3,
        "raise ValueError": 1,
        "os.kill(os.getpid(), signal.SIGINT)": -signal.SIGINT,
    }
    environment = {**os.environ, "HOME": str(tmp_path)}

    begun = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM + last],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for last in expected
    ]

    ended = [process.communicate()[1] for process in begun]
    codes = [process.returncode for process in begun]
    assert codes == [*expected.values()], ended


@pytest.mark.slow
def test_ctrl_c_ends_a_drawing_without_a_second_exception(tmp_path):
    program = PROGRAM.replace("next(drawing)\n", "with engine:\n  for _ in drawing:\n")
    last = "    print('drawn', flush=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", program + last],
        env={**os.environ, "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()

    process.send_signal(signal.SIGINT)

    _, told = process.communicate()
    assert process.returncode == -signal.SIGINT
    assert told.rstrip().endswith("KeyboardInterrupt")
    assert "During handling" not in told


def test_a_lora_that_is_missing_is_told_in_words_of_the_library(make: Make, tmp_path):
    for folder, where in (
        (None, "no LoRA oil.safetensors: the LoRA folder is not set"),
        (tmp_path, f"no LoRA oil.safetensors in the LoRA folder {tmp_path}"),
    ):
        (drawn,) = make(loras=folder).draw([{"prompt": "a <lora:oil:1>"}])
        assert str(drawn.error) == where
