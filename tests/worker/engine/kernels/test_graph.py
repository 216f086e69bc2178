import pytest
import torch

from packages import TracedPackages
from worker.engine.kernels.graph import Graph


def step(state: torch.Tensor, weight: torch.Tensor) -> None:
    state.copy_(torch.relu(state @ weight) + 1)


def make(state: torch.Tensor, weight: torch.Tensor) -> Graph:
    return Graph("a step", "step", step, (state, weight), None)


def compile_it(graph: Graph) -> None:
    packages = TracedPackages()
    packages.begin(graph)
    packages.end()


def test_a_compiled_graph_runs_on_the_tensors_as_they_are_when_it_is_called():
    state = torch.arange(12.0).reshape(3, 4) - 5
    weight = torch.eye(4) / 2
    expected = state.clone()
    graph = make(state, weight)
    compile_it(graph)
    assert graph.is_compiled
    for factor in (1, 3):
        weight.mul_(factor)
        step(expected, weight)
        graph()
        assert torch.equal(state, expected)


def test_what_is_described_stays_though_a_function_gets_other_tensors_meanwhile():
    held = [torch.ones(2)]
    graph = Graph("doubling", "double", double_first, (held,), None)
    graph.describe()
    first = held[0]
    held[0] = torch.ones(5)
    compile_it(graph)
    graph()
    assert first.tolist() == [2.0, 2.0]


def double_first(held: list[torch.Tensor]) -> None:
    held[0].mul_(2)


def test_any_number_of_graphs_are_compiled_of_one_function():
    """Torch keeps eight of a code object at most."""
    for size in range(12):
        state = torch.ones(size + 2, 2)
        graph = make(state, torch.eye(2))
        compile_it(graph)
        graph()
        assert state.eq(2).all()


def test_a_run_that_the_driver_takes_only_once_the_gpu_is_free_has_no_room_beside_it():
    graph = make(torch.ones(2, 2), torch.eye(2))
    for _ in range(2):
        graph.note_run(0.05, launching_seconds=0.0005)
    assert graph.seconds is None, "the first ones also load kernels"
    graph.note_run(0.05, launching_seconds=0.0005)
    assert (graph.seconds, graph.has_room_for_next) == (0.05, True)
    graph.note_run(0.05, launching_seconds=0.03)
    assert not graph.has_room_for_next
    graph.note_run(0.08, launching_seconds=0.0)
    assert graph.seconds == pytest.approx(0.06), "a moving average"
    assert not graph.has_room_for_next, "since it waits for the GPU"


def test_one_late_launch_does_not_make_the_host_wait_for_good():
    """The first one takes the graph to the GPU; another thread may hold up a later one."""
    graph = make(torch.ones(2, 2), torch.eye(2))
    graph.note_run(0.05, launching_seconds=0.2)
    for late in (0.0, 0.02, 0.0, 0.0, 0.0, 0.02):
        graph.note_run(0.05, launching_seconds=late)
    assert graph.has_room_for_next
