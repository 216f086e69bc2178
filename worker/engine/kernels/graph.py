"""A function on fixed tensors, recorded as a CUDA graph, with compiled kernels once they are there.

Both are optional speed-ups: if either fails, that is logged and the function runs without it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from imagefleet.telemetry import logs
from worker.engine import errors as engine_errors
from worker.engine import phases
from worker.engine.kernels.description import Description
from worker.engine.kernels.package import Package

log = logs.EventLog(__name__)

#: Runs before recording: libraries select kernels and allocate memory in the first ones.
_WARM_UP_RUNS = 3

#: Two runs have room if the driver has taken both in this share of the time that they take: 1 %
#: with a tick of SD1.5 or SD2 on an H200, 29 to 65 % with one of SDXL.
_LAUNCHING_SHARE = 0.2


class GraphPool:
    """The memory of CUDA graphs that never run at the same time: as much as the largest takes.

    They are recorded on one stream, since the allocator gives a stream's memory to no other.
    """

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Graph:
    """Calls *function* with the same tensors each time, which it updates in place.

    The first call prepares what the others take: it chooses kernels and records them.
    """

    def __init__(
        self,
        name: str,
        label: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        pool: GraphPool | None,
    ) -> None:
        """*label*: how the name of its package's file begins.

        With a *pool*, a CUDA graph is recorded in its memory.
        An output is then valid only until the next graph of the pool runs.
        """
        self.has_room_for_next = True
        """False: the driver blocks if it is called again before the GPU has done most of it."""
        self.name = name
        self.label = label
        self.is_compiled = False
        self.seconds: float | None = None
        """Of one run on a GPU; None until it was timed."""
        self._description: Description | None = None
        self._function = function
        self._arguments = arguments
        self._pool = pool
        self._recorded: torch.cuda.CUDAGraph | None = None
        self._output: Any = None
        self._is_prepared = False

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
        self._function = _released
        self._arguments = ()

    @torch.no_grad()
    def __call__(self) -> Any:
        if not self._is_prepared:
            self._prepare()
        if self._recorded is not None:
            self._recorded.replay()
            return self._output
        return self._function(*self._arguments)

    def time(self) -> None:
        """Times it on a GPU, and whether the driver takes two runs while the GPU is at the first.

        It runs four times, which changes its tensors.
        """
        stream = torch.cuda.current_stream()
        self()
        stream.synchronize()
        began_at = time.perf_counter()
        self()
        stream.synchronize()
        self.seconds = time.perf_counter() - began_at
        began_at = time.perf_counter()
        self()
        self()
        launching_seconds = time.perf_counter() - began_at
        stream.synchronize()
        share = launching_seconds / (time.perf_counter() - began_at)
        self.has_room_for_next = share < _LAUNCHING_SHARE
        log.info(
            f"{self.name} takes {1000 * self.seconds:.1f} ms; the driver takes two runs in"
            f" {100 * share:.0f} % of the time that they take on the GPU",
            action="graph_timed",
        )

    def _prepare(self) -> None:
        """Chooses kernels and records; restores the tensors that its runs changed."""
        self._is_prepared = True
        if self._pool is None:
            return
        values = [
            each if isinstance(each, tuple) else (each,) for each in self._arguments
        ]
        tensors = [each for some in values for each in some if isinstance(each, Tensor)]
        kept = [(tensor, tensor.clone()) for tensor in tensors]
        with phases.timed("autotune"):
            self._run_often(self._pool)
        with phases.timed("capture"):
            self._try_to_record(self._pool)
        for tensor, copy in kept:
            tensor.copy_(copy)

    def _run_often(self, pool: GraphPool) -> None:
        pool.stream.wait_stream(torch.cuda.current_stream())
        # Of the recording's own: kernels' work space belongs to a stream.
        with torch.cuda.stream(pool.stream):
            for _ in range(_WARM_UP_RUNS):
                self._function(*self._arguments)
        torch.cuda.current_stream().wait_stream(pool.stream)

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
            brief = f"{type(error).__name__}: {str(error).strip()[:300]}"
            log.warning(
                f"{self.name} runs without a CUDA graph: {brief}",
                exc_info=error,
                action="capture_failed",
            )
            return
        torch.cuda.synchronize()
        self._recorded = recorded
        self._output = output


def _released(*_arguments: Any) -> Any:
    raise RuntimeError("the graph was released")
