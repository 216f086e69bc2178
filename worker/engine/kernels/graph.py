"""A function on fixed tensors, recorded as a CUDA graph, with compiled kernels once they are there.

Both are optional speed-ups: if either fails, that is logged and the function runs without it.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from imagefleet.telemetry.logs import log
from worker.engine import errors as engine_errors
from worker.engine import phases
from worker.engine.kernels.description import Description
from worker.engine.kernels.package import Package

#: The driver has room for a run while the GPU is at another one if it takes it in this share of its
#: time: 1 % with a tick of SD1.5 or SD2 on an H200, 60 to 130 % with one of SDXL.
_LAUNCHING_SHARE = 0.2

#: Runs by which a graph's time is known; from then on, their moving average is.
_TIMED_RUNS = 3


class GraphPool:
    """The memory of CUDA graphs that never run at the same time: as much as the largest takes.

    They are recorded on one stream, since the allocator gives a stream's memory to no other.
    """

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Run(NamedTuple):
    """A run that the GPU may still be at."""

    began: torch.cuda.Event
    ended: torch.cuda.Event
    launching_seconds: float
    #: True if the GPU had other work when it was launched.
    is_behind_another: bool


@dataclass(eq=False)
class Graph:
    """Calls a function with the same tensors each time, which it updates in place.

    Its runs are timed as they come: none is made for that.
    """

    name: str
    #: How the name of its package's file begins.
    label: str
    _function: Callable[..., Any]
    _arguments: Sequence[Any]
    #: If given, a CUDA graph is recorded in its memory: an output is then valid only until the next
    #: graph of the pool runs.
    _pool: GraphPool | None
    #: False: the driver blocks if it is called again before the GPU has done most of it.
    has_room_for_next: bool = True
    is_compiled: bool = False
    #: Of one recorded run; None until some have ended.
    seconds: float | None = None
    _runs: deque[_Run] = field(default_factory=deque)
    _timed_runs: int = 0
    _launching: float = 0.0
    _description: Description | None = None
    _recorded: torch.cuda.CUDAGraph | None = None
    _output: Any = None
    _is_prepared: bool = False

    def describe(self) -> Description:
        """The same until it is compiled, however the function's networks change meanwhile."""
        if self._description is None:
            self._description = Description.of((self._function, self._arguments))
        return self._description

    def use(self, package: Package) -> None:
        """Runs compiled from now on, on the tensors of its description."""
        bound = package.bind(self.describe().tensors)
        self._function = lambda *_: bound()
        self._description = None  # its tensors' memory is not the graph's to keep
        self.is_compiled = True

    def release(self) -> None:
        """Frees the graph's memory at once; no call may follow."""
        self._recorded = self._output = None
        self._runs.clear()
        self._function = _released
        self._arguments = ()

    @torch.no_grad()
    def __call__(self) -> Any:
        self.prepare()
        if self._recorded is None:
            return self._function(*self._arguments)
        while self._runs and self._runs[0].ended.query():  # type: ignore[no-untyped-call]
            run = self._runs.popleft()
            seconds = run.began.elapsed_time(run.ended) / 1000
            launched = run.launching_seconds if run.is_behind_another else 0
            self.note_run(seconds, launched)
        stream = torch.cuda.current_stream()
        is_behind_another = not stream.query()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record(stream)
        began_at = time.perf_counter()
        self._recorded.replay()
        launching_seconds = time.perf_counter() - began_at
        ended.record(stream)
        self._runs.append(_Run(began, ended, launching_seconds, is_behind_another))
        return self._output

    @torch.no_grad()
    def prepare(self) -> None:
        """Chooses kernels and records, once; restores the tensors that its only run changes.

        The first call would. Libraries select kernels and allocate memory in that run.
        """
        if self._is_prepared:
            return
        self._is_prepared = True
        if self._pool is None:
            return
        values = [
            each if isinstance(each, tuple) else (each,) for each in self._arguments
        ]
        tensors = [each for some in values for each in some if isinstance(each, Tensor)]
        kept = [(tensor, tensor.clone()) for tensor in tensors]
        stream = self._pool.stream
        with phases.timed("autotune"):
            stream.wait_stream(torch.cuda.current_stream())
            # Of the recording's own: kernels' work space belongs to a stream.
            with torch.cuda.stream(stream):
                self._function(*self._arguments)
            torch.cuda.current_stream().wait_stream(stream)
        with phases.timed("capture"):
            self._try_to_record(self._pool)
        for tensor, copy in kept:
            tensor.copy_(copy)

    def note_run(self, seconds: float, launching_seconds: float) -> None:
        """Notes what a run took, and its launch, if the GPU had other work meanwhile."""
        self._timed_runs += 1
        if self._timed_runs == 1:
            return  # the driver also takes the graph to the GPU
        # On average: another thread may have held the interpreter's lock for one.
        self._launching += (launching_seconds - self._launching) / _TIMED_RUNS
        if self._launching > _LAUNCHING_SHARE * seconds:
            self.has_room_for_next = False
        if self.seconds is not None:
            self.seconds += (seconds - self.seconds) / _TIMED_RUNS
        elif self._timed_runs == _TIMED_RUNS:
            self.seconds = seconds
            room = "room" if self.has_room_for_next else "no room"
            log.info(
                f"{self.name} takes {1000 * seconds:.1f} ms, and the driver has {room} for the next"
                " one meanwhile",
                action="graph_timed",
            )

    def _try_to_record(self, pool: GraphPool) -> None:
        """Logs that it cannot be recorded; raises if the GPU is broken, or its memory full."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graph cannot use what the warm-up runs left
        recorded = torch.cuda.CUDAGraph()
        try:
            # Other threads may allocate page-locked memory meanwhile, outside the graph.
            with torch.cuda.graph(
                recorded,
                pool=pool.handle,
                stream=pool.stream,
                capture_error_mode="thread_local",
            ):
                output = self._function(*self._arguments)
        except Exception as error:
            if engine_errors.is_out_of_memory(error):
                self.release()
                raise
            # The error's text cannot tell whether the GPU is broken: it is "CUDA error" even if
            # only recording is not permitted.
            torch.cuda.synchronize()
            log.warning(
                f"{self.name} runs without a CUDA graph: {error!r:.300}",
                exc_info=error,
                action="capture_failed",
            )
            return
        torch.cuda.synchronize()
        self._recorded = recorded
        self._output = output


def _released(*_arguments: Any) -> Any:
    raise RuntimeError("the graph was released")
