"""Packages of graphs: kept in a folder, fetched, or compiled by a process beside this one."""

from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from imagefleet.files.kernels import ORIGINS
from imagefleet.files.kinds import KERNELS
from imagefleet.telemetry import logs
from worker.engine import phases
from worker.engine.kernels import package
from worker.engine.kernels.compiler import CompileError, Compiler
from worker.engine.kernels.graph import Graph
from worker.engine.kernels.package import Package, UnusablePackageError

log = logs.EventLog(__name__)

#: For a process' first package, which takes less to fetch: a first tick without it takes two.
_FIRST_FETCH_SECONDS = 2.0


class Exchange(Protocol):
    """Packages of other machines; both methods return at once."""

    def find(self, name: str, target: Path) -> Future[bool]:
        """Fetches a package; the answer is whether it is there."""

    def share(self, path: Path) -> None:
        """Gives others a package that was compiled here."""


@dataclass(slots=True)
class _Wanted:
    graph: Graph
    content: bytes
    path: Path
    found: Future[bool] | None = None
    """The exchange's answer; None once it is known."""
    is_compiling: bool = False
    origin: str = "disk"


class Packages:
    """Gives one graph at a time its compiled kernels; for the engine's thread.

    No thread of this process is involved: what looks for a package elsewhere is the exchange's, and
    what compiles one is a child. Loading one takes a second or two, in which nothing is drawn.
    """

    def __init__(
        self, folder: Path, device: torch.device, exchange: Exchange | None = None
    ) -> None:
        self.graphs = dict.fromkeys(ORIGINS, 0)
        """Graphs that got kernels, by where these are from."""
        self._folder = folder
        self._device = device
        self._exchange = exchange
        self._compiler = Compiler()
        self._wanted: _Wanted | None = None

    def prepare(self) -> None:
        """Starts a fresh machine's compiler, while the weights are read; returns at once."""
        if not any(self._folder.glob(f"*{KERNELS.suffixes[0]}")):
            self._compiler.start()

    def begin(self, graph: Graph) -> None:
        """Begins to get a graph its kernels, in place of the one before."""
        self.cancel()
        description = graph.describe()
        path = self._folder / package.name_of(graph.label, description, self._device)
        wanted = _Wanted(graph, description.content, path)
        self._wanted = wanted
        if path.exists():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._exchange is None:
            self._compile(wanted)
        else:
            wanted.found = self._exchange.find(path.name, path)
            if not any(self.graphs.values()):
                futures.wait([wanted.found], timeout=_FIRST_FETCH_SECONDS)

    def is_done(self, seconds: float = 0.0) -> bool:
        """True if `end` does not wait for others; waits for so many *seconds*."""
        wanted = self._wanted
        if wanted is None:
            return True
        if wanted.found is not None:
            if not futures.wait([wanted.found], timeout=seconds).done:
                return False
            is_here = wanted.found.result()
            wanted.found = None
            wanted.origin = "fetched"
            if not is_here:
                self._compile(wanted)
                return False
        return not wanted.is_compiling or self._compiler.is_done(seconds)

    def end(self) -> None:
        """Loads the kernels and gives them to the graph; raises CompileError."""
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            return
        if wanted.is_compiling:
            self._compiler.end()
            if self._exchange is not None:
                self._exchange.share(wanted.path)
        else:
            self._compiler.close()  # others are likely to have the next ones, too
        try:
            with phases.timed("kernels"):
                loaded = Package.load(wanted.path)
        except UnusablePackageError as error:
            wanted.path.unlink(missing_ok=True)  # another may be compiled in its place
            raise CompileError(str(error)) from error
        wanted.graph.use(loaded)
        self.graphs[wanted.origin] += 1

    def cancel(self) -> None:
        """Wants nothing any more; a graph that is being compiled is left."""
        if self._wanted is not None and self._wanted.is_compiling:
            self._compiler.close()
        self._wanted = None

    def close(self) -> None:
        self._wanted = None
        self._compiler.close()

    def _compile(self, wanted: _Wanted) -> None:
        log.info(f"compiling {wanted.graph.name}", action="compiling")
        self._compiler.begin(wanted.content, wanted.path)
        wanted.is_compiling = True
        wanted.origin = "compiled"
