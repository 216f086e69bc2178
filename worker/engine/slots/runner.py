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
from worker.engine.slots.queue import PLAIN_TOKENS, Lane
from worker.engine.slots.step import Board, Feeder, make_board, tick
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
    board: Board
    feeder: Feeder
    compiled: Mapping[mode.Way, Compiled]


class Calls:
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
        compiled_ways: Sequence[mode.Way],
        kernels: attention.Chooser,
        pool: GraphPool | None,
    ) -> None:
        self.costs = mode.Costs()
        self.slots = slots
        self.lane: Lane | None = None
        self._unet = unet
        self._channels = latents_channels
        self._vae_factor = vae_factor
        self._device = device
        self._backend = backend
        self._compiled_ways = compiled_ways
        self._kernels = kernels
        self._pool = pool
        self._call: _Call | None = None
        self._warm: dict[Lane, _Call] = {}
        self._to_compile: set[Lane] = set()
        self._images = Counter[Lane]()
        self._dropped_recompiles = 0

    @property
    def current(self) -> tuple[Board, Feeder]:
        """The board in use, and what feeds it."""
        if self._call is None:
            raise RuntimeError("enter a lane first")
        return self._call.board, self._call.feeder

    @property
    def is_compiled(self) -> bool:
        """Whether the lane in use is; its calls are of all slots then, used or not."""
        return self.lane in self._warm

    @property
    def recompiles(self) -> int:
        """Graphs compiled beyond one for each shape and way."""
        compiled = (each for call in self._warm.values() for each in call.compiled.values())
        return self._dropped_recompiles + sum(each.recompiles for each in compiled)

    def enter(self, lane: Lane) -> None:
        """Takes another board into use, once no slot of the last one is needed."""
        if lane == self.lane:
            return
        self.lane = self._call = None  # its memory may be needed for the next
        self._call = self._warm.get(lane)
        if self._call is None:
            board = self.make_board(lane)
            self._call = _Call(board, Feeder(board), {})
        self.lane = lane

    def leave(self) -> None:
        self.lane = self._call = None

    def count(self, images: int = 1) -> None:
        """Counts images drawn in the lane in use: a size that comes often is compiled."""
        if self.lane is not None:
            self._images[self.lane] += images

    def is_to_be_compiled(self, lane: Lane) -> bool:
        if self._backend is None or lane in self._warm:
            return False
        often = self._images[lane] >= _COMPILE_AFTER_IMAGES and len(self._warm) < _COMPILED_LANES
        return lane in self._to_compile or (often and lane == self.plain_lane(lane))

    def plain_lane(self, size: Lane | tuple[int, int]) -> Lane:
        """The lane of ordinary jobs of a size."""
        return Lane(size[0], size[1], PLAIN_TOKENS, None, None)

    def lacks(self, way: mode.Way) -> bool:
        """Whether the lane in use is compiled, but not in this way."""
        return self.is_compiled and way not in self._compiled_ways

    @torch.no_grad()
    def run(self, way: mode.Way, slots: int) -> None:
        """One tick of the board in use, of which the first *slots* slots hold images."""
        if self._call is None:
            raise RuntimeError("enter a lane first")
        if compiled := self._call.compiled.get(way):
            compiled()
        else:
            tick(self._unet, way == "slots", *self._call.board.first(slots).tensors)

    def warm_up(self, lane: Lane) -> None:
        """Chooses kernels, compiles, records and times the calls of a lane, unless that is done."""
        if lane in self._warm:
            return
        self.leave()
        board = self.make_board(lane)
        with self._unet.choosing(self._kernels), torch.no_grad():
            tick(self._unet, False, *board.tensors)
        if self._backend is None:
            return
        compiled = self._compile(lane, board)
        if not all(each.is_compiled for each in compiled.values()):
            # Of all that is in there, these kernels are the likeliest to have no way through.
            self._unet.attend_by_default()
            compiled = self._compile(lane, board)
        self._warm[lane] = _Call(board, Feeder(board), compiled)
        self._to_compile.add(lane)
        if self._device.type == "cuda" and len(compiled) == len(mode.ALL):
            seconds = {way: _time(each) for way, each in compiled.items()}
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

    def make_board(self, lane: Lane, slots: int | None = None) -> Board:
        shape = (self._channels, lane.height // self._vae_factor, lane.width // self._vae_factor)
        return make_board(
            self._unet,
            slots or self.slots,
            shape,
            lane.tokens,
            self._device,
            is_masked=lane.is_masked,
        )

    def _compile(self, lane: Lane, board: Board) -> dict[mode.Way, Compiled]:
        compiled = {}
        for way in self._compiled_ways:
            compiled[way] = Compiled(
                f"the UNet for {self.slots} slots of {lane.width}x{lane.height} ({way})",
                tick,
                (self._unet, way == "slots", *board.tensors),
                backend=self._backend,
                pool=self._pool,
            )
            compiled[way]()
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
