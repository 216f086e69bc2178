"""Parts of a slot engine that depend on its model's family."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from worker.engine.contract import Settings
from worker.engine.control.cache import ControlNets
from worker.engine.decoder import Decoder
from worker.engine.families.table import Model
from worker.engine.files.network_cache import NetworkCache
from worker.engine.lora.shared import Merger
from worker.engine.networks.transformer import SlotNetwork
from worker.engine.passes.checkpoints import CheckpointCache
from worker.engine.slots.prepare import Preparer
from worker.engine.slots.staging import Stager


@dataclass(frozen=True, slots=True)
class Parts:
    """Collaborators of a `SlotEngine`, built for one model's family."""

    model: Model
    settings: Settings
    unet: SlotNetwork
    preparer: Preparer
    control_nets: ControlNets
    #: The networks of files that jobs name.
    caches: Sequence[NetworkCache[Any]]
    #: None: it draws with its own alone.
    checkpoints: CheckpointCache | None
    stager: Stager
    merger: Merger
    decoder: Decoder
