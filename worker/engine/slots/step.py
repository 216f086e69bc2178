"""Ticks: one sampler step of every slot's image, whatever its prompt, sampler or LoRA.

Each batch key has tensors of its own, compiled where that pays.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from worker.engine import sampler
from worker.engine.checkpoint import Checkpoint
from worker.engine.kernels.compile import Compiled, GraphPool
from worker.engine.kernels.layers import KernelSelector, fastest_seconds
from worker.engine.slots.prepare import PLAIN_TOKENS
from worker.engine.slots.queue import WEIGHT_MODES, BatchKey, Costs, WeightMode
from worker.engine.slots.unet import SlotUnet

log = logging.getLogger(__name__)

#: The column of the guidance scale, after the sampler's own columns.
GUIDANCE = sampler.COLUMNS

#: Ticks that the host may be ahead of the GPU: enough to hide its own work, few enough that a free
#: slot is filled soon.
_MAX_TICKS_AHEAD = 3

#: Images of a size after which it is compiled as well: compiling takes a minute or two, in which
#: some thousand images of another size could be drawn, and gains a third.
_COMPILE_AFTER_IMAGES = 1000

#: Each compiled size holds its own memory.
_MAX_COMPILED_KEYS = 3

_TIMED_TICKS = 3


class SlotState(NamedTuple):
    """The slots' tensors, which a tick updates in place; in the order of `tick`'s arguments."""

    latents: torch.Tensor
    """[slots, 4, height, width], always float32."""
    history: torch.Tensor
    """[sampler.HISTORY, slots, 4, height, width]"""
    rows: torch.Tensor
    """[slots, columns]: this call's sampler coefficients, then the guidance scale."""
    noise: torch.Tensor
    """[slots, 4, height, width]"""
    context: torch.Tensor
    """[2 * slots, tokens, width]: the keys and values of all cross-attentions."""
    mask: torch.Tensor | None
    """[2 * slots, 1, 1, tokens], if prompts may be shorter than that."""

    def first(self, slots: int) -> SlotState:
        """Views of the first slots."""
        if slots == len(self.latents):
            return self
        return SlotState(
            self.latents[:slots],
            self.history[:, :slots],
            self.rows[:slots],
            self.noise[:slots],
            self.context[: 2 * slots],
            None if self.mask is None else self.mask[: 2 * slots],
        )


def tick(
    unet: SlotUnet,
    per_slot: bool,
    latents: torch.Tensor,
    history: torch.Tensor,
    rows: torch.Tensor,
    noise: torch.Tensor,
    context: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    """One UNet call and one sampler step of a `SlotState`'s tensors, in place.

    Rows 2 * slot and 2 * slot + 1 of the output are a slot's prompt (cond) and negative prompt
    (uncond). *per_slot* uses each slot's own weights, else the shared ones.
    """
    coefficients = rows[:, : sampler.COLUMNS]
    x = sampler.scale_input(coefficients, latents).to(unet.dtype)
    if x.device.type == "cuda":
        x = x.contiguous(memory_format=torch.channels_last)
    output = unet(x, coefficients[:, sampler.TIMESTEP], context, mask, per_slot)
    cond, uncond = output.float().unflatten(0, (-1, 2)).unbind(dim=1)
    guided = uncond + rows[:, GUIDANCE, None, None, None] * (cond - uncond)
    stepped, remembered = sampler.step(coefficients, latents, guided, history, noise)
    latents.copy_(stepped)
    history.copy_(remembered)


@dataclass(slots=True)
class StepInputs:
    """A tick's `rows` and `noise` in host memory, and the event after their copy."""

    rows: torch.Tensor
    noise: torch.Tensor
    copied: torch.cuda.Event | None = None


class InputFeeder:
    """Copies each tick's coefficients and noise to the device asynchronously.

    It blocks only when the host is _MAX_TICKS_AHEAD, which is what paces the host.
    """

    def __init__(self, state: SlotState) -> None:
        self._state = state
        self._pinned = state.rows.device.type == "cuda"
        self._inputs = [
            StepInputs(self._host_copy(state.rows), self._host_copy(state.noise))
            for _ in range(_MAX_TICKS_AHEAD if self._pinned else 1)
        ]
        self._at = 0

    def next_inputs(self) -> StepInputs:
        """Buffers to fill and send."""
        self._at = (self._at + 1) % len(self._inputs)
        inputs = self._inputs[self._at]
        if inputs.copied is not None:
            inputs.copied.synchronize()
        return inputs

    def send(self, inputs: StepInputs, *, noisy: bool) -> None:
        self._state.rows.copy_(inputs.rows, non_blocking=True)
        if noisy:
            self._state.noise.copy_(inputs.noise, non_blocking=True)
        if self._pinned:
            # A blocking event sleeps: spinning would take a core from encoding and uploading.
            inputs.copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            inputs.copied.record()

    def _host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)


