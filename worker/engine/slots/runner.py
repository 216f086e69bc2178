"""Runs ticks: a `SlotState` for each batch key, compiled where that pays."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from worker.engine.checkpoint import Checkpoint
from worker.engine.kernels.attention import KernelSelector
from worker.engine.kernels.compile import Compiled, GraphPool
from worker.engine.slots import mode
from worker.engine.slots.prepare import PLAIN_TOKENS
from worker.engine.slots.queue import BatchKey
from worker.engine.slots.step import InputFeeder, SlotState, make_slot_state, tick
from worker.engine.slots.unet import SlotUnet

log = logging.getLogger(__name__)

#: Images of a size after which it is compiled as well: compiling takes a minute or two, in which
#: some thousand images of another size could be drawn, and gains a third.
_COMPILE_AFTER_IMAGES = 1000

#: Each compiled size holds its own memory.
_MAX_COMPILED_KEYS = 3

_TIMED_TICKS = 3


@dataclass(frozen=True, slots=True)
class _Step:
    """The tensors of a batch key, and its compiled ticks, if any."""

    state: SlotState
    feeder: InputFeeder
    compiled: Mapping[mode.WeightMode, Compiled]


class StepRunner:
    """The UNet and the slot states; one batch key is active at a time."""

    def __init__(
        self,
        unet: SlotUnet,
        slots: int,
        *,
        checkpoint: Checkpoint,
        backend: str | None,
        compiled_modes: Sequence[mode.WeightMode],
        pool: GraphPool | None,
    ) -> None:
        self.costs = mode.Costs()
        self.slots = slots
        self.batch_key: BatchKey | None = None
        self._unet = unet
        self._channels = int(checkpoint.unet.config.in_channels)
        self._vae_factor = checkpoint.vae_factor
        self._device: torch.device = checkpoint.unet.device
        self._backend = backend
        self._compiled_modes = compiled_modes
        self._kernels = KernelSelector()
        self._pool = pool
        self._active: _Step | None = None
        self._compiled: dict[BatchKey, _Step] = {}
        self._to_compile: set[BatchKey] = set()
        self._images = Counter[BatchKey]()
        self._dropped_recompiles = 0

    @property
    def active(self) -> _Step:
        """The step of the active batch key."""
        if self._active is None:
            raise RuntimeError("activate a batch key first")
        return self._active

    @property
    def is_compiled(self) -> bool:
        """True if the active key is compiled; its calls then compute all slots, used or not."""
        return self.batch_key in self._compiled

    @property
    def recompiles(self) -> int:
        """Graphs compiled beyond one per batch key and weight mode."""
        compiled = (each for step in self._compiled.values() for each in step.compiled.values())
        return self._dropped_recompiles + sum(each.recompiles for each in compiled)

    def activate(self, batch_key: BatchKey) -> None:
        """Switches to a batch key, once no slot of the last one is in use."""
        if batch_key == self.batch_key:
            return
        self._deactivate()  # its memory may be needed for the next
        self._active = self._compiled.get(batch_key)
        if self._active is None:
            state = self.make_slot_state(batch_key)
            self._active = _Step(state, InputFeeder(state), {})
        self.batch_key = batch_key

    def count_image(self) -> None:
        """Counts an image of the active key: a frequent size is compiled."""
        if self.batch_key is not None:
            self._images[self.batch_key] += 1

    def should_compile(self, batch_key: BatchKey) -> bool:
        if self._backend is None or batch_key in self._compiled:
            return False
        is_frequent = (
            self._images[batch_key] >= _COMPILE_AFTER_IMAGES
            and len(self._compiled) < _MAX_COMPILED_KEYS
        )
        return batch_key in self._to_compile or (
            is_frequent and batch_key == self.plain_batch_key(batch_key.width, batch_key.height)
        )

    def plain_batch_key(self, width: int, height: int) -> BatchKey:
        """The key of ordinary jobs of a size in pixels."""
        return BatchKey(width, height, PLAIN_TOKENS, None, None)

    def can_run(self, weight_mode: mode.WeightMode) -> bool:
        """False if the active key is compiled, but not for this mode."""
        return not self.is_compiled or weight_mode in self._compiled_modes

    @torch.no_grad()
    def run(self, weight_mode: mode.WeightMode, slots: int) -> None:
        """One tick of the active key, of which the first *slots* slots hold images."""
        step = self.active
        if compiled := step.compiled.get(weight_mode):
            compiled()
        else:
            tick(self._unet, weight_mode == "per_slot", *step.state.first(slots).tensors)

    def warm_up(self, batch_key: BatchKey) -> None:
        """Selects kernels, compiles, records and times the ticks of a key that is not compiled."""
        if batch_key in self._compiled:
            return
        self._deactivate()
        state = self.make_slot_state(batch_key)
        with self._unet.selecting_kernels(self._kernels), torch.no_grad():
            tick(self._unet, False, *state.tensors)
        if self._backend is None:
            return
        compiled = self._compile(batch_key, state)
        if not all(each.is_compiled for each in compiled.values()):
            # The attention kernels are the likeliest part that the compiler cannot trace.
            self._unet.use_default_attention()
            compiled = self._compile(batch_key, state)
        self._compiled[batch_key] = _Step(state, InputFeeder(state), compiled)
        self._to_compile.add(batch_key)
        if self._device.type == "cuda" and len(compiled) == len(mode.ALL):
            seconds = {weight_mode: _time(each) for weight_mode, each in compiled.items()}
            self.costs = replace(
                self.costs,
                per_slot_seconds=seconds["per_slot"],
                shared_seconds=seconds["shared"],
            )

    def reset(self, *, compile_again: bool) -> None:
        """Frees all slot states and compiled ticks."""
        self._dropped_recompiles = self.recompiles
        self._compiled.clear()
        self._deactivate()
        if not compile_again:
            self._backend = None

    def make_slot_state(self, batch_key: BatchKey, slots: int | None = None) -> SlotState:
        shape = (
            self._channels,
            batch_key.height // self._vae_factor,
            batch_key.width // self._vae_factor,
        )
        return make_slot_state(
            self._unet,
            slots or self.slots,
            shape,
            batch_key.tokens,
            self._device,
            is_masked=batch_key.is_masked,
        )

    def _deactivate(self) -> None:
        self.batch_key = self._active = None

    def _compile(self, batch_key: BatchKey, state: SlotState) -> dict[mode.WeightMode, Compiled]:
        compiled = {}
        for weight_mode in self._compiled_modes:
            compiled[weight_mode] = Compiled(
                f"the UNet for {self.slots} slots of {batch_key.width}x{batch_key.height}"
                f" ({weight_mode} weights)",
                tick,
                (self._unet, weight_mode == "per_slot", *state.tensors),
                backend=self._backend,
                pool=self._pool,
            )
            compiled[weight_mode]()
        return compiled


def _time(call: Compiled) -> float:
    """Seconds of the fastest of a few runs: other processes may use the GPU as well."""
    seconds = []
    for _ in range(_TIMED_TICKS):
        torch.cuda.synchronize()
        began_at = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_at)
    return min(seconds)
