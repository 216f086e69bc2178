"""What kept images cost where only a share of the drawn ones is kept, judged before or after."""

from dataclasses import dataclass, replace

from fleet.plan.estimate import BatchPlan
from imagefleet.pricing import prices
from imagefleet.storage.protocol import Operations

#: GPU time that judging adds, as a share of drawing: CLIP ViT-L/14 on a 512x512 image takes 0.6 %
#: of the operations of 15 steps of SD1.5, and some ticks wait for it.
SCORING = 0.02


@dataclass(frozen=True, slots=True)
class KeptPlan:
    """Dollars with a month of storing what is stored, and kept images per dollar."""

    images: int
    dollars: float
    images_per_dollar: float
    stored_first_images_per_dollar: float


def of_plan(plan: BatchPlan, table: prices.PriceTable, share: float) -> KeptPlan:
    """The plan of a judged batch of PNGs, of which a *share* is kept.

    Stored first, each image is written, kept for a month, and read once to be judged.
    """
    operations = plan.storage_operations
    month = plan.storage_month_dollars["png"]
    writes = operations.blob_writes
    read = table.storage.dollars(Operations(blob_reads=writes))
    scoring = SCORING * plan.gpu_dollars
    stored_first = plan.dollars + read + month + scoring
    if writes >= plan.images:  # an image is a write of its own, in no pack
        operations = replace(operations, blob_writes=round(writes * share))
    storage = table.storage.dollars(operations) + month * share
    dollars = plan.gpu_dollars + scoring + storage
    images = round(plan.images * share)
    return KeptPlan(images, dollars, images / dollars, images / stored_first)
