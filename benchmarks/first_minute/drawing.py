"""The rows of an engine in its own process: what it draws from the process' start on, how fast."""

import itertools
import math
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from evaluation.bench import jobs as bench_jobs
from evaluation.bench import machine, work
from families import measure as families
from first_minute import bag, trace
from first_minute.engine_rows import EngineRow
from rows.groups import Figures
from rows.process import limit_memory
from worker.engine import contract, load, phases
from worker.engine import device as devices
from worker.engine.slots.engine import SlotEngine
from worker.engine.slots.step import Step

#: Called with figures as soon as they are measured.
Emit = Callable[..., None]

#: A graph that pays only later is compiled after a pause that is shorter.
SETTLED_SECONDS = 20.0

#: Until packages for more jobs are compiled, or the row goes without them.
FILL_SECONDS = 150.0

#: Messages for workers: of five minutes at 15 images/s.
MESSAGES, TINY_MESSAGES = 4_500, 200


class Counted:
    """What the ticks of an engine draw, and when; times are by `time.monotonic`."""

    def __init__(self, engine: SlotEngine, zero: float, minute_seconds: float) -> None:
        """Minutes of so many seconds count from the moment *zero*."""
        #: The end of the last tick beside which something was compiled.
        self.ready_at = time.monotonic()
        #: The end of the first image.
        self.first_at: float | None = None
        #: The rates of each whole minute.
        self.minutes: list[Figures] = []
        self._zero, self._minute_seconds = zero, minute_seconds
        self._engine = engine
        self._ticks = work.Ticks(engine)
        self._pixels: list[int] = []
        #: Images' steps in each tick, of which one without guidance takes a row less.
        self._steps: list[int] = []
        self._images = 0
        self._kinds: list[str] = []
        self._rows_of_slots = 0
        self._step: Step | None = None
        self._kind = "idle"
        self._run = engine._runner.run  # noqa: SLF001
        engine._runner.run = self._note_step  # type: ignore[method-assign]  # noqa: SLF001

    @property
    def quiet_seconds(self) -> float:
        """Seconds for which images were drawn and nothing was compiled."""
        if self.first_at is None:
            return 0.0
        return self._ticks.all[-1].ended_at - max(self.first_at, self.ready_at)

    def note_tick(self, *, has_image: bool) -> None:
        """To be called after each tick."""
        tick, step = self._ticks.all[-1], self._step
        self._pixels.append(step.batch_key.width * step.batch_key.height if step else 0)
        rows = len(step.state.latents) * step.batch_key.slot_rows if step else 0
        filled = "full" if tick.rows == rows else "sparse"
        self._rows_of_slots += rows
        self._kinds.append(f"{self._kind}_{filled}")
        self._steps.append(self._images)
        self._step, self._images, self._kind = None, 0, "idle"
        if self._engine.is_compiling:
            self.ready_at = tick.ended_at
        if has_image and self.first_at is None:
            self.first_at = tick.ended_at
        ends_at = self._zero + (len(self.minutes) + 1) * self._minute_seconds
        if tick.ended_at >= ends_at:
            self.minutes.append(self.rates(ends_at - self._minute_seconds, ends_at))

    def main_rates(self, minute: int) -> Figures:
        """The rates of a minute, or of the time at full speed and of that until then."""
        if minute:
            return self.minutes[minute - 1]
        first_at = self.first_at or self.ready_at
        ended_at = self._ticks.all[-1].ended_at
        found = self.rates(max(first_at, self.ready_at), ended_at)
        if self.ready_at > first_at:
            compiling = self.rates(first_at, self.ready_at)
            found |= {f"compiling_{name}": rate for name, rate in compiling.items()}
        return found

    def rates(self, from_: float, until: float) -> Figures:
        """Rows of UNet calls per second in that time, and they and images' steps times pixels."""
        rows = row_pixels = step_pixels = 0
        all_ = zip(self._ticks.all, self._pixels, self._steps, strict=True)
        for tick, pixels, steps in all_:
            if from_ <= tick.began_at < until:
                rows += tick.rows
                row_pixels += tick.rows * pixels
                step_pixels += steps * pixels
        seconds = max(until - from_, 1e-9)
        return {
            "rows_per_second": rows / seconds,
            "row_pixels_per_second": row_pixels / seconds,
            "step_pixels_per_second": step_pixels / seconds,
        }

    def figures(self) -> Figures:
        """The idle fraction, and ticks by what they ran and whether all slots had all their rows.

        Lanes that wait for others show here: uncompiled ones should take what their images do.
        """
        seconds = Counter[str]()
        for tick, kind in zip(self._ticks.all, self._kinds, strict=True):
            seconds[kind] += tick.ended_at - tick.began_at  # type: ignore[assignment]
        return {
            "idle_fraction": self._ticks.idle_fraction,
            "tick_seconds": dict(seconds),
            "ticks": dict(Counter(self._kinds)),
            "filled_fraction": sum(each.rows for each in self._ticks.all)
            / max(self._rows_of_slots, 1),
        }

    def _note_step(self, step: Step, mode: Any, slots: int) -> None:
        self._step = step
        lanes = self._engine._lanes  # noqa: SLF001
        self._images = sum(len(each.active) for each in lanes if each.step is step)
        self._kind = "compiled" if mode in step.compiled else "uncompiled"
        self._run(step, mode, slots)


