"""The calls that draw the slots' images: of each shape its board, compiled where it pays."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from worker.engine.kernels import attention
from worker.engine.kernels.compile import Compiled, GraphPool
from worker.engine.slots import mode
from worker.engine.slots.queue import PLAIN_TOKENS, BatchKey
from worker.engine.slots.step import InputFeeder, SlotState, make_slot_state, tick
from worker.engine.slots.unet import SlotUnet

log = logging.getLogger(__name__)

#: Images of a size after which it is compiled, too: that takes a minute or two, in which some
#: thousand images of another size could be drawn, and gains a third.
_COMPILE_AFTER_IMAGES = 1000

#: Sizes that are compiled at most: each holds its own memory.
_COMPILED_LANES = 3

_TIMED_TICKS = 3


@dataclass(frozen=True, slots=True)
class _Call:
    state: SlotState
    feeder: InputFeeder
    compiled: Mapping[mode.WeightMode, Compiled]


class StepRunner:
    """The UNet in front of boards, one of which is in use."""

    def __init__(
        self,
        unet: SlotUnet,
        slots: int,
        *,
        latents_channels: int,
        vae_factor: int,
        device: torch.device,
        backend: str | None,
        compiled_ways: Sequence[mode.WeightMode],
        kernels: attention.Chooser,
        pool: GraphPool | None,
    ) -> None:
        self.costs = mode.Costs()
        self.slots = slots
        self.batch_key: BatchKey | None = None
        self._unet = unet
        self._channels = latents_channels
        self._vae_factor = vae_factor
        self._device = device
        self._backend = backend
        self._compiled_ways = compiled_ways
        self._kernels = kernels
        self._pool = pool
        self._call: _Call | None = None
        self._warm: dict[BatchKey, _Call] = {}
        self._to_compile: set[BatchKey] = set()
        self._images = Counter[BatchKey]()
        self._dropped_recompiles = 0

    @property
    def current(self) -> tuple[SlotState, InputFeeder]:
        """The board in use, and what feeds it."""
        if self._call is None:
            raise RuntimeError("enter a lane first")
        return self._call.state, self._call.feeder

    @property
    def is_compiled(self) -> bool:
        """Whether the lane in use is; its calls are of all slots then, used or not."""
        return self.batch_key in self._warm

    @property
    def recompiles(self) -> int:
        """Graphs compiled beyond one for each shape and way."""
        compiled = (each for call in self._warm.values() for each in call.compiled.values())
        return self._dropped_recompiles + sum(each.recompiles for each in compiled)

    def enter(self, batch_key: BatchKey) -> None:
        """Takes another board into use, once no slot of the last one is needed."""
        if batch_key == self.batch_key:
            return
        self.batch_key = self._call = None  # its memory may be needed for the next
        self._call = self._warm.get(batch_key)
        if self._call is None:
            state = self.make_slot_state(batch_key)
            self._call = _Call(state, InputFeeder(state), {})
        self.batch_key = batch_key

    def leave(self) -> None:
        self.batch_key = self._call = None

    def count(self, images: int = 1) -> None:
        """Counts images drawn in the lane in use: a size that comes often is compiled."""
        if self.batch_key is not None:
            self._images[self.batch_key] += images

    def is_to_be_compiled(self, batch_key: BatchKey) -> bool:
        if self._backend is None or batch_key in self._warm:
            return False
        often = (
            self._images[batch_key] >= _COMPILE_AFTER_IMAGES and len(self._warm) < _COMPILED_LANES
        )
        return batch_key in self._to_compile or (
            often and batch_key == self.plain_batch_key(batch_key)
        )

    def plain_batch_key(self, size: BatchKey | tuple[int, int]) -> BatchKey:
        """The lane of ordinary jobs of a size."""
        return BatchKey(size[0], size[1], PLAIN_TOKENS, None, None)

    def lacks(self, weight_mode: mode.WeightMode) -> bool:
        """Whether the lane in use is compiled, but not in this way."""
        return self.is_compiled and weight_mode not in self._compiled_ways

    @torch.no_grad()
    def run(self, weight_mode: mode.WeightMode, slots: int) -> None:
        """One tick of the board in use, of which the first *slots* slots hold images."""
        if self._call is None:
            raise RuntimeError("enter a lane first")
        if compiled := self._call.compiled.get(weight_mode):
            compiled()
        else:
            tick(self._unet, weight_mode == "slots", *self._call.state.first(slots).tensors)

    def warm_up(self, batch_key: BatchKey) -> None:
        """Chooses kernels, compiles, records and times the calls of a lane, unless that is done."""
        if batch_key in self._warm:
            return
        self.leave()
        state = self.make_slot_state(batch_key)
        with self._unet.choosing(self._kernels), torch.no_grad():
            tick(self._unet, False, *state.tensors)
        if self._backend is None:
            return
        compiled = self._compile(batch_key, state)
        if not all(each.is_compiled for each in compiled.values()):
            # Of all that is in there, these kernels are the likeliest to have no way through.
            self._unet.attend_by_default()
            compiled = self._compile(batch_key, state)
        self._warm[batch_key] = _Call(state, InputFeeder(state), compiled)
        self._to_compile.add(batch_key)
        if self._device.type == "cuda" and len(compiled) == len(mode.ALL):
            seconds = {weight_mode: _time(each) for weight_mode, each in compiled.items()}
            self.costs = replace(
                self.costs, slots_tick=seconds["slots"], merged_tick=seconds["merged"]
            )

    def forget(self, *, compile_again: bool) -> None:
        """Lets go of all boards and what was compiled for them."""
        self._dropped_recompiles = self.recompiles
        self._warm.clear()
        self.leave()
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

    def _compile(self, batch_key: BatchKey, state: SlotState) -> dict[mode.WeightMode, Compiled]:
        compiled = {}
        for weight_mode in self._compiled_ways:
            compiled[weight_mode] = Compiled(
                f"the UNet for {self.slots} slots of {batch_key.width}x{batch_key.height}"
                f" ({weight_mode})",
                tick,
                (self._unet, weight_mode == "slots", *state.tensors),
                backend=self._backend,
                pool=self._pool,
            )
            compiled[weight_mode]()
        return compiled


def _time(call: Compiled) -> float:
    seconds = []
    for _ in range(_TIMED_TICKS):
        torch.cuda.synchronize()
        began_at = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_at)
    return min(seconds)  # others may be at work on the GPU
