import gc
import itertools
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from worker.engine import phases
from worker.engine.kernels.compile import Compiled

pytestmark = pytest.mark.slow


def step(state: torch.Tensor, weight: torch.Tensor) -> None:
    state.copy_(torch.relu(state @ weight) + 1)


def break_the_graph(state: torch.Tensor) -> None:
    assert str(state.sum().item())
    state.add_(1)


@pytest.fixture
def state() -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4) - 5


def test_tracing_on_another_thread_leaves_the_tensors_alone(
    state: torch.Tensor,
):
    weight = torch.eye(4) / 2
    before, expected = state.clone(), state.clone()
    step(expected, weight)
    compiled = Compiled("a step", step, (state, weight), backend="eager", pool=None)
    thread = threading.Thread(target=compiled.trace)
    thread.start()
    thread.join()
    assert torch.equal(state, before)
    assert compiled.graphs == 1
    compiled()
    assert torch.equal(state, expected)
    assert (compiled.graphs, compiled.is_compiled) == (1, True)


def test_compiling_is_taken_apart_in_tracing_the_compiler_and_the_first_runs(
    state: torch.Tensor, monkeypatch
):
    calls = itertools.count()
    monkeypatch.setattr(phases, "time", SimpleNamespace(monotonic=lambda: next(calls)))
    monkeypatch.setattr(phases, "seconds", dict.fromkeys(phases.seconds, 0.0))
    Compiled("a step", step, (state, torch.eye(4)), backend="eager", pool=None)()
    found = {phase for phase, seconds in phases.seconds.items() if seconds}
    assert found == {"trace", "compile", "autotune"}
    assert phases.seconds["trace"] == 2, "without the compiler"


def test_what_cannot_be_compiled_runs_uncompiled(state: torch.Tensor, caplog):
    expected = state + 1
    compiled = Compiled("a step", break_the_graph, (state,), backend="eager", pool=None)
    compiled()
    assert torch.equal(state, expected)
    assert not compiled.is_compiled
    assert "a step runs uncompiled" in caplog.text


def test_other_threads_run_their_layers_as_ever_while_torch_traces(
    monkeypatch,
):
    layer, found = torch.nn.Linear(2, 2), []

    def use_layer() -> None:
        found.append((layer(torch.ones(2)).shape, torch.compiler.is_compiling()))

    def traced(_x: object) -> None:
        thread = threading.Thread(target=use_layer)
        thread.start()
        thread.join()

    def compiler(graph: object, _inputs: object) -> object:
        torch.fx.symbolic_trace(traced)  # as in parts of Inductor
        return graph

    monkeypatch.setattr("torch._dynamo.lookup_backend", lambda _name: compiler)
    x = torch.ones(2)
    Compiled("a step", torch_double, (x,), backend="eager", pool=None).trace()
    assert found == [(torch.Size([2]), False)]


def torch_double(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def test_what_is_released_keeps_no_memory_even_where_the_collector_passes_over_it():
    class Outputs(list[torch.Tensor]):
        """Lists have no weak references of their own."""

    state = torch.zeros(2, 2)
    compiled = Compiled(
        "a step", step, (state, torch.eye(2)), backend="eager", pool=None
    )
    compiled()
    outputs = Outputs([torch.zeros(8)])
    compiled._output = outputs
    kept = weakref.ref(outputs)
    del outputs
    gc.collect()
    gc.freeze()
    try:
        assert kept() is not None
        compiled.release()
        del compiled
        assert kept() is None
    finally:
        gc.unfreeze()


def test_any_number_of_functions_can_be_compiled():
    for size in range(12):
        tensors = (torch.ones(size + 2),)
        compiled = Compiled("it", torch_double, tensors, backend="eager", pool=None)
        compiled()
        assert compiled.is_compiled
