import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from worker.engine.kernels import compile  # noqa: A004 - the module's name
from worker.gpu_thread import THREAD_NAME

pytestmark = pytest.mark.slow


def double(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def make(x: torch.Tensor) -> compile.Compiled:
    return compile.Compiled("it", double, (x,), backend="eager", pool=None)


@pytest.fixture
def during(monkeypatch) -> Callable[[Callable[[], object]], Any]:
    """Traces on the thread, where a function runs instead of torch's compiler."""

    def run(look: Callable[[], object]) -> Any:
        monkeypatch.setattr(
            compile.Compiled, "trace", lambda _compiled: seen.append(look())
        )
        seen = []
        compile.trace_on_thread(make(torch.ones(2)), torch.device("cpu")).result()
        return seen[0]

    return run


def test_the_thread_ends_with_the_process_which_must_leave_around_it(
    during: Any,
):
    thread = during(threading.current_thread)
    assert thread.daemon
    assert thread.name.startswith(THREAD_NAME)


def test_compiled_functions_are_bound_to_the_threads_of_the_engine(during: Any):
    before = torch.get_num_threads()
    torch.set_num_threads(3)  # a new thread begins with as many as the environment says
    try:
        assert during(torch.get_num_threads) == 3
    finally:
        torch.set_num_threads(before)


def test_what_breaks_on_the_thread_is_raised_on_the_engines(during: Any):
    def break_down() -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        during(break_down)
    assert not compile.compiling_elsewhere.is_set()


def test_a_compiled_function_that_runs_while_another_is_traced_is_not_taken_for_part_of_it():
    x = torch.ones(2)
    compiled = make(x)
    compiled()
    compiled._function = lambda _x: pytest.fail("torch would have traced this")
    compile.compiling_elsewhere.set()
    try:
        compiled()
    finally:
        compile.compiling_elsewhere.clear()
    assert x.tolist() == [4.0, 4.0]


def test_what_is_abandoned_is_not_compiled_and_not_reported(
    caplog,
):
    compiled = make(torch.ones(2))
    compiled.abandon()
    compile.trace_on_thread(compiled, torch.device("cpu")).result()
    assert compiled.graphs == 0
    assert not caplog.records
