"""A function on fixed tensors: compiled, then recorded as one CUDA graph; plain where that fails.

Both only make it faster. Whatever goes wrong with either is logged, and the next simpler way taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch

from worker.engine import errors as engine_errors

log = logging.getLogger(__name__)

#: Torch's handle of the memory that CUDA graphs share; its type is not public.
GraphPool = Any

#: Runs before a graph is recorded: libraries choose their kernels and allocate in the first ones.
_WARM_UP_RUNS = 3

#: 1x1 convolutions are matrix products, which Inductor can fuse with what follows.
_INDUCTOR_OPTIONS = {"conv_1x1_as_mm": True}


class Compiled:
    """Calls *function* with the same tensors each time; they are its input and its output."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        backend: str | None,
        pool: GraphPool | None,
    ) -> None:
        """*backend* is one of torch.compile's, None for as it is.

        With *pool* a graph is recorded, whose memory it shares with the others there: none of them
        may run beside another, and a result counts until the next one runs only.
        """
        self.graphs = 0
        self._name = name
        self._plain = function
        self._arguments = arguments
        self._backend = backend
        self._pool = pool
        self._function = function
        # Warmed up and recorded on one stream: kernels' work space belongs to a stream.
        self._stream: torch.cuda.Stream | None = None
        if pool is not None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Any = None
        self._is_warm = False

    @property
    def is_compiled(self) -> bool:
        return self._backend is not None

    @property
    def recompiles(self) -> int:
        """Graphs that were compiled beyond the one that is meant to be."""
        return max(0, self.graphs - 1)

    @torch.no_grad()
    def __call__(self) -> Any:
        if not self._is_warm:
            self._warm_up()
        if self._graph is not None:
            self._graph.replay()
            return self._output
        return self._function(*self._arguments)

    def _warm_up(self) -> None:
        """Compiles and records; its runs are undone, so the first real one begins as if first."""
        self._is_warm = True
        if self._backend is None:
            return
        kept = [(each, each.clone()) for each in self._arguments if isinstance(each, torch.Tensor)]
        try:
            self._compile()
        except Exception as error:  # torch's compiler may raise whatever it likes
            if engine_errors.is_out_of_memory(error):
                raise
            self._raise_if_broken()
            log.warning(
                "%s runs uncompiled: %s",
                self._name,
                _brief(error),
                exc_info=True,
                extra={"action": "compile_failed"},
            )
            self._function, self._backend = self._plain, None
        if self._pool is not None:
            self._try_to_record(self._pool)
        for argument, copy in kept:
            argument.copy_(copy)

    def _compile(self) -> None:
        self._function = torch.compile(
            _with_own_code(self._plain),
            fullgraph=True,
            dynamic=False,
            backend=self._counting_backend,
        )
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                self._function(*self._arguments)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _raise_if_broken(self) -> None:
        """Tells a kernel that does not work from a GPU that does not: all later calls fail there.

        Not by the error's text, which is "CUDA error" even where a graph was not to be recorded.
        """
        if self._pool is not None:
            torch.cuda.synchronize()

    def _counting_backend(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        if self._backend == "inductor":
            from torch._inductor.compile_fx import compile_fx

            return compile_fx(graph, inputs, config_patches=_INDUCTOR_OPTIONS)
        # Imported here, as all of the compiler: it takes seconds, and a CPU does without.
        from torch._dynamo import lookup_backend

        return lookup_backend(self._backend or "eager")(graph, inputs)

    def _try_to_record(self, pool: GraphPool) -> None:
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what the runs above left is of no use to the graph
            graph = torch.cuda.CUDAGraph()
            # Other threads allocate page-locked memory meanwhile, which is no part of the graph.
            with torch.cuda.graph(
                graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                output = self._function(*self._arguments)
            torch.cuda.synchronize()
        except Exception as error:  # a library in there may not allow it
            if engine_errors.is_out_of_memory(error):
                raise
            self._raise_if_broken()
            log.warning(
                "%s runs without a CUDA graph: %s",
                self._name,
                _brief(error),
                exc_info=True,
                extra={"action": "capture_failed"},
            )
        else:
            self._graph, self._output = graph, output


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy that torch takes for another function.

    Torch keeps what it compiles with a function's code, and stops at the eighth: one for each
    shape here, of engine after engine.
    """
    if not isinstance(function, FunctionType):
        raise TypeError(f"{function} is no plain function")
    code = function.__code__.replace(co_name=f"{function.__name__}_copy")
    return FunctionType(code, function.__globals__)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"
