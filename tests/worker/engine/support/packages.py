"""Stand-ins for the compiler's process, which takes seconds to start and minutes for a tick."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from imagefleet.files.kernels import ORIGINS
from worker.engine.kernels import package
from worker.engine.kernels.compiler import CompileError
from worker.engine.kernels.graph import Graph


class PlainPackages:
    """A graph's kernels are the function as it is, once the compiler is let go."""

    def __init__(self, may_end: float = 0) -> None:
        #: Graphs that it may still compile.
        self.may_end = may_end
        self.began: list[str] = []
        self.graphs = dict.fromkeys(ORIGINS, 0)
        self.breaks = False
        self.may_compile_more = False
        #: What is in the names of graphs that are compiled already.
        self.there: tuple[str, ...] = ()
        self._graph: Graph | None = None

    def begin(self, graph: Graph) -> None:
        self.began.append(graph.name)
        self._graph = graph

    @property
    def compiles(self) -> bool:
        return self._graph is not None

    def leave(self) -> Path:
        path = Path(self._graph.name)
        self._graph = None
        return path

    def is_there(self, path: Path) -> bool:
        return self.may_end > 0 or any(each in path.name for each in self.there)

    def is_done(self, _seconds: float = 0.0) -> bool:
        return self.is_there(Path(self._graph.name if self._graph else ""))

    def end(self) -> None:
        graph = self._graph
        self._graph = None
        if graph is None:
            return
        self.may_end -= 1
        if self.breaks:
            raise CompileError("no kernel for this")
        graph.use(self._package(graph))
        self.graphs["compiled"] += 1

    def cancel(self) -> None:
        self._graph = None

    def close(self) -> None:
        self._graph = None

    def _package(self, graph: Graph) -> Any:
        return _Bound(functools.partial(graph._function, *graph._arguments))


class TracedPackages(PlainPackages):
    """Graphs are described, traced on fakes and bound as in earnest; torch runs what was traced."""

    def __init__(self) -> None:
        super().__init__(may_end=float("inf"))

    def _package(self, graph: Graph) -> Any:
        found = []
        package.trace(
            graph.describe().content,
            lambda traced, _inputs, places: found.append(
                package.Package(traced, places)
            ),
        )
        (only,) = found
        return only


class _Bound:
    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def bind(self, _tensors: Sequence[torch.Tensor]) -> Callable[[], Any]:
        return self._call


# Calls for the compiler's process, which has to import them.


def multiply(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    out.copy_(torch.mm(a, b))  # a library's call: it needs no C++ compiler


def ask_the_tensor(x: torch.Tensor) -> None:
    assert str(x.sum().item())
