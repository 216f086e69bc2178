"""Ticks: one sampler step of every slot's image, whatever its prompt, sampler or LoRA.

Each lane has tensors of its own, compiled where that pays.
"""

import functools
import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from imagefleet.telemetry.logs import log
from worker.engine import errors as engine_errors
from worker.engine import sampler
from worker.engine.control.network import ControlState, SlotControlNet, residuals
from worker.engine.kernels.graph import Graph, GraphPool
from worker.engine.kernels.layers import channels_last, time_convolutions
from worker.engine.networks.transformer import Call, SlotNetwork, SlotState
from worker.engine.slots.compile_policy import GraphKey, ModeUsage, Outlook
from worker.engine.slots.memory import WEIGHT_MODES, WeightMode
from worker.engine.slots.parts import Parts
from worker.engine.slots.queue import BatchKey, Costs, SlotJob

#: The first column of the guidance scales, after the sampler's own; as many as a slot has rows.
_GUIDANCE = sampler.COLUMNS

#: Ticks that may wait for the one that the GPU is at. One hides the host's own work. For a third
#: recorded tick of SD1.5, or a second one of SDXL, the driver has no room: it spins until the GPU
#: is far enough, and all other threads' work for the GPU waits for it, prompts and LoRAs of the
#: next jobs as well.
_MAX_TICKS_AHEAD = 1

#: Each compiled key holds its memory for good: three sizes, with short and with long prompts.
_MAX_COMPILED_KEYS = 6

#: Of a lane's time, what a graph beside another has to save: it takes seconds without a picture at
#: once, and memory for good.
_LEAST_SAVED_SHARE = 0.01

#: Ticks of a lane in a mode before the next is recorded, which takes as long as ten: some end with
#: the few images that there are of their size.
_TICKS_BEFORE_RECORDING = 3


def tick(
    unet: SlotNetwork,
    weight_mode: WeightMode,
    state: SlotState,
    controls: Sequence[ControlState],
) -> None:
    """One UNet call and one sampler step of all slots, in place; a plain function to be compiled.

    Of a slot's rows in the output, the last is its negative prompt's (uncond), to which each other
    adds its scale of what it differs by; slots with one row take the prompt's output as it is. A
    UNet of pixels also gives the noise's variance, between two bounds; the first prompt's counts.
    """
    coefficients = state.rows[:, : sampler.COLUMNS]
    image = sampler.Inpainting(state.kept, state.original)
    seen = sampler.mask_input(coefficients, state.latents, image)
    scaled = seen * coefficients[:, sampler.INPUT_SCALE, None, None, None]
    x = channels_last(scaled.to(unet.dtype))
    times = coefficients[:, sampler.TIMESTEP]
    slots = len(x) if weight_mode == "per_slot_convolutions" else 0
    controlled = _GUIDANCE + state.slot_rows
    scales = state.rows[:, _GUIDANCE:controlled]
    is_per_slot = weight_mode != "shared"
    rows = state.slot_rows
    guidance = scales[:, 0]
    call = Call(
        state.context, state.mask, is_per_slot, slots, rows, guidance, state.tiles
    )
    steering: Sequence[Tensor] = ()
    if controls:
        steering = residuals(controls, x, times, state.mask, state.rows[:, controlled:])
    if state.conditioning is not None:
        x = torch.cat([x, state.conditioning], dim=1)
    output = unet(x, times, call, state.added, steering).float()
    noise = state.noise
    channels = noise.shape[1]
    if output.shape[1] > channels:
        share = (output[:: state.slot_rows, channels:] + 1) / 2
        bounds = coefficients[..., None, None, None]
        large = share * bounds[:, sampler.LARGE_LOG]
        small = (1 - share) * bounds[:, sampler.SMALL_LOG]
        noise = torch.exp(0.5 * (large + small)) * noise
        output = output[:, :channels]
    *conds, uncond = output.unflatten(0, (-1, state.slot_rows)).unbind(dim=1)
    guided = uncond
    for cond, scale in zip(conds, scales.T[..., None, None, None], strict=False):
        guided = guided + scale * (cond - uncond)
    unguided = uncond if conds else None
    stepped, remembered = sampler.step(
        coefficients,
        state.latents,
        guided,
        state.history,
        noise,
        image,
        unguided,
        unet.limit,
    )
    state.latents.copy_(stepped)
    state.history.copy_(remembered)


