"""Packages of graphs: kept in a folder, fetched, or compiled by a process beside this one."""

import functools
import os
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from imagefleet.files.kernels import ORIGINS
from imagefleet.files.kinds import KERNELS
from imagefleet.telemetry import host
from imagefleet.telemetry.logs import log
from worker.engine import phases
from worker.engine.kernels import package
from worker.engine.kernels.compiler import CompileError, Compiler
from worker.engine.kernels.graph import Graph
from worker.engine.kernels.package import Package, UnusablePackageError

#: For a process' first package, which takes less to fetch: a first tick without it takes two.
_FIRST_FETCH_SECONDS = 2.0


#: Processors and free memory of the host for each compiler, if there are several, and of the GPU
#: for one more. It takes one processor for most of the time, 3 GB (for SDXL 13), and 4 GB of the
#: GPU's at its end.
_COMPILER_PROCESSORS = 4
_COMPILER_BYTES = 14 * 2**30
_GPU_BYTES = 8 * 2**30

#: Three sizes' ticks and a VAE; more would wait for the same processors.
_MOST_COMPILERS = 4


class Exchange(Protocol):
    """Packages of other machines; both methods return at once."""

    def find(self, name: str, target: Path) -> Future[bool]:
        """Fetches a package; the answer is whether it is there."""

    def share(self, path: Path) -> None:
        """Gives others a package that was compiled here."""


@dataclass
class _Wanted:
    graph: Graph
    content: bytes
    path: Path
    #: The exchange's answer; None once it is known.
    found: Future[bool] | None = None
    #: What compiles it.
    compiler: Compiler | None = None
    origin: str = "disk"


@dataclass(eq=False)
class Packages:
    """Gives one graph at a time its compiled kernels; for the engine's thread.

    No thread of this process is involved: what looks for a package elsewhere is the exchange's, and
    what compiles one is a child; the next ones are compiled by others, where the machine has room.
    Loading one takes a second or two, in which nothing is drawn.
    """

    _folder: Path
    _device: torch.device
    _exchange: Exchange | None

    def __post_init__(self) -> None:
        #: Graphs that got kernels, by where these are from.
        self.graphs = dict.fromkeys(ORIGINS, 0)
        self._compilers = [Compiler()]
        #: What is compiled, the graph that is wanted included.
        self._orders: dict[Path, Compiler] = {}
        #: What was compiled while others were wanted.
        self._left: set[Path] = set()
        self._wanted: _Wanted | None = None

    def prepare(self) -> None:
        """Starts a fresh machine's compiler, while the weights are read; returns at once."""
        if not any(self._folder.glob(f"*{KERNELS.suffixes[0]}")):
            self._compilers[0].start()

    def begin(self, graph: Graph) -> None:
        """Begins to get a graph its kernels, in place of the one before."""
        self.cancel()
        wanted = self._describe(graph)
        self._wanted = wanted
        self._collect()
        if wanted.path in self._orders:
            self._compile(wanted)
            return
        if wanted.path.exists():
            if wanted.path in self._left:
                wanted.origin = "compiled"
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._exchange is None:
            self._compile(wanted)
        else:
            wanted.found = self._exchange.find(wanted.path.name, wanted.path)
            if not any(self.graphs.values()):
                futures.wait([wanted.found], timeout=_FIRST_FETCH_SECONDS)

    @property
    def compiles(self) -> bool:
        """True while the graph that is wanted is compiled."""
        return self._wanted is not None and self._wanted.compiler is not None

    @property
    def may_compile_more(self) -> bool:
        """True while the graph that is wanted is compiled, and another could be at once."""
        if not self.compiles:
            return False
        self._collect()
        if len(self._orders) >= self._most_compilers:
            return False
        if self._device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self._device)
        return free > _GPU_BYTES

    def leave(self) -> Path:
        """Wants nothing any more; the graph that is compiled is finished for when it is wanted.

        Returns the path of its package, for `is_there`.
        """
        if self._wanted is None:
            raise ValueError("no graph is wanted")
        path = self._wanted.path
        self._wanted = None
        return path

    def is_there(self, path: Path) -> bool:
        """True once a package that was left is compiled, or cannot be."""
        self._collect()
        return path not in self._orders

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
        return wanted.compiler is None or wanted.compiler.is_done(seconds)

    def end(self) -> None:
        """Loads the kernels and gives them to the graph; raises CompileError."""
        wanted = self._wanted
        self._wanted = None
        if wanted is None:
            return
        if wanted.compiler is not None:
            self._orders.pop(wanted.path, None)
            wanted.compiler.end()
            self._share(wanted.path)
        elif not self._orders:
            self._close_compilers()  # others are likely to have the next ones, too
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
        if self._wanted is not None and self._wanted.compiler is not None:
            self._wanted.compiler.close()
            self._orders.pop(self._wanted.path, None)
        self._wanted = None

    def close(self) -> None:
        self._wanted = None
        self._close_compilers()

    def _describe(self, graph: Graph) -> _Wanted:
        description = graph.describe()
        name = package.name_of(graph.label, description, self._device)
        return _Wanted(graph, description.content, self._folder / name)

    def _compile(self, wanted: _Wanted) -> None:
        if wanted.path not in self._orders:
            self._order(wanted)
        wanted.compiler = self._orders[wanted.path]
        wanted.origin = "compiled"

    def _order(self, wanted: _Wanted) -> None:
        log.info(f"compiling {wanted.graph.name}", action="compiling")
        at_work = self._orders.values()
        free = [each for each in self._compilers if each not in at_work]
        if not free:
            free = [Compiler()]
            self._compilers += free
        free[0].begin(wanted.content, wanted.path)
        self._orders[wanted.path] = free[0]

    def _collect(self) -> None:
        """Takes note of the graphs that were left and have been compiled, or cannot be."""
        current = self._wanted and self._wanted.compiler
        for path, compiler in list(self._orders.items()):
            if compiler is current or not compiler.is_done():
                continue
            del self._orders[path]
            try:
                compiler.end()
            except CompileError as error:
                log.warning(f"{path.name}: {error}", action="compile_failed")
            else:
                self._left.add(path)
                self._share(path)

    def _share(self, path: Path) -> None:
        if self._exchange is not None:
            self._exchange.share(path)

    def _close_compilers(self) -> None:
        self._orders.clear()
        for compiler in self._compilers:
            compiler.close()

    @functools.cached_property
    def _most_compilers(self) -> int:
        """Compilers for which the machine has processors and memory: one at least."""
        processors = len(os.sched_getaffinity(0))
        memory = host.free_memory_bytes()
        fitting = min(processors // _COMPILER_PROCESSORS, memory // _COMPILER_BYTES)
        return max(1, min(_MOST_COMPILERS, fitting))
