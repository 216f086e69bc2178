"""Ticks: one sampler step of every slot's image, whatever its prompt, sampler or LoRA.

Each lane has tensors of its own, compiled where that pays.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from worker.engine import sampler
from worker.engine.control.network import ControlState, SlotControlNet, residuals
from worker.engine.kernels.compile import Compiled
from worker.engine.kernels.layers import KernelSelector, fastest_seconds, time_convolutions
from worker.engine.networks.transformer import Call, SlotNetwork, SlotState
from worker.engine.networks.unet import SlotUnet
from worker.engine.slots.memory import WEIGHT_MODES, WeightMode
from worker.engine.slots.parts import Parts
from worker.engine.slots.paying import Kind, Outlook
from worker.engine.slots.queue import BatchKey, SlotJob

#: The column of the guidance scale, after the sampler's own columns.
_GUIDANCE = sampler.COLUMNS

#: Ticks that may wait for the one that the GPU is at. One hides the host's own work. For a third
#: recorded tick of SD1.5, or a second one of SDXL, the driver has no room: it spins until the GPU
#: is far enough, and all other threads' work for the GPU waits for it, prompts and LoRAs of the
#: next jobs as well.
_MAX_TICKS_AHEAD = 1

#: Each compiled key holds its memory for good: three sizes, with short and with long prompts.
_MAX_COMPILED_KEYS = 6

_TIMED_TICKS = 3


def tick(
    unet: SlotUnet,
    weight_mode: WeightMode,
    state: SlotState,
    controls: Sequence[ControlState],
) -> None:
    """One UNet call and one sampler step of all slots, in place.

    Rows 2 * slot and 2 * slot + 1 of the output are a slot's prompt (cond) and negative prompt
    (uncond); slots with one row take the prompt's output as it is.
    """
    coefficients = state.rows[:, : sampler.COLUMNS]
    image = sampler.Inpainting(state.kept, state.original)
    seen = sampler.mask_input(coefficients, state.latents, image)
    x = sampler.scale_input(coefficients, seen).to(unet.dtype)
    if x.device.type == "cuda":
        x = x.contiguous(memory_format=torch.channels_last)
    times = coefficients[:, sampler.TIMESTEP]
    slots = len(x) if weight_mode == "per_slot_convolutions" else 0
    scales, is_per_slot = state.rows[:, _GUIDANCE], weight_mode != "shared"
    call = Call(state.context, state.mask, is_per_slot, slots, state.slot_rows, scales)
    steering: Sequence[torch.Tensor] = ()
    if controls:
        steering = residuals(controls, x, times, state.mask, state.rows[:, _GUIDANCE + 1 :])
    if state.conditioning is not None:
        x = torch.cat([x, state.conditioning], dim=1)
    guided, uncond = unet(x, times, call, state.added, steering).float(), None
    if state.slot_rows > 1:
        cond, uncond = guided.unflatten(0, (-1, 2)).unbind(dim=1)
        guided = uncond + scales[:, None, None, None] * (cond - uncond)
    stepped, remembered = sampler.step(
        coefficients, state.latents, guided, state.history, state.noise, image, uncond
    )
    state.latents.copy_(stepped)
    state.history.copy_(remembered)


Inputs = tuple[torch.Tensor, torch.Tensor]
"""A tick's `rows` and `noise` in host memory."""


class InputFeeder:
    """Copies each tick's coefficients and noise to the device asynchronously.

    `send` blocks until the host is no more than _MAX_TICKS_AHEAD, which is what paces the host.
    After `wait_for_tick`, the next one blocks until no tick is left.
    """

    def __init__(self, state: SlotState, copied: deque[torch.cuda.Event]) -> None:
        """*copied*: the events after the last copies of all feeders."""
        self._state = state
        self._copied = copied
        self._pinned = state.rows.device.type == "cuda"
        self._inputs = [
            (self._host_copy(state.rows), self._host_copy(state.noise))
            for _ in range(_MAX_TICKS_AHEAD + 1 if self._pinned else 1)
        ]
        self._at = 0

    def next_inputs(self) -> Inputs:
        """Buffers to fill and send."""
        self._at = (self._at + 1) % len(self._inputs)
        return self._inputs[self._at]

    def send(self, rows: torch.Tensor, noise: torch.Tensor | None) -> None:
        if len(self._copied) == _MAX_TICKS_AHEAD:
            self._copied.popleft().synchronize()
        self._state.rows.copy_(rows, non_blocking=True)
        if noise is not None:
            self._state.noise.copy_(noise, non_blocking=True)
        self._record()

    def wait_for_tick(self) -> None:
        """Has the next `send` wait for the end of a tick, not of its inputs' copies."""
        if self._copied:
            self._copied.pop()
            self._record()

    def _record(self) -> None:
        if self._pinned:
            # A blocking event sleeps: spinning would take a core from encoding and uploading.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
            self._copied.append(event)

    def _host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)


