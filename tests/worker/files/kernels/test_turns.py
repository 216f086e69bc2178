import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polling
from kernel_files import KEY
from worker import process
from worker.engine import load
from worker.files.kernels import cache
from worker.files.kernels.cache import KernelCache
from worker.models.checkpoints import Checkpoint

DEMO_MODEL = Path(__file__).parents[4] / "demo_model"

#: Says when it begins and ends to compile.
WORKER = """
import signal, sys, pathlib
from worker.files.kernels import cache
with cache.by_one_first(pathlib.Path(sys.argv[1]), "kernels"):
    print("begins", flush=True)
    {}
print("ends", flush=True)
"""


def start(folder: Path, work: str = "pass") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER.format(work), folder],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_others_wait_for_the_first_and_then_go_on_together(tmp_path, caplog):
    inside, most = 0, []
    first_is_done = threading.Event()
    together = threading.Barrier(3)
    caplog.set_level("INFO")

    def compiles() -> None:
        nonlocal inside
        with cache.by_one_first(tmp_path, "kernels"):
            inside += 1
            most.append(inside)
            if len(most) == 1:
                polling.until_in_thread(
                    lambda: caplog.text.count("waiting for another") == 3
                )
                assert inside == 1, "others did not wait"
                first_is_done.set()
            else:
                assert first_is_done.is_set()
                together.wait(5)

    threads = [threading.Thread(target=compiles) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(10)
    assert len(most) == 4
    assert not together.broken


def test_a_worker_that_dies_as_it_compiles_leaves_that_to_the_next(
    tmp_path,
):
    with start(tmp_path, "signal.pause()") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "begins\n"
        with start(tmp_path) as second:
            first.kill()
            assert second.communicate()[0] == "begins\nends\n"


def test_a_failure_is_not_taken_for_compiled_kernels(tmp_path):
    with pytest.raises(ZeroDivisionError), cache.by_one_first(tmp_path, "kernels"):
        raise ZeroDivisionError
    assert not list(tmp_path.glob("*.compiled"))
    with cache.by_one_first(tmp_path, "kernels"):
        pass
    assert list(tmp_path.glob("*.compiled"))


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path, caplog):
    (tmp_path / "file").touch()
    with cache.by_one_first(tmp_path / "file", "kernels"):
        pass
    assert "without waiting" in caplog.text


def test_a_worker_draws_first_and_each_graph_is_compiled_once_on_a_machine(
    monkeypatch, worker_settings: Callable[..., Any], tmp_path
):
    given: list[load.EngineSettings] = []
    monkeypatch.setattr(load, "load_engine", given.append)
    settings = worker_settings(model=str(DEMO_MODEL), compile="auto")
    stop, hurry = asyncio.Event(), asyncio.Event()
    ignore = lambda _: None  # noqa: E731 - shorter
    worker = process._Worker(settings, None, ignore, None, None, stop, hurry)
    worker._kernels = KernelCache(tmp_path, KEY)
    worker._kernels.give_up()
    worker._load_engine(Checkpoint("demo", settings))
    (asked,) = given
    assert asked.compile == "background"
    assert asked.around_compiling is not None
    with asked.around_compiling("the UNet"), asked.around_compiling("the VAE"):
        pass  # a graph does not wait for another
    assert len(list(tmp_path.glob("*.compiled"))) == 2