#: A tick's `rows` and `noise` in host memory.
Inputs = tuple[Tensor, Tensor]


class InputFeeder:
    """Copies each tick's coefficients and noise to the device asynchronously.

    `send` blocks until the host is no more than _MAX_TICKS_AHEAD, which is what paces the host.
    After `wait_for_tick`, the next one blocks until no tick is left.
    """

    def __init__(self, state: SlotState, copied: deque[torch.cuda.Event]) -> None:
        """*copied*: the events after the last copies of all feeders."""
        self._state = state
        self._copied = copied
        self._pinned = state.rows.is_cuda

        def host_copy(of: Tensor) -> Tensor:
            return torch.zeros(of.shape, dtype=of.dtype, pin_memory=self._pinned)

        buffers = [
            (host_copy(state.rows), host_copy(state.noise))
            for _ in range(_MAX_TICKS_AHEAD + 1 if self._pinned else 1)
        ]
        #: Buffers to fill and send, in turn.
        self.inputs: Iterator[Inputs] = itertools.cycle(buffers)

    def send(self, rows: Tensor, noise: Tensor | None) -> None:
        if len(self._copied) == _MAX_TICKS_AHEAD:
            self._copied.popleft().synchronize()
        self._state.rows.copy_(rows, non_blocking=True)
        if noise is not None:
            self._state.noise.copy_(noise, non_blocking=True)
        self._record()

    def wait_for_tick(self) -> None:
        """Makes the next `send` wait for the end of a tick, not of its inputs' copies."""
        if self._copied:
            self._copied.pop()
            self._record()

    def _record(self) -> None:
        if self._pinned:
            # A blocking event sleeps: spinning would take a core from encoding and uploading.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
            self._copied.append(event)


#: A weight mode, and the version of the tensors with slots' changes of convolutions.
_TickKey = tuple[WeightMode, int]


@dataclass(eq=False)
class Step:
    """The tensors of a lane, and its compiled ticks, if any."""

    batch_key: BatchKey
    state: SlotState
    feeder: InputFeeder
    controls: Sequence[ControlState]
    #: The UNet and the ControlNets.
    networks: Sequence[SlotNetwork]
    compiled: dict[WeightMode, Graph] = field(default_factory=dict)
    #: Uncompiled ticks, for which others serve once they are compiled.
    recorded: dict[_TickKey, Graph] = field(default_factory=dict)
    #: Ticks that ran neither compiled nor recorded.
    ticks: Counter[_TickKey] = field(default_factory=Counter)
    is_compiling: bool = False
    mode_usage: ModeUsage = field(default_factory=ModeUsage)

    @property
    def unet(self) -> SlotNetwork:
        return self.networks[0]

    def mode_for(self, wanted: WeightMode) -> WeightMode:
        """The mode that serves instead of another; that one itself if none does.

        It is compiled, or at least recorded: another recording would take seconds.
        """
        version = self.unet.changes.version
        recorded = {mode for mode, of in self.recorded if of == version}
        for graphs in (self.compiled, recorded):
            for mode in WEIGHT_MODES[WEIGHT_MODES.index(wanted) :]:
                if mode in graphs:
                    return mode
        return wanted

    @property
    def is_kept(self) -> bool:
        """True if its lane stays open: what is compiled is bound to these tensors."""
        return self.is_compiling or bool(self.compiled)

    def forget_graphs(self) -> None:
        for graph in (*self.compiled.values(), *self.recorded.values()):
            graph.release()
        self.compiled.clear()
        self.recorded.clear()