@dataclass(slots=True, eq=False)
class Step:
    """The tensors of a lane, and its compiled ticks, if any."""

    batch_key: BatchKey
    state: SlotState
    feeder: InputFeeder
    controls: Sequence[ControlState]
    networks: Sequence[SlotNetwork]
    """The UNet and the ControlNets."""
    compiled: dict[WeightMode, Compiled] = field(default_factory=dict)
    is_compiling: bool = False

    @property
    def is_kept(self) -> bool:
        """True if its lane stays open: what is compiled is bound to these tensors."""
        return self.is_compiling or bool(self.compiled)

    def forget_compiled(self) -> None:
        """Frees what is compiled."""
        for each in self.compiled.values():
            each.release()
        self.compiled.clear()


class StepRunner:
    """Makes, compiles and runs the steps of all lanes."""

    def __init__(self, parts: Parts, slots: int) -> None:
        self.costs = parts.costs
        self.slots = slots
        self.max_compiled = _MAX_COMPILED_KEYS
        self.paused_for: BatchKey | None = None
        """The key whose jobs need the memory: nothing is compiled while there are some."""
        size, tokens = parts.model.default_size, parts.model.family.plain_tokens
        rows, is_plain = (1, True) if parts.settings.is_unguided else (2, False)
        self.native = BatchKey(*size, tokens, None, None, (), rows, is_plain)
        """The key of ordinary jobs, whose rows the first one shows."""
        self.outlook = Outlook(parts.settings.queue_seconds)
        self._unet = parts.unet
        self._model = parts.model
        self._tick = parts.tick
        self._device = parts.unet.device
        self._backend = parts.settings.backend
        self._compiled_modes = parts.settings.compiled_modes
        self._kernels = KernelSelector()
        self._pool = parts.pool
        self._copied: deque[torch.cuda.Event] = deque()
        self._compiled: dict[BatchKey, Step] = {}
        self._to_compile: set[Kind] = set()
        self._uncompiled_seconds = 0.0
        self._dropped_recompiles = 0

    @property
    def recompiles(self) -> int:
        """Graphs compiled beyond one per batch key and weight mode."""
        compiled = (each for step in self._compiled.values() for each in step.compiled.values())
        return self._dropped_recompiles + sum(each.recompiles for each in compiled)

    def make_step(
        self, batch_key: BatchKey, slots: int, networks: Sequence[SlotControlNet]
    ) -> Step:
        """Makes a step with the key's ControlNets."""
        state = self.make_slot_state(batch_key, slots)
        sides, context = state.latents.shape[2:], state.context.shape
        for network in networks:
            network.record_stream()
        controls = tuple(ControlState.zeros(each, slots, sides, context) for each in networks)
        feeder = InputFeeder(state, self._copied)
        return Step(batch_key, state, feeder, controls, [self._unet, *networks])

    def place(self, job: SlotJob, *, is_first: bool) -> BatchKey:
        """Counts a job among those that come, the *first* after none; returns its key.

        Apart, if it would have the compiled images of its lane run uncompiled.
        """
        plain, changes = job.batch_key._replace(is_apart=False), job.changes_convolutions
        if self.may_compile and not job.urgent:
            if is_first:
                self.outlook.begin()
            calls = Counter(plain.at(job.prepared, call) for call in range(job.calls))
            for key, count in calls.items():
                work = count * key.slot_rows * key.width * key.height
                self.outlook.add(Kind(key, changes), work)
        compiled = step.compiled if (step := self._compiled.get(plain)) else {}
        missing = bool(compiled) and "per_slot_convolutions" not in compiled
        return plain._replace(is_apart=changes and missing)

    @property
    def may_compile(self) -> bool:
        """False without a backend, while paused, or once a compiled tick has failed."""
        can_compile = self._backend is not None and bool(self._compiled_modes)
        return can_compile and self.paused_for is None

    def request(self, batch_key: BatchKey, *, convolutions: bool = False) -> None:
        """Has a key compiled whether or not it pays; *convolutions*: changes of them as well."""
        self._to_compile |= {Kind(batch_key), Kind(batch_key, convolutions)}

    def should_compile(self, batch_key: BatchKey) -> bool:
        if not self.may_compile or batch_key.is_rare:
            return False
        if step := self._compiled.get(batch_key):
            return bool(self.missing_modes(step))
        has_room = len(self._compiled) < min(self.max_compiled, _MAX_COMPILED_KEYS)
        return Kind(batch_key) in self._to_compile or (has_room and self._pays(batch_key))

    def missing_modes(self, step: Step) -> list[WeightMode]:
        """The modes to compile, the first of which any job can run in.

        The one with changes of convolutions once that pays.
        """
        if not self.may_compile:
            return []
        key = step.batch_key
        modes: list[WeightMode] = []
        if not step.compiled or Kind(key) in self._to_compile:
            modes += self._modes(step)
        kind = Kind(key, convolutions=True)
        pays = kind in self._to_compile or self.outlook.pays(kind, 1, self.costs)
        if self._unet.changes.exist and pays:
            modes.append("per_slot_convolutions")
        return [each for each in modes if each not in step.compiled]

    def _pays(self, batch_key: BatchKey) -> bool:
        """Whether compiling a key pays, its VAE call included."""
        graphs = 2 if self._is_shared(batch_key) else len(self._compiled_modes) + 1
        return any(
            self.outlook.pays(Kind(batch_key, bool(more)), graphs + more, self.costs)
            for more in (0, 1)
        )

    def _is_shared(self, batch_key: BatchKey) -> bool:
        return batch_key.is_plain and self._unet.weights != "reloaded"

    def _modes(self, step: Step) -> Sequence[WeightMode]:
        """What is compiled of a step from the start."""
        return ("shared",) if self._is_shared(step.batch_key) else self._compiled_modes

    def can_run(self, step: Step, weight_mode: WeightMode) -> bool:
        """False if another mode should run, since that is compiled and this one is not.

        Each slot's own weights have no other mode.
        """
        return weight_mode != "shared" or not step.compiled or weight_mode in step.compiled

    @torch.no_grad()
    def run(self, step: Step, weight_mode: WeightMode, slots: int) -> None:
        """One tick, in which the first *slots* slots hold images; compiled, all are computed."""
        if compiled := step.compiled.get(weight_mode):
            compiled()
            if not compiled.has_room_for_next:
                step.feeder.wait_for_tick()
        else:
            time_convolutions(lasting=slots == len(step.state.latents))
            controls = [each.first(slots) for each in step.controls]
            self._tick(self._unet, weight_mode, step.state.first(slots), controls)

    def select_kernels(self, step: Step) -> None:
        """Selects the attention kernels of a step that is not compiled yet; keeps its images."""
        if step.compiled:
            return
        time_convolutions(lasting=True)
        for network in step.networks:
            network.select_kernels(self._kernels)
        try:
            with _keeping(step), torch.no_grad():
                self._tick(self._unet, "shared", step.state, step.controls)
                if self._device.type == "cuda":
                    tick = functools.partial(self._tick, self._unet, "shared")
                    call = functools.partial(tick, step.state, step.controls)
                    self._uncompiled_seconds = fastest_seconds(call, 1)
        except BaseException:
            for network in step.networks:
                network.use_default_attention()
            raise

    def make_compiled(self, step: Step, weight_mode: WeightMode) -> Compiled:
        """A step's tick, to be traced on any thread and then taken up."""
        key, slots = step.batch_key, len(step.state.latents)
        return Compiled(
            f"the UNet for {slots * key.slot_rows} rows of {slots} slots, {key.width}x{key.height}"
            f" and {key.tokens} tokens"
            f" ({weight_mode} weights{f', {len(key.controls)} ControlNets' * bool(key.controls)})",
            self._tick,
            (self._unet, weight_mode, step.state, step.controls),
            backend=self._backend,
            pool=self._pool,
        )

    def take_up(self, step: Step, weight_mode: WeightMode, compiled: Compiled) -> None:
        """Records a compiled tick and runs the step with it from now on; keeps its images.

        The unet must use the block of the step's lane.
        """
        time_convolutions(lasting=True)
        with _keeping(step):
            compiled()
            if self._device.type == "cuda":
                compiled.time_launch()
            ran = {**step.compiled, weight_mode: compiled}
            if weight_mode not in WEIGHT_MODES:
                self._time({weight_mode: compiled})
            elif all(each in ran for each in self._modes(step)):
                self._time({each: ran[each] for each in self._modes(step)})
        step.compiled[weight_mode] = compiled
        self._compiled[step.batch_key] = step
        self._to_compile.add(Kind(step.batch_key))

    def note_compiled(self, seconds: float, graphs: int) -> None:
        """What compiling has taken tells what more of it will."""
        self.costs = replace(self.costs, graph_seconds=seconds / max(1, graphs))

    def resume(self) -> None:
        """Compiles again, once it pays: the memory may soon be needed again."""
        self.paused_for = None
        self._to_compile.clear()
        self.outlook.start_over()

    def put_off(self, batch_key: BatchKey) -> None:
        """Compiles a key only after a while: the memory did not suffice."""
        for kind in (Kind(batch_key), Kind(batch_key, convolutions=True)):
            self._to_compile.discard(kind)
            self.outlook.start_over(kind)

    def drop(self, step: Step) -> None:
        """Compiles nothing any more, since a compiled tick failed; other steps stay."""
        self._dropped_recompiles += sum(each.recompiles for each in step.compiled.values())
        self._compiled.pop(step.batch_key, None)
        step.forget_compiled()
        self.give_up()

    def give_up(self) -> None:
        """Compiles nothing any more."""
        self._backend = None

    def drop_convolutions(self) -> None:
        """Frees the compiled ticks with slots' changes, before their tensors change."""
        modes: list[WeightMode] = ["per_slot_convolutions"]
        if self._unet.weights == "factors":
            modes.append("per_slot")
        for step, mode in itertools.product(self._compiled.values(), modes):
            if compiled := step.compiled.pop(mode, None):
                self._dropped_recompiles += compiled.recompiles
                compiled.release()
                self.outlook.start_over(Kind(step.batch_key, convolutions=True))
        self._to_compile = {each for each in self._to_compile if not each.convolutions}

    def reset(self) -> None:
        """Forgets all compiled steps; their keys are compiled again."""
        self._dropped_recompiles = self.recompiles
        for step in self._compiled.values():
            step.forget_compiled()
        self._compiled.clear()

    def make_slot_state(self, batch_key: BatchKey, slots: int) -> SlotState:
        """Zeros for *slots* slots."""
        unet, model, tokens = self._unet, self._model, batch_key.tokens
        rows = slots * batch_key.slot_rows
        added_rows = slots * min(batch_key.slot_rows, unet.added_rows)
        sides = batch_key.height // model.factor, batch_key.width // model.factor
        shape = (slots, model.channels, *sides)

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self._device)

        conditioning = None
        if model.conditioning_channels:
            conditioning = zeros(slots, model.conditioning_channels, *sides, dtype=unet.dtype)
            if self._device.type == "cuda":
                conditioning = conditioning.contiguous(memory_format=torch.channels_last)
        return SlotState(
            latents=zeros(*shape),
            history=zeros(sampler.HISTORY, *shape),
            rows=zeros(slots, model.columns + 1 + len(batch_key.controls)),
            noise=zeros(*shape),
            kept=zeros(slots, 1, *sides),
            original=zeros(*shape),
            context=zeros(rows, tokens, unet.context_width, dtype=unet.dtype),
            mask=zeros(rows, 1, 1, tokens, dtype=unet.dtype) if batch_key.is_masked else None,
            added=zeros(added_rows, unet.added_width, dtype=unet.dtype)
            if unet.added_width
            else None,
            conditioning=conditioning,
        )

    def _time(self, compiled: Mapping[WeightMode, Compiled]) -> None:
        if self._device.type == "cuda":
            seconds = {
                f"{weight_mode}_seconds": fastest_seconds(each, _TIMED_TICKS)
                for weight_mode, each in compiled.items()
            }
            self.costs = replace(self.costs, **seconds)
            if self._uncompiled_seconds and "shared" in compiled:
                saved = 1 - self.costs.shared_seconds / self._uncompiled_seconds
                self.costs = replace(self.costs, saved_share=max(0.0, saved))


@contextlib.contextmanager
def _keeping(step: Step) -> Iterator[None]:
    """Restores the images that ticks inside it change."""
    kept = [(each, each.clone()) for each in (step.state.latents, step.state.history)]
    try:
        yield
    finally:
        for tensor, copy in kept:
            tensor.copy_(copy)
