"""Has lanes' ticks and VAE calls compiled beside the ticks; whoever wants it before them waits."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from imagefleet.telemetry.logs import log
from worker.engine import errors as engine_errors
from worker.engine.kernels.compiler import CompileError
from worker.engine.kernels.graph import Graph
from worker.engine.slots.compile_policy import GraphKey
from worker.engine.slots.lane import Lane, Lanes
from worker.engine.slots.memory import WeightMode
from worker.engine.slots.parts import Parts
from worker.engine.slots.queue import BatchKey
from worker.engine.slots.step import Step, StepRunner

#: The first jobs say whether the first graph has to change convolutions: it waits until the engine
#: is full of them, but not for longer.
_MOST_SECONDS_WITHOUT_JOBS = 10.0

#: Between two looks at whether a graph is compiled, for who waits for it.
_LOOK_SECONDS = 1.0


class Task(NamedTuple):
    """What is compiled for a key: its tick, or the VAE of its size."""

    batch_key: BatchKey
    is_vae: bool = False


@dataclass(eq=False)
class Compilation:
    """Compiles one task at a time; for the engine's thread, between two ticks.

    The images in a lane's slots stay as they are.
    """

    _parts: Parts
    _runner: StepRunner
    _lanes: Lanes
    #: Gives a key's lane, with its tensors.
    _open_lane: Callable[[BatchKey], tuple[Lane, Step]]
    #: Closes all lanes, with fewer slots afterwards.
    _use_less_memory: Callable[[], None]
    #: True while something is compiled beside the ticks, or about to be.
    is_under_way: bool = False
    _begins_at: float | None = None
    _asked: BatchKey | None = None
    _task: Task | None = None
    _lane: Lane | None = None
    _step: Step | None = None
    _pending: Graph | None = None

    def __post_init__(self) -> None:
        self._unet = self._parts.unet
        self._decoder = self._parts.decoder
        self._packages = self._parts.settings.packages
        self._graphs: Iterator[Graph] = iter(())
        #: The packages that are compiled while others are wanted, by what they are of.
        self._aside: dict[Task, Path] = {}

    @property
    def is_due(self) -> bool:
        """True if `advance` has something to do."""
        if self._begins_at is not None:
            has_drawn = self._lanes.active and not self._lanes.free
            return bool(has_drawn) or time.monotonic() >= self._begins_at
        if self._pending is not None:
            return self._is_done
        return self.is_under_way or self._next() is not None

    def run(self, batch_key: BatchKey) -> None:
        """Compiles for a key, and all that has been drawn with it so far, before it returns."""
        self._asked = batch_key
        self._runner.request(batch_key, in_all_modes=True)
        self.finish()
        self._asked = None

    def begin(self) -> None:
        """Has what most jobs need compiled beside the ticks, or the native size without jobs."""
        if self._runner.may_compile:
            self._begins_at = time.monotonic() + _MOST_SECONDS_WITHOUT_JOBS
            self.is_under_way = True

    def advance(self) -> None:
        """Takes up what was compiled, begins the next; raises NodeError if the GPU is broken."""
        paused_for = self._runner.paused_for
        if paused_for is not None and not any(
            lane.held for lane in self._lanes if lane.batch_key == paused_for
        ):
            self._runner.resume()  # the last image that needed the memory is done
        if self._packages is not None and self._step and not self._is_current:
            self._packages.cancel()  # the pending graph is wanted no more
        self._try_to_set_aside()
        if not self.is_due:
            return
        self._begin_now()
        task = self._task or self._next()
        lacks_memory = False
        try:
            self._go_on(task)
            while self._pending is not None and self._is_done:  # it was there
                self._go_on(task)
        except Exception as error:  # noqa: BLE001 - images are drawn without
            failure = engine_errors.classify(error)
            lacks_memory = engine_errors.is_out_of_memory(error)
            if not lacks_memory:
                self._runner.give_up()
                log.warning(
                    f"compilation is off from now on: {failure.message}",
                    exc_info=True,
                    action="compile_failed",
                )
        if lacks_memory and task is not None:
            self._save_memory(task.batch_key)
        self.is_under_way = self._pending is not None or self._next() is not None

    def finish(self) -> None:
        """Waits until all that is frequent or asked for by now is compiled."""
        self._begin_now()
        while self._pending is not None or self.is_due:
            if self._pending is not None and self._packages is not None:
                self._packages.is_done(_LOOK_SECONDS)
            self.advance()

    def stop(self) -> None:
        """Compiles nothing any more, what is being compiled included."""
        self._begins_at = None
        self.is_under_way = False
        self._end()
        if self._packages is not None:
            self._packages.close()

    def _begin_now(self) -> None:
        if self._begins_at is not None:
            self._begins_at = None
            usual = [lane for lane in self._lanes.busy if not lane.batch_key.is_rare]
            if usual:
                most = max(usual, key=lambda lane: lane.held)
                self._runner.native = most.batch_key
            self._runner.request(self._runner.native)

    @property
    def _is_done(self) -> bool:
        return self._packages is None or self._packages.is_done()

    @property
    def _is_current(self) -> bool:
        """False if the lane was closed, or nothing is to be compiled any more."""
        return (
            self._lane is not None
            and self._lane.step is self._step
            and self._runner.may_compile
        )

    def _next(self) -> Task | None:
        """What is compiled next, once the compiler is free."""
        wanted = self._wanted()
        others = [task for task in wanted if task not in self._aside]
        return next(iter([*self._ready(wanted), *others, *wanted]), None)

    def _ready(self, wanted: Sequence[Task]) -> list[Task]:
        """Those that were set aside, and are compiled by now."""
        packages = self._packages
        if packages is None:
            return []
        aside = self._aside
        return [
            each for each in wanted if each in aside and packages.is_there(aside[each])
        ]

    def _wanted(self) -> list[Task]:
        """Ticks that run uncompiled, then these sizes' VAEs, and then ticks in other modes."""
        if not self._runner.may_compile:
            return []
        asked = [self._asked] if self._asked else []
        held = [
            lane.batch_key._replace(is_apart=False) for lane in self._lanes if lane.held
        ]
        held.sort(
            key=lambda key: self._runner.outlook.share(GraphKey(key)), reverse=True
        )
        keys = [*asked, self._runner.native, *held]
        wanted = [Task(key) for key in keys if self._runner.should_compile(key)]
        # A tick is most of an image's time, and the VAE a tenth.
        urgent = [
            task for task in wanted if not self._runner.compiled_step(task.batch_key)
        ]
        # It takes a fraction of a tick's time to compile: where there is a compiler for both, it is
        # taken up while that is compiled, and costs the least then.
        opened = {lane.batch_key: lane.step for lane in self._lanes}
        vaes = [
            Task(key, is_vae=True)
            for key in keys
            if self._lacks_vae(
                self._runner.compiled_step(key)
                or (opened.get(key) if Task(key) in urgent else None)
            )
        ]
        return [*urgent, *vaes, *wanted]

    def _try_to_set_aside(self) -> None:
        """Lets another task get its graph while this one's is compiled: it may be there, or is."""
        packages = self._packages
        task = self._task
        if packages is None or task is None or self._pending is None:
            return
        if not packages.compiles or packages.is_done():
            return
        wanted = self._wanted()
        tried = {*self._aside, task}
        may_try = packages.may_compile_more and not tried.issuperset(wanted)
        if may_try or self._ready(wanted):
            self._aside[task] = packages.leave()
            self._end()

    def _lacks_vae(self, step: Step | None) -> bool:
        return step is not None and bool(self._decoder.uncompiled(_latents(step)))

    def _go_on(self, task: Task | None) -> None:
        packages = self._packages
        if packages is None:
            return
        graph = None
        try:
            if self._pending is not None:
                self._pending = None
                if task is not None:
                    self._aside.pop(task, None)
                try:
                    packages.end()
                except CompileError as error:
                    log.warning(
                        f"uncompiled from now on: {error}", action="compile_failed"
                    )
            if self._task is None and task is not None:
                self._task = task
                self._lane, self._step = self._open_lane(task.batch_key)
                self._step.is_compiling = True
                self._graphs = self._compile(self._lane, self._step, task)
            graph = next(self._graphs, None) if self._is_current else None
        finally:
            if graph is None:
                self._end()
        if graph is not None:
            packages.begin(graph)
            self._pending = graph

    def _end(self) -> None:
        if self._step is not None:
            self._step.is_compiling = False
        self._task = self._lane = self._step = self._pending = None
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

    def _compile(self, lane: Lane, step: Step, task: Task) -> Iterator[Graph]:
        """Yields a task's graphs, before their first run, to be given their kernels."""
        began_at = time.monotonic()
        is_first_wait = task not in self._aside
        missing = self._runner.missing_modes(step)
        if task.is_vae:
            yield from self._decoder.compile(_latents(step))
        elif missing:
            yield from self._compile_tick(lane, step, missing[0])
        if is_first_wait:  # what compiling has taken tells what more of it will
            seconds = time.monotonic() - began_at
            self._runner.costs = replace(self._runner.costs, graph_seconds=seconds)
        if self._lacks_vae(step) or self._runner.missing_modes(step):
            return
        log.info(
            f"{lane.slots} slots of {lane.batch_key.width}x{lane.batch_key.height} are compiled",
            action="warm",
        )

    def _compile_tick(
        self, lane: Lane, step: Step, mode: WeightMode
    ) -> Iterator[Graph]:
        changes = self._unet.changes
        version = changes.version
        has_changes = mode == "per_slot_convolutions"
        graph = self._runner.make_graph(step, mode)
        self._unet.use_block(lane.block, lane.slots)
        with contextlib.nullcontext() if has_changes else changes.left_out():
            graph.describe()
        yield graph
        if has_changes and version != changes.version:
            return  # its tensors were replaced
        self._unet.use_block(lane.block, lane.slots)
        if graph.is_compiled:
            self._runner.take_up(step, mode, graph)
        else:
            self._runner.refuse(step, mode)


def _latents(step: Step) -> torch.Size:
    """The shape of an image's latents."""
    return step.state.latents.shape[1:]
