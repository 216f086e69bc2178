"""One tick: one sampler step of every slot's image, whatever its prompt, sampler or LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from worker.engine import sampler
from worker.engine.slots.unet import SlotUnet

#: The column of the guidance scale, after the sampler's own columns.
GUIDANCE = sampler.COLUMNS

#: Ticks that the host may be ahead of the GPU: enough to hide its own work, few enough that a free
#: slot is filled soon.
_MAX_TICKS_AHEAD = 3


@dataclass(frozen=True, slots=True)
class SlotState:
    """The slots' tensors, which a tick updates in place."""

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

    @property
    def tensors(self) -> tuple[Any, ...]:
        """In the order of `tick`'s arguments."""
        return (self.latents, self.history, self.rows, self.noise, self.context, self.mask)

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


def make_slot_state(
    unet: SlotUnet,
    slots: int,
    shape: Sequence[int],
    tokens: int,
    device: torch.device,
    *,
    is_masked: bool,
) -> SlotState:
    """Zeros, for latents of *shape* [4, height, width]."""

    def zeros(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return SlotState(
        latents=zeros(slots, *shape),
        history=zeros(sampler.HISTORY, slots, *shape),
        rows=zeros(slots, sampler.COLUMNS + 1),
        noise=zeros(slots, *shape),
        context=zeros(2 * slots, tokens, unet.keys_values.width, dtype=unet.dtype),
        mask=zeros(2 * slots, 1, 1, tokens, dtype=unet.dtype) if is_masked else None,
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

    Rows 2 * slot and 2 * slot + 1 of the call are a slot's prompt (cond) and negative prompt
    (uncond). *per_slot* uses each slot's own weights, else the shared ones.
    """
    coefficients = rows[:, : sampler.COLUMNS]
    scaled = sampler.scale_input(coefficients, latents).to(unet.dtype)
    x = scaled[:, None].expand(-1, 2, -1, -1, -1).flatten(0, 1)
    if x.device.type == "cuda":
        x = x.contiguous(memory_format=torch.channels_last)
    times = coefficients[:, sampler.TIMESTEP, None].expand(-1, 2).flatten()
    output = unet(x, times, context, mask, per_slot)
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
