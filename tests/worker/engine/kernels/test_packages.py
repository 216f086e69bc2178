"""Where a graph's kernels are from: this folder, others, or the compiler; drawing goes on."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from packages import multiply
from worker.engine.kernels import packages
from worker.engine.kernels.compiler import CompileError
from worker.engine.kernels.graph import Graph
from worker.engine.kernels.package import Package, UnusablePackageError
from worker.engine.kernels.packages import Packages


class Compiler:
    """Compiles once it is let go."""

    def __init__(self) -> None:
        self.began: list[Path] = []
        self.started = 0
        self.may_end = False
        self.closed = 0

    def start(self) -> None:
        self.started += 1

    def begin(self, content: bytes, target: Path) -> None:
        assert content
        self.began.append(target)

    def is_done(self, _seconds: float = 0.0) -> bool:
        return self.may_end

    def end(self) -> None:
        self.began[-1].write_text("kernels")

    def close(self) -> None:
        self.closed += 1


class Exchange:
    """Others, who have what is in *known*, or have not answered yet."""

    def __init__(self, known: bool | None) -> None:
        self.answer: Future[bool] = Future()
        self.known = known
        self.shared: list[Path] = []

    def find(self, _name: str, target: Path) -> Future[bool]:
        if self.known:
            target.write_text("kernels")
        if self.known is not None and not self.answer.done():
            self.answer.set_result(self.known)
        return self.answer

    def share(self, path: Path) -> None:
        self.shared.append(path)


@pytest.fixture
def compiler(monkeypatch) -> Compiler:
    stand_in = Compiler()
    monkeypatch.setattr(packages, "Compiler", lambda: stand_in)

    def load(path: Path) -> Package:
        if path.read_text() != "kernels":
            raise UnusablePackageError(f"{path.name}: damaged")
        return Package(multiply, [0, 1, 2])

    monkeypatch.setattr(Package, "load", load)
    return stand_in


@pytest.fixture
def make(compiler: Compiler, tmp_path) -> Callable[[Any], Packages]:
    return lambda exchange: Packages(tmp_path, torch.device("cpu"), exchange)


@pytest.fixture
def graph() -> Graph:
    tensors = torch.zeros(2, 2), torch.ones(2, 2), torch.ones(2, 2)
    return Graph("a product", "product", multiply, tensors, None)


def test_what_is_in_the_folder_is_taken_at_once(make, graph: Graph, compiler: Compiler):
    made = make(None)
    made.begin(graph)
    compiler.may_end = True
    made.end()
    assert len(compiler.began) == 1
    exchange = Exchange(known=None)
    other = make(exchange)
    again = Graph("a product", "product", multiply, graph._arguments, None)
    other.begin(again)
    assert other.is_done()
    other.end()
    assert again.is_compiled
    assert other.graphs == {"disk": 1, "fetched": 0, "compiled": 0}
    assert len(compiler.began) == 1
    assert not exchange.answer.done(), "nobody was asked"


def test_only_a_machine_without_packages_starts_its_compiler_ahead(
    make, graph: Graph, compiler: Compiler
):
    made = make(None)
    made.prepare()
    assert compiler.started == 1
    compiler.may_end = True
    made.begin(graph)
    made.end()
    make(None).prepare()
    assert compiler.started == 1


def test_what_others_have_is_fetched_and_not_compiled(
    make, graph: Graph, compiler: Compiler
):
    made = make(Exchange(known=True))
    made.begin(graph)
    assert made.is_done()
    made.end()
    assert graph.is_compiled
    assert made.graphs == {"disk": 0, "fetched": 1, "compiled": 0}
    assert compiler.began == []


def test_what_nobody_has_is_compiled_and_shared(make, graph: Graph, compiler: Compiler):
    exchange = Exchange(known=False)
    made = make(exchange)
    made.begin(graph)
    assert not made.is_done()
    assert len(compiler.began) == 1
    compiler.may_end = True
    assert made.is_done()
    made.end()
    assert made.graphs == {"disk": 0, "fetched": 0, "compiled": 1}
    assert exchange.shared == compiler.began


def test_the_first_package_is_waited_for_while_it_is_fetched(
    make, graph: Graph, compiler: Compiler
):
    class Thread(Exchange):
        def find(self, name: str, target: Path) -> Future[bool]:
            threading.Thread(target=super().find, args=(name, target)).start()
            return self.answer

    made = make(Thread(known=True))
    made.begin(graph)
    assert made.is_done(), "no tick runs uncompiled meanwhile"
    made.end()
    assert made.graphs["fetched"] == 1


def test_a_storage_that_does_not_answer_holds_nobody_up(
    make, graph: Graph, compiler: Compiler, monkeypatch
):
    monkeypatch.setattr(packages, "_FIRST_FETCH_SECONDS", 0.0)
    made = make(Exchange(known=None))
    made.begin(graph)
    assert not made.is_done()
    made.close()
    assert compiler.began == []


def test_a_damaged_file_is_removed_and_its_graph_runs_uncompiled(
    make, graph: Graph, compiler: Compiler, tmp_path
):
    made = make(None)
    made.begin(graph)
    compiler.may_end = True
    made.end()
    (path,) = tmp_path.iterdir()
    path.write_text("cut")
    again = Graph("a product", "product", multiply, graph._arguments, None)
    made.begin(again)
    with pytest.raises(CompileError, match="damaged"):
        made.end()
    assert not path.exists()
    assert not again.is_compiled


def test_a_graph_that_is_wanted_no_more_ends_its_compiler(
    make, graph: Graph, compiler: Compiler
):
    made = make(None)
    made.begin(graph)
    made.cancel()
    assert compiler.closed == 1
    made.end()
    assert not graph.is_compiled


@pytest.fixture
def compilers(compiler: Compiler, monkeypatch) -> list[Compiler]:
    """Those of a machine that has room for two."""
    made: list[Compiler] = []

    def make_one() -> Compiler:
        made.append(Compiler())
        return made[-1]

    monkeypatch.setattr(packages, "Compiler", make_one)
    monkeypatch.setattr(Packages, "_most_compilers", 2)
    return made


def other_graph(size: int) -> Graph:
    tensors = torch.zeros(size, size), torch.ones(size, size), torch.ones(size, size)
    return Graph("another product", "product", multiply, tensors, None)


def test_the_next_graph_is_compiled_meanwhile(
    compilers: list[Compiler], make, graph: Graph
):
    exchange = Exchange(known=False)
    made = make(exchange)
    assert not made.may_compile_more, "nothing is compiled: others may have both"
    made.begin(graph)
    made.is_done()
    assert made.may_compile_more
    made.leave()
    following = other_graph(3)
    made.begin(following)
    assert not made.is_done()
    assert not made.may_compile_more, "both are at work"
    compilers[1].may_end = True
    made.end()
    made.begin(graph)
    assert not made.is_done()
    compilers[0].may_end = True
    assert made.is_done()
    made.end()
    assert [len(each.began) for each in compilers] == [1, 1]
    assert made.graphs["compiled"] == 2
    assert exchange.shared == [each.began[0] for each in reversed(compilers)]


def test_a_graph_that_was_left_is_there_once_it_is_compiled(
    compilers: list[Compiler], make, graph: Graph
):
    made = make(None)
    made.begin(graph)
    made.leave()
    compilers[0].may_end = True
    made.begin(graph)
    assert made.is_done()
    made.end()
    assert graph.is_compiled
    assert len(compilers[0].began) == 1


def test_a_graph_that_was_left_and_failed_is_compiled_when_it_is_wanted(
    compilers: list[Compiler], make, graph: Graph, monkeypatch
):
    made = make(None)
    made.begin(graph)
    made.leave()

    def fail() -> None:
        raise CompileError("no kernel for this")

    with monkeypatch.context() as failing:
        failing.setattr(compilers[0], "end", fail)
        compilers[0].may_end = True
        made.begin(other_graph(3))
    compilers[0].may_end = False
    made.cancel()
    made.begin(graph)
    assert not made.is_done()
    assert len(compilers[0].began) == 3