def build(arguments: Namespace, family: bag.Family, emit: Emit) -> None:
    """Makes a family's model, LoRAs and messages for workers, which stay for the other rows."""
    arguments.device = devices.find_device(arguments.device)
    workload = jobs_of(arguments, family)
    if family == "sd1":
        side = 64 if arguments.tiny else 512
        workload = replace(workload, sizes=((side, side),))
        for name in ("uniform", "sizes"):
            found = bag.draw(name, family, workload, is_tiny=arguments.tiny)  # type: ignore[arg-type]
            count = TINY_MESSAGES if arguments.tiny else MESSAGES
            numbered = enumerate(itertools.islice(found, count))
            lines = [bench_jobs.message(*each) for each in numbered]
            (arguments.folder / f"{name}.jsonl").write_text("\n".join(lines))
    emit(
        hardware=machine.hardware(arguments.device),
        versions=machine.versions(),
        is_complete=True,
    )


def jobs_of(arguments: Namespace, family: bag.Family) -> bench_jobs.Workload:
    """A family's jobs, whose model and LoRAs are made once."""
    model = families.build_model(arguments, family)
    return families.build_workload(arguments, model, bag.KINDS)


def measure(
    row: EngineRow,
    arguments: Namespace,
    settings: dict[str, Any],
    emit: Emit,
) -> None:
    """Draws a row's jobs with an engine of these *settings*."""
    began_at = arguments.began_at
    phases.seconds["import"] = time.monotonic() - began_at  # of Python, too
    minute_seconds = 2.0 if arguments.tiny else 60.0
    arguments.device = device = devices.find_device(arguments.device)
    if arguments.memory:
        limit_memory(device, arguments.memory)
    workload = jobs_of(arguments, row.family)
    engine = load.load_engine(
        load.EngineSettings(
            families.build_model(arguments, row.family),
            str(device),
            slots=arguments.slots,
            compile="background",
            queue_seconds=lambda: math.inf,
            **settings,
        )
    )
    loaded_at = time.monotonic()
    emit(loaded_seconds=loaded_at - began_at, slots=engine.slots)
    # A trial's first minutes would be over before its libraries are imported.
    zero = loaded_at if arguments.tiny else began_at
    counted = Counted(engine, zero, minute_seconds)
    workload = replace(workload, sizes=(engine.default_size,))
    kind = row.jobs
    kinds = {
        name: bag.draw(name, row.family, workload, is_tiny=arguments.tiny)
        for name in (row.jobs, row.then)
        if name
    }

    def jobs() -> Iterator[contract.ImageRequest]:
        while True:
            yield next(kinds[kind])

    driven = work.draw_on(engine, jobs(), width=1)
    told = 0
    for finished in driven:
        is_first = bool(finished) and counted.first_at is None
        counted.note_tick(has_image=bool(finished))
        if is_first:
            emit(first_picture_seconds=time.monotonic() - began_at)
        if len(counted.minutes) > told:
            told = len(counted.minutes)
            emit(minutes=counted.minutes)
        if _is_measured(row, counted, minute_seconds / 60):
            break
    emit(
        **counted.main_rates(row.minute),
        ready_seconds=counted.ready_at - began_at,
        **counted.figures(),
        phase_seconds=phases.seconds,
        graphs_compiled=engine.graphs.get("compiled", 0),
        peak_memory_bytes=machine.peak_memory_bytes(device),
        hardware=machine.hardware(device),
        versions=machine.versions(),
    )
    if arguments.trace:
        emit(trace=trace.draw(driven, arguments.trace))
    if row.then:
        kind = row.then
        _fill(engine, driven, minute_seconds / 60)
    emit(is_complete=True)
    driven.close()
    engine.close()


def _is_measured(row: EngineRow, counted: Counted, scale: float) -> bool:
    if row.minute:
        return counted.first_at is not None and len(counted.minutes) >= row.minute
    return counted.quiet_seconds > scale * row.steady_seconds


def _fill(engine: SlotEngine, driven: Iterable[object], scale: float) -> None:
    """Draws on until nothing was compiled for a while, and all that jobs of one size need is."""
    runner = engine._runner  # noqa: SLF001
    runner.request(runner.native, in_all_modes=True)
    began_at = quiet_from = time.monotonic()
    for _ in driven:
        now = time.monotonic()
        if engine.is_compiling:
            quiet_from = now
        if now - quiet_from > scale * SETTLED_SECONDS:
            break
        if now - began_at > scale * FILL_SECONDS:
            break
