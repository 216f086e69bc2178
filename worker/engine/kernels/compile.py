"""A function on fixed tensors, compiled beside the ticks and recorded as a CUDA graph.

Both are optional speed-ups: if either fails, that is logged and the function runs without it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from imagefleet.telemetry import logs
from worker.engine import errors as engine_errors
from worker.engine import phases

log = logs.EventLog(__name__)

#: Runs before recording: libraries select kernels and allocate memory in the first ones.
_WARM_UP_RUNS = 3

#: Two runs have room if the driver has taken both in this share of the time that they take: 1 %
#: with a tick of SD1.5 or SD2 on an H200, 29 to 65 % with one of SDXL.
_LAUNCHING_SHARE = 0.2

#: Set while another thread compiles: torch takes calls of compiled functions for part of that.
compiling_elsewhere = threading.Event()

#: The tracing thread's name; see `worker.gpu_thread.THREAD_NAME`, which it begins with.
THREAD_NAME = "engine compiler"

Around = Callable[[str], AbstractContextManager[None]]
"""Given a graph's name; what it returns is entered while that graph is compiled, on its thread."""


class GraphPool:
    """The memory of CUDA graphs that never run at the same time: as much as the largest takes.

    They are recorded on one stream, since the allocator gives a stream's memory to no other.
    """

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _TracedError(Exception):
    """Raised in place of a traced function's first run."""


class _AbandonedError(Exception):
    """Raised in place of compiling what is no longer needed."""


#: Options of Inductor: as matrix products, 1x1 convolutions can be fused with what follows.
_INDUCTOR_OPTIONS = {"conv_1x1_as_mm": True}


