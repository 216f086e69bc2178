"""What a slot engine is made of that its model's family decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.engine.control.held import ControlNets
from worker.engine.decoder import Decoder
from worker.engine.families.table import Model
from worker.engine.kernels.compile import GraphPool
from worker.engine.lora.merge import Merger
from worker.engine.networks.transformer import SlotNetwork, SlotState
from worker.engine.slots.memory import WEIGHT_MODES, SlotWeights, WeightMode
from worker.engine.slots.prepare import Preparer
from worker.engine.slots.queue import Costs
from worker.engine.slots.staging import Stager

Tick = Callable[[Any, WeightMode, SlotState, Any], None]
"""One call of the network and one sampler step of all slots, in place, with weights as the mode
says and the states of the lane's ControlNets; a plain function, since it is compiled."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How an engine draws, whatever its model."""

    slots: int | None = None
    """Images drawn at once; None fits them to the GPU's memory."""
    blocks: int | None = None
    """How many lanes may have slots' weights of their own; None fits them as well."""
    slot_weights: SlotWeights | None = None
    """How slots hold LoRAs, None decides by the memory; "reloaded" is one slot's."""
    backend: str | None = None
    """torch.compile's, None for no compilation."""
    compiled_modes: Sequence[WeightMode] = WEIGHT_MODES
    """The modes that the UNet is compiled for, in this order."""
    taesd: Path | None = None
    """A folder with an AutoencoderTiny, which decodes what is not to be decoded by the VAE."""
    is_unguided: bool = False
    """Whether most images are drawn without guidance."""
    queue_seconds: Callable[[], float | None] = lambda: None
    """For how long the queue's jobs will last; None if unknown. It decides what is compiled."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What differs from family to family, for `SlotEngine` to draw with."""

    model: Model
    settings: Settings
    unet: SlotNetwork
    tick: Tick
    preparer: Preparer
    control_nets: ControlNets
    stager: Stager
    merger: Merger
    decoder: Decoder
    pool: GraphPool | None
    costs: Costs
    """Guesses, until ticks and merging have been timed."""