class StepRunner:
    """Makes, compiles and runs the steps of all lanes."""

    def __init__(self, parts: Parts, slots: int) -> None:
        self.costs = Costs(merge_seconds=parts.merger.expected_seconds)
        self.slots = slots
        self.max_compiled = _MAX_COMPILED_KEYS
        #: The key whose jobs need the memory: nothing is compiled while there are some.
        self.paused_for: BatchKey | None = None
        size = parts.model.default_size
        tokens = parts.model.family.plain_tokens
        rows = 1 if parts.settings.is_unguided else 2
        is_plain = rows == 1 and parts.model.family.has_slot_weights
        #: The key of ordinary jobs: the one that most of the first ones have.
        self.native = BatchKey(*size, tokens, None, None, (), rows, is_plain)
        self.outlook = Outlook(parts.settings.queue_seconds)
        self._unet = parts.unet
        self._model = parts.model
        self._device = parts.unet.device
        self._may_compile = parts.settings.packages is not None
        self._compiled_modes = parts.settings.compiled_modes
        self.pool = GraphPool(self._device) if self._device.type == "cuda" else None
        self._copied: deque[torch.cuda.Event] = deque()
        self._compiled: dict[BatchKey, Step] = {}
        self._to_compile: set[tuple[BatchKey, WeightMode | None]] = set()
        self._uncompiled_seconds: dict[WeightMode, float] = {}
        self._timed: set[WeightMode] = set()
        self._refused: set[tuple[BatchKey, WeightMode]] = set()

    def make_step(
        self,
        batch_key: BatchKey,
        slots: int,
        unet: SlotNetwork,
        networks: Sequence[SlotControlNet],
    ) -> Step:
        state = self.make_slot_state(batch_key, slots, unet)
        sides = state.latents.shape[2:]
        context = state.context.shape
        for network in networks:
            network.record_stream()
        controls = tuple(
            ControlState.zeros(each, slots, sides, context) for each in networks
        )
        feeder = InputFeeder(state, self._copied)
        return Step(batch_key, state, feeder, controls, [unet, *networks])

    def place(self, job: SlotJob, *, is_first: bool) -> BatchKey:
        """Counts a job among those that come, the *first* after none; returns its key.

        Apart, if it would have the compiled images of its lane run uncompiled.
        """
        plain = job.batch_key._replace(is_apart=False)
        changes = job.changes_convolutions
        if self.may_compile:
            if is_first:
                self.outlook.begin()
            calls = Counter(
                plain.at(job.prepared, call) for call in range(job.call, job.calls)
            )
            for key, count in calls.items():
                work = count * key.slot_rows * key.width * key.height
                self.outlook.add(GraphKey(key, changes), work)
        key = self.lane_key(plain)
        compiled = step.compiled if (step := self._compiled.get(key)) else {}
        missing = bool(compiled) and "per_slot_convolutions" not in compiled
        return key._replace(is_apart=changes and missing)

    def lane_key(self, batch_key: BatchKey) -> BatchKey:
        """The key of the lane that draws images of a key: of few with one row, that of two."""
        guided = batch_key._replace(slot_rows=2, is_plain=False)
        may_join = self.may_compile and batch_key.slot_rows == 1 and self.slots > 1
        if not may_join or batch_key in self._compiled:
            return batch_key
        alike = [batch_key._replace(is_plain=is_plain) for is_plain in (False, True)]
        return guided if self.outlook.are_few(alike, guided) else batch_key

    @property
    def may_compile(self) -> bool:
        """False without a compiler, while paused, or once a compiled tick has failed."""
        can_compile = self._may_compile and bool(self._compiled_modes)
        return can_compile and self.paused_for is None

    def request(self, batch_key: BatchKey, *, in_all_modes: bool = False) -> None:
        """Requests compilation for a key whether or not it pays, so that any job can run in it."""
        modes = self._modes(batch_key) if in_all_modes else []
        self._to_compile |= {(batch_key, mode) for mode in [None, *modes]}

    def should_compile(self, batch_key: BatchKey) -> bool:
        if batch_key.is_rare or not self._modes(batch_key):
            return False
        if step := self._compiled.get(batch_key):
            return bool(self.missing_modes(step))
        has_room = len(self._compiled) < min(self.max_compiled, _MAX_COMPILED_KEYS)
        # Whether it pays in one mode, and with its VAE call.
        kinds = (GraphKey(batch_key, changes) for changes in (False, True))
        return (batch_key, None) in self._to_compile or (
            has_room and any(self.outlook.pays(kind, 2, self.costs) for kind in kinds)
        )

    def compiled_step(self, batch_key: BatchKey) -> Step | None:
        """A key's tensors, if any job can run compiled on them."""
        return self._compiled.get(batch_key)

    def missing_modes(self, step: Step) -> list[WeightMode]:
        """The modes to compile: first one that any job can run in, then what pays beside it."""
        key = step.batch_key
        modes = self._modes(key) if self.may_compile else []
        if not modes:
            return []
        serves = step.mode_for(modes[0]) in step.compiled
        missing = [] if serves else [self._first_mode(step, modes)]
        missing += [
            mode
            for mode in modes
            if (key, mode) in self._to_compile or self._pays_beside(step, mode)
        ]
        return [mode for mode in dict.fromkeys(missing) if mode not in step.compiled]

    def _pays_beside(self, step: Step, mode: WeightMode) -> bool:
        """True if compiling a mode pays, where another mode serves its ticks or none does."""
        kind = GraphKey(step.batch_key, mode == WEIGHT_MODES[-1])
        instead = step.mode_for(mode)
        if instead not in step.compiled:
            return kind.convolutions and self.outlook.pays(kind, 1, self.costs)
        saved = 1 - self.costs.seconds(mode) / self.costs.seconds(instead)
        saved *= step.mode_usage[mode]
        return saved > _LEAST_SAVED_SHARE and self.outlook.pays(
            kind, 1, self.costs, saved
        )

    def _modes(self, batch_key: BatchKey) -> list[WeightMode]:
        """The modes that the jobs of a key may need; in the first, any without convolutions.

        None of those that cannot be compiled.
        """
        modes = [*self._compiled_modes, *WEIGHT_MODES[-1:] * self._unet.changes.exist]
        if batch_key.is_plain and self._unet.weights != "reloaded":
            modes = ["shared"]
        return [each for each in modes if (batch_key, each) not in self._refused]

    def _first_mode(self, step: Step, modes: Sequence[WeightMode]) -> WeightMode:
        """The mode that serves all of a step's ticks until another pays."""
        slots = len(step.state.latents)
        with_changes = WEIGHT_MODES[-1]
        is_often = self.outlook.often_changes_convolutions(slots)
        if is_often and with_changes in modes:
            return with_changes
        return modes[0]

    @torch.no_grad()
    def run(self, step: Step, weight_mode: WeightMode, slots: int) -> None:
        """One tick, in which the first *slots* slots hold images; compiled, all are computed."""
        graph = step.compiled.get(weight_mode) or self._recorded(step, weight_mode)
        if graph is not None:
            graph()
            if graph.seconds is not None:
                self._note_seconds(step, weight_mode, graph.seconds)
            if not graph.has_room_for_next:
                step.feeder.wait_for_tick()
        else:
            time_convolutions(lasting=slots == len(step.state.latents))
            controls = [each.first(slots) for each in step.controls]
            tick(step.unet, weight_mode, step.state.first(slots), controls)

    def _recorded(self, step: Step, weight_mode: WeightMode) -> Graph | None:
        """A step's uncompiled tick as a CUDA graph; None before it has run a few times.

        Python takes several times as long for one as the GPU, and the longer the more other threads
        do beside it; a recorded one takes it no time.
        """
        if self.pool is None or step.batch_key.is_rare:
            return None
        key = weight_mode, step.unet.changes.version
        step.ticks[key] += 1
        if step.ticks[key] == _TICKS_BEFORE_RECORDING:
            graph = self.make_graph(step, weight_mode)
            time_convolutions(lasting=True)
            try:
                graph.prepare()
            except Exception as error:
                if not engine_errors.is_out_of_memory(error):
                    raise
                log.warning(
                    f"{graph.name} is not recorded: not enough memory",
                    action="capture_failed",
                )
                torch.cuda.empty_cache()
            else:
                step.recorded = {
                    other: each
                    for other, each in step.recorded.items()
                    if other[1] == key[1]
                }
                step.recorded[key] = graph
        return step.recorded.get(key)

    def make_graph(self, step: Step, weight_mode: WeightMode) -> Graph:
        """A step's tick, to be recorded as it is or with compiled kernels."""
        key = step.batch_key
        slots = len(step.state.latents)
        return Graph(
            f"the UNet for {slots * key.slot_rows} rows of {slots} slots, {key.width}x{key.height}"
            f" and {key.tokens} tokens"
            f" ({weight_mode} weights{f', {len(key.controls)} ControlNets' * bool(key.controls)})",
            f"unet-{key.width}x{key.height}-{slots}x{key.slot_rows}-{weight_mode}",
            tick,
            (step.unet, weight_mode, step.state, step.controls),
            self.pool,
        )

    def take_up(self, step: Step, weight_mode: WeightMode, graph: Graph) -> None:
        """Records a compiled tick and runs the step with it from now on; keeps its images.

        The unet must use the block of the step's lane.
        """
        time_convolutions(lasting=True)
        graph.prepare()
        step.compiled[weight_mode] = graph
        step.recorded = {
            key: each
            for key, each in step.recorded.items()
            if step.mode_for(key[0]) not in step.compiled
        }
        self._compiled[step.batch_key] = step
        self._to_compile.add((step.batch_key, None))

    def refuse(self, step: Step, weight_mode: WeightMode) -> None:
        """Never compiles this again: it cannot be."""
        self._refused.add((step.batch_key, weight_mode))

    def resume(self) -> None:
        """Compiles again, once it pays: the memory may soon be needed again."""
        self.paused_for = None
        self._to_compile.clear()
        self.outlook.start_over()

    def put_off(self, batch_key: BatchKey) -> None:
        """Compiles a key only after a while: the memory did not suffice."""
        self._to_compile = {each for each in self._to_compile if each[0] != batch_key}
        for convolutions in (False, True):
            self.outlook.start_over(GraphKey(batch_key, convolutions))

    def drop(self, step: Step) -> None:
        """Compiles nothing any more, since a compiled tick failed; other steps stay."""
        self._compiled.pop(step.batch_key, None)
        step.forget_graphs()
        self.give_up()

    def give_up(self) -> None:
        """Compiles nothing any more."""
        self._may_compile = False

    def drop_convolutions(self) -> None:
        """Frees the compiled ticks with slots' changes, before their tensors change."""
        for step in self._compiled.values():
            if compiled := step.compiled.pop("per_slot_convolutions", None):
                compiled.release()
                self.outlook.start_over(GraphKey(step.batch_key, convolutions=True))
        self._compiled = {
            key: step for key, step in self._compiled.items() if step.compiled
        }
        self._to_compile = {
            each for each in self._to_compile if each[1] != "per_slot_convolutions"
        }

    def reset(self) -> None:
        """Forgets all compiled steps; their keys are compiled again."""
        for step in self._compiled.values():
            step.forget_graphs()
        self._compiled.clear()

    def make_slot_state(
        self, batch_key: BatchKey, slots: int, unet: SlotNetwork
    ) -> SlotState:
        """Zeros for *slots* slots."""
        model = self._model
        tokens = batch_key.tokens
        rows = slots * batch_key.slot_rows
        added_rows = slots * min(batch_key.slot_rows, unet.added_rows)
        sides = batch_key.height // model.factor, batch_key.width // model.factor
        shape = (slots, model.channels, *sides)

        zeros = functools.partial(torch.zeros, dtype=torch.float32, device=self._device)
        conditioning = None
        if model.conditioning_channels:
            conditioning = channels_last(
                zeros(slots, model.conditioning_channels, *sides, dtype=unet.dtype)
            )
        return SlotState(
            latents=zeros(*shape),
            history=zeros(sampler.HISTORY, *shape),
            rows=zeros(
                slots, sampler.COLUMNS + batch_key.slot_rows + len(batch_key.controls)
            ),
            noise=zeros(*shape),
            kept=zeros(slots, 1, *sides),
            original=zeros(*shape),
            context=zeros(rows, tokens, unet.context_width, dtype=unet.dtype),
            mask=zeros(rows, 1, 1, tokens, dtype=unet.dtype)
            if batch_key.is_masked
            else None,
            added=zeros(added_rows, unet.added_width, dtype=unet.dtype)
            if unet.added_width
            else None,
            conditioning=conditioning,
            tiles=batch_key.tiles,
        )

    def _note_seconds(
        self, step: Step, weight_mode: WeightMode, seconds: float
    ) -> None:
        """Notes what ticks take, of the native size where that has been timed.

        Modes that were not are taken to differ as they did before.
        """
        if weight_mode not in step.compiled:
            self._uncompiled_seconds[weight_mode] = seconds
            return
        if weight_mode in self._timed and step.batch_key != self.native:
            return
        factor = seconds / self.costs.seconds(weight_mode)
        self._timed.add(weight_mode)
        changed = {
            f"{mode}_seconds": factor * self.costs.seconds(mode)
            for mode in WEIGHT_MODES
            if mode not in self._timed
        }
        changed[f"{weight_mode}_seconds"] = seconds
        if uncompiled := self._uncompiled_seconds.get(weight_mode):
            changed["saved_share"] = max(0.0, 1 - seconds / uncompiled)
        self.costs = replace(self.costs, **changed)