class Compiled:
    """Calls *function* with the same tensors each time, which it updates in place."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        backend: str | None,
        pool: GraphPool | None,
    ) -> None:
        """*backend* is torch.compile's, None for no compilation.

        With a *pool*, a CUDA graph is recorded in its memory: an output is valid only until the
        next graph of the pool runs.
        """
        self.graphs = 0
        self.has_room_for_next = True
        """False: the driver blocks if it is called again before the GPU has done most of it."""
        self.name = name
        self._plain = function
        self._arguments = arguments
        self._backend = backend
        self._pool = pool
        self._function = function
        # For warm-up and recording: kernels' work space belongs to a stream.
        self._stream = None if pool is None else pool.stream
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Any = None
        self._is_tracing = False
        self._is_traced = False
        self._is_warm = False
        self._is_abandoned = False

    @property
    def is_compiled(self) -> bool:
        return self._backend is not None

    @property
    def recompiles(self) -> int:
        """Graphs compiled beyond the first."""
        return max(0, self.graphs - 1)

    def release(self) -> None:
        """Frees the graph's memory at once; no call may follow.

        What torch compiled refers back to this, and the collector may pass over both (`gc.freeze`).
        """
        self._graph = self._output = None
        self._function = self._plain
        self._arguments = ()

    def time_launch(self) -> None:
        """Finds out on a GPU whether the driver takes two runs while the GPU is at the first."""
        stream = torch.cuda.current_stream()
        stream.synchronize()
        began_at = time.perf_counter()
        self()
        self()
        launching_seconds = time.perf_counter() - began_at
        stream.synchronize()
        share = launching_seconds / (time.perf_counter() - began_at)
        self.has_room_for_next = share < _LAUNCHING_SHARE
        log.info(
            f"the driver takes two runs of {self.name} in {100 * share:.0f} % of the time that"
            " they take on the GPU",
            action="launch_timed",
        )

    def abandon(self) -> None:
        """Ends `trace` as soon as may be; from any thread."""
        self._is_abandoned = True

    @torch.no_grad()
    def trace(self) -> None:
        """Does the long part of compiling: nothing runs, so the tensors may be in use meanwhile.

        For any thread, before the first call. If it fails, the function runs uncompiled. Meanwhile
        no other thread may compile or record anything.
        """
        if self._is_traced or self._is_abandoned or self._backend is None:
            return
        self._is_traced = True
        self._function = torch.compile(
            _with_own_code(self._plain),
            fullgraph=True,
            dynamic=False,
            backend=self._compile_graph,
        )
        self._is_tracing = True
        try:
            traced = self._optional("uncompiled", "compile_failed")
            with phases.timed("trace"), traced, _unnoticed():
                self._function(*self._arguments)
        except _TracedError:
            pass
        finally:
            self._is_tracing = False

    @torch.no_grad()
    def __call__(self) -> Any:
        if not self._is_warm:
            self._warm_up()
        if self._graph is not None:
            self._graph.replay()
            return self._output
        function = self._plain if compiling_elsewhere.is_set() else self._function
        return function(*self._arguments)

    def _warm_up(self) -> None:
        """Compiles and records; restores the tensors that its runs changed."""
        self._is_warm = True
        if self._backend is None:
            return
        self.trace()
        values = [
            each if isinstance(each, tuple) else (each,) for each in self._arguments
        ]
        tensors = [each for some in values for each in some if isinstance(each, Tensor)]
        kept = [(tensor, tensor.clone()) for tensor in tensors]
        if self._backend is not None:
            with (
                phases.timed("autotune"),
                self._optional("uncompiled", "compile_failed"),
            ):
                self._run_often()  # which selects kernels
        if self._pool is not None:
            with (
                phases.timed("capture"),
                self._optional("without a CUDA graph", "capture_failed"),
            ):
                self._record(self._pool)
        for argument, copy in kept:
            argument.copy_(copy)

    def _run_often(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                self._function(*self._arguments)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    @contextlib.contextmanager
    def _optional(self, without: str, action: str) -> Iterator[None]:
        """Logs that a speed-up failed; raises if the GPU is broken, or its memory full."""
        try:
            yield
        except _TracedError:
            raise
        except Exception as error:  # torch's compiler may raise anything
            if self._is_abandoned:
                return
            if engine_errors.is_out_of_memory(error):
                self.release()
                raise
            if self._pool is not None:
                # The error's text cannot tell: it is "CUDA error" even if only recording is not
                # permitted.
                torch.cuda.synchronize()
            brief = f"{type(error).__name__}: {str(error).strip()[:300]}"
            log.warning(
                f"{self.name} runs {without}: {brief}", exc_info=error, action=action
            )
            if action == "compile_failed":
                self._function = self._plain
                self._backend = None

    def _compile_graph(self, graph: Any, inputs: Any) -> Any:
        """The backend of torch.compile."""
        if self._is_abandoned:
            raise _AbandonedError
        self.graphs += 1
        compiled: Any
        with phases.timed("compile"):
            if self._backend == "inductor":
                from torch._inductor.compile_fx import compile_fx

                compiled = compile_fx(graph, inputs, config_patches=_INDUCTOR_OPTIONS)
            else:
                # Imported here: the compiler takes seconds to import, and a CPU does not need it.
                from torch._dynamo import lookup_backend

                compiled = lookup_backend(self._backend or "eager")(graph, inputs)

        def run(*arguments: Any) -> Any:
            if self._is_tracing:
                raise _TracedError
            return compiled(*arguments)

        return run

    def _record(self, pool: GraphPool) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graph cannot use what the warm-up runs left
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate page-locked memory meanwhile, outside the graph.
        with torch.cuda.graph(
            graph,
            pool=pool.handle,
            stream=pool.stream,
            capture_error_mode="thread_local",
        ):
            output = self._function(*self._arguments)
        torch.cuda.synchronize()
        self._graph = graph
        self._output = output


def trace_on_thread(
    compiled: Compiled, device: torch.device, around: Around | None = None
) -> Future[None]:
    """Traces a function while the engine's thread runs the same layers uncompiled.

    That both touch torch is safe: one graph at a time is traced, and the engine's thread takes it
    up before the next begins. Tracing reads shapes and types of tensors, never their contents.
    Torch's modes and device belong to a thread, and what it sets for the whole process while it
    compiles is hidden from other threads (`_unnoticed`). The future fails if the GPU is broken, or
    its memory full; not if the function could not be compiled.
    """
    threads = torch.get_num_threads()  # a compiled function is bound to their number
    traced: Future[None] = Future()

    def run() -> None:
        try:
            with contextlib.ExitStack() as around_it:
                around_it.callback(compiling_elsewhere.clear)
                torch.set_num_threads(threads)
                if device.type == "cuda":
                    around_it.enter_context(torch.cuda.device(device))
                if around is not None:
                    around_it.enter_context(around(compiled.name))
                compiled.trace()
        except Exception as error:  # noqa: BLE001 - raised again by the future
            traced.set_exception(error)
        else:
            traced.set_result(None)

    compiling_elsewhere.set()
    # A daemon: a compiler cannot be interrupted, and must not keep a process from its end.
    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    return traced


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy with its own code object, by which torch.compile keeps its graphs, eight at most."""
    if not isinstance(function, FunctionType):
        raise TypeError(f"{function} is not a plain function")
    code = function.__code__.replace(co_name=f"{function.__name__}_copy")
    copy = FunctionType(code, function.__globals__, argdefs=function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@contextlib.contextmanager
def _unnoticed() -> Iterator[None]:
    """Compiles without a sign to other threads, whose layers run uncompiled meanwhile.

    Newer versions of torch have `torch.compiler.is_compiling` say yes to the whole process. And
    while its tracer runs, all calls of modules go through it; other threads' are none of its own.
    """
    tracer = torch.fx.Tracer
    thread = threading.get_ident()
    call_module = tracer.call_module

    def call(
        self: torch.fx.Tracer,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if threading.get_ident() != thread:
            return forward(*args, **kwargs)
        return call_module(self, module, forward, args, kwargs)

    name = "_compile_session_context"
    marks = getattr(torch.compiler, name, None)
    tracer.call_module = call  # type: ignore[assignment, method-assign]
    if marks is not None:
        setattr(torch.compiler, name, contextlib.nullcontext)
    try:
        yield
    finally:
        tracer.call_module = call_module  # type: ignore[method-assign]
        if marks is not None:
            setattr(torch.compiler, name, marks)
