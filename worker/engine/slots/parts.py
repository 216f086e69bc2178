"""Parts of a slot engine that depend on its model's family."""

from dataclasses import dataclass

from worker.engine.contract import Settings
from worker.engine.decoder import Decoder
from worker.engine.families.table import Model
from worker.engine.lora.shared import Merger
from worker.engine.networks.transformer import SlotNetwork
from worker.engine.passes.checkpoints import Caches
from worker.engine.slots.prepare import Preparer
from worker.engine.slots.staging import Stager


@dataclass(frozen=True)
class Parts:
    """Collaborators of a `SlotEngine`, built for one model's family."""

    model: Model
    settings: Settings
    unet: SlotNetwork
    preparer: Preparer
    caches: Caches
    stager: Stager
    merger: Merger
    decoder: Decoder
