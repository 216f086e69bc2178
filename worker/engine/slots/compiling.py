"""Compiles lanes' ticks and VAE calls beside the ticks; whoever wants it before them waits."""

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace

import torch

from imagefleet.telemetry import logs
from worker.engine import errors as engine_errors
from worker.engine import phases
from worker.engine.kernels.compile import Around, Compiled, trace_on_thread
from worker.engine.slots.compile_policy import GraphKey
from worker.engine.slots.lane import Lane, Lanes
from worker.engine.slots.memory import WeightMode
from worker.engine.slots.parts import Parts
from worker.engine.slots.queue import BatchKey
from worker.engine.slots.step import Step, StepRunner

log = logs.EventLog(__name__)

#: The first images after the start are drawn before compiling begins, which slows them down; if
#: there are no jobs, it does not wait for longer.
_HEAD_START_SECONDS = 10.0


class Compilation:
    """Compiles one lane at a time; for the engine's thread, between two ticks.

    The images in a lane's slots stay as they are.
    """

    def __init__(
        self,
        parts: Parts,
        runner: StepRunner,
        lanes: Lanes,
        *,
        open_lane: Callable[[BatchKey], tuple[Lane, Step]],
        use_less_memory: Callable[[], None],
    ) -> None:
        """*open_lane* gives a key's lane, with its tensors.

        *use_less_memory* closes all lanes, with fewer slots afterwards.
        """
        self.is_under_way = False
        """True while something is compiled beside the ticks, or about to be."""
        self._unet = parts.unet
        self._runner = runner
        self._decoder = parts.decoder
        self._lanes = lanes
        self._open_lane = open_lane
        self._use_less_memory = use_less_memory
        self._around: Around | None = None
        self._begins_at: float | None = None
        self._asked: BatchKey | None = None
        self._lane: Lane | None = None
        self._step: Step | None = None
        self._graphs: Iterator[Compiled] = iter(())
        self._tracing: tuple[Compiled, Future[None]] | None = None

    @property
    def is_due(self) -> bool:
        """True if `advance` has something to do."""
        if self._begins_at is not None:
            return time.monotonic() >= self._begins_at
        if self._tracing is not None:
            return self._tracing[1].done()
        return self.is_under_way or self._next() is not None

    def run(self, batch_key: BatchKey) -> None:
        """Compiles for a key, and all that has been drawn with it so far, before it returns."""
        self._asked = batch_key
        self._runner.request(batch_key, in_all_modes=True)
        self.finish()
        self._asked = None

    def begin_soon(self, around: Around | None = None) -> None:
        """Compiles for the native size after the first job's image, or soon if there is none.

        *around* is entered while something is compiled beside the ticks, from now on.
        """
        self._around = around
        if self._runner.may_compile:
            self._begins_at = time.monotonic() + _HEAD_START_SECONDS
            self.is_under_way = True

    def begin(self) -> None:
        """Starts now what `begin_soon` has put off."""
        if self._begins_at is not None:
            self._begins_at = None
            self._runner.request(self._runner.native)

    def advance(self) -> None:
        """Takes up what was compiled, begins the next; raises NodeError if the GPU is broken."""
        paused_for = self._runner.paused_for
        if paused_for is not None and not any(
            lane.held for lane in self._lanes if lane.batch_key == paused_for
        ):
            self._runner.resume()  # the last image that needed the memory is done
        if self._step is not None and not self._is_current:
            self._abandon()
        if not self.is_due:
            return
        self.begin()
        batch_key = self._step.batch_key if self._step else self._next()
        lacks_memory = False
        try:
            self._go_on(batch_key)
        except Exception as error:  # images can be drawn without
            failure = engine_errors.classify(error)
            lacks_memory = engine_errors.is_out_of_memory(error)
            if not lacks_memory:
                self._runner.give_up()
                log.warning(
                    f"compilation is off from now on: {failure.message}",
                    exc_info=True,
                    action="compile_failed",
                )
        if lacks_memory and batch_key is not None:
            self._save_memory(batch_key)
        self.is_under_way = self._tracing is not None or self._next() is not None

    def finish(self) -> None:
        """Waits until all that is frequent or asked for by now is compiled."""
        self.begin()
        while self._tracing is not None or self.is_due:
            if self._tracing is not None:
                futures.wait([self._tracing[1]])
            self.advance()

    def stop(self) -> None:
        """Stops scheduling compilations; one already running finishes on its own."""
        self._abandon()
        self._begins_at = None
        self.is_under_way = False
        self._tracing = None
        self._end()

    def _abandon(self) -> None:
        """Stops the compiling thread at its next checkpoint; its function is not used any more."""
        if self._tracing is not None:
            self._tracing[0].abandon()

    @property
    def _is_current(self) -> bool:
        """False if the lane was closed, or nothing is to be compiled any more."""
        return (
            self._lane is not None
            and self._lane.step is self._step
            and self._runner.may_compile
        )

    def _next(self) -> BatchKey | None:
        """Key that is compiled next, once the compiler is free."""
        if not self._runner.may_compile:
            return None
        asked = [self._asked] if self._asked else []
        held = [
            lane.batch_key._replace(is_apart=False) for lane in self._lanes if lane.held
        ]
        held.sort(
            key=lambda key: self._runner.outlook.share(GraphKey(key)), reverse=True
        )
        keys = [*asked, self._runner.native, *held]
        return next(filter(self._runner.should_compile, keys), None)

    def _go_on(self, batch_key: BatchKey | None) -> None:
        compiled = None
        try:
            if self._tracing is not None:
                (_, traced), self._tracing = self._tracing, None
                traced.result()
            if self._step is None and batch_key is not None:
                self._lane, self._step = self._open_lane(batch_key)
                self._step.is_compiling = True
                self._graphs = self._compile(self._lane, self._step)
            compiled = next(self._graphs, None) if self._is_current else None
        finally:
            if compiled is None:
                self._end()
        if compiled is not None:
            traced = trace_on_thread(compiled, self._unet.device, self._around)
            self._tracing = compiled, traced

    def _end(self) -> None:
        if self._step is not None:
            self._step.is_compiling = False
        self._lane = self._step = None
        self._graphs = iter(())

    def _save_memory(self, batch_key: BatchKey) -> None:
        """Gives the first size fewer slots after compiling ran out of memory; others run without.

        A size with fewer slots is to be compiled again.
        """
        log.warning(
            f"not enough memory to compile {batch_key.width}x{batch_key.height}",
            action="compile_failed",
        )
        torch.cuda.empty_cache()
        is_first = not any(each.step and each.step.compiled for each in self._lanes)
        if is_first and self._lanes.slots > 1:
            self._use_less_memory()
            self._runner.request(batch_key)
        else:
            self._runner.put_off(batch_key)

    def _compile(self, lane: Lane, step: Step) -> Iterator[Compiled]:
        """Yields each function before its first run, to be traced on any thread."""
        began_at = time.monotonic()
        graphs = 0
        self._unet.use_block(lane.block)
        with phases.timed("autotune"):
            self._runner.select_kernels(step)
        for mode in self._runner.missing_modes(step):
            tick = self._compile_tick(lane, step, mode)
            # The VAE before other modes: all images go through it.
            for compiled in itertools.chain(
                tick, self._decoder.compile(step.state.latents.shape[1:])
            ):
                graphs += 1
                yield compiled
        # What compiling has taken tells what more of it will.
        graph_seconds = (time.monotonic() - began_at) / max(1, graphs)
        self._runner.costs = replace(self._runner.costs, graph_seconds=graph_seconds)
        if self._unet.device.type == "cuda":
            # Torch and its compiler leave a million objects. To look through them took a second
            # every few seconds, in which no thread does anything.
            gc.collect()
            gc.freeze()
        times = []
        for mode in step.compiled:
            milliseconds = 1000 * self._runner.costs.seconds(mode)
            times.append(f"{milliseconds:.1f} ms ({mode})")
        log.info(
            f"{lane.slots} slots of {lane.batch_key.width}x{lane.batch_key.height} ready after"
            f" {time.monotonic() - began_at:.0f} s; a step of all slots takes"
            f" {', '.join(times)}",
            action="warm",
        )

    def _compile_tick(
        self, lane: Lane, step: Step, mode: WeightMode
    ) -> Iterator[Compiled]:
        for _ in range(2):
            compiled = self._runner.make_compiled(step, mode)
            version = self._unet.changes.version
            yield compiled
            if (
                mode == "per_slot_convolutions"
                and version != self._unet.changes.version
            ):
                return  # its tensors were replaced
            self._unet.use_block(lane.block)
            self._runner.take_up(step, mode, compiled)
            if compiled.is_compiled:
                return
            # The attention kernels are the likeliest part that the compiler cannot trace.
            for network in step.networks:
                network.use_default_attention()