@dataclass(frozen=True, slots=True)
class _Step:
    """The tensors of a batch key, and its compiled ticks, if any."""

    state: SlotState
    feeder: InputFeeder
    compiled: Mapping[WeightMode, Compiled]


class StepRunner:
    """The UNet and the slot states; one batch key is active at a time."""

    def __init__(
        self,
        unet: SlotUnet,
        slots: int,
        *,
        checkpoint: Checkpoint,
        backend: str | None,
        compiled_modes: Sequence[WeightMode],
        pool: GraphPool | None,
    ) -> None:
        self.costs = Costs()
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

    def can_run(self, weight_mode: WeightMode) -> bool:
        """False if the active key is compiled, but not for this mode."""
        return not self.is_compiled or weight_mode in self._compiled_modes

    @torch.no_grad()
    def run(self, weight_mode: WeightMode, slots: int) -> None:
        """One tick of the active key, of which the first *slots* slots hold images."""
        step = self.active
        if compiled := step.compiled.get(weight_mode):
            compiled()
        else:
            tick(self._unet, weight_mode == "per_slot", *step.state.first(slots))

    def warm_up(self, batch_key: BatchKey) -> None:
        """Selects kernels, compiles, records and times the ticks of a key that is not compiled."""
        if batch_key in self._compiled:
            return
        self._deactivate()
        state = self.make_slot_state(batch_key)
        with self._unet.selecting_kernels(self._kernels), torch.no_grad():
            tick(self._unet, False, *state)
        if self._backend is None:
            return
        compiled = self._compile(batch_key, state)
        if not all(each.is_compiled for each in compiled.values()):
            # The attention kernels are the likeliest part that the compiler cannot trace.
            self._unet.use_default_attention()
            compiled = self._compile(batch_key, state)
        self._compiled[batch_key] = _Step(state, InputFeeder(state), compiled)
        self._to_compile.add(batch_key)
        if self._device.type == "cuda" and len(compiled) == len(WEIGHT_MODES):
            seconds = {
                f"{weight_mode}_seconds": fastest_seconds(each, _TIMED_TICKS)
                for weight_mode, each in compiled.items()
            }
            self.costs = replace(self.costs, **seconds)

    def reset(self, *, compile_again: bool) -> None:
        """Frees all slot states and compiled ticks."""
        self._dropped_recompiles = self.recompiles
        self._compiled.clear()
        self._deactivate()
        if not compile_again:
            self._backend = None

    def make_slot_state(self, batch_key: BatchKey, slots: int | None = None) -> SlotState:
        """Zeros for *slots* slots, by default all."""
        slots, unet = slots or self.slots, self._unet
        sides = batch_key.height // self._vae_factor, batch_key.width // self._vae_factor
        shape, tokens = (slots, self._channels, *sides), batch_key.tokens

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self._device)

        return SlotState(
            latents=zeros(*shape),
            history=zeros(sampler.HISTORY, *shape),
            rows=zeros(slots, sampler.COLUMNS + 1),
            noise=zeros(*shape),
            context=zeros(2 * slots, tokens, unet.keys_values.width, dtype=unet.dtype),
            mask=zeros(2 * slots, 1, 1, tokens, dtype=unet.dtype) if batch_key.is_masked else None,
        )

    def _deactivate(self) -> None:
        self.batch_key = self._active = None

    def _compile(self, batch_key: BatchKey, state: SlotState) -> dict[WeightMode, Compiled]:
        compiled = {}
        for weight_mode in self._compiled_modes:
            compiled[weight_mode] = Compiled(
                f"the UNet for {self.slots} slots of {batch_key.width}x{batch_key.height}"
                f" ({weight_mode} weights)",
                tick,
                (self._unet, weight_mode == "per_slot", *state),
                backend=self._backend,
                pool=self._pool,
            )
            compiled[weight_mode]()
        return compiled
