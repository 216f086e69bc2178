"""What kept images cost where only a share of the drawn ones is kept, judged before or after."""

from dataclasses import dataclass, replace

from fleet.plan.estimate import BatchPlan
from imagefleet.pricing import prices

#: GPU time that judging adds, as a share of drawing: CLIP ViT-L/14 on a 512x512 image takes 0.6 %
#: of the operations of 15 steps of SD1.5, and some ticks wait for it.
SCORING = 0.02


@dataclass(frozen=True, slots=True)
class KeptPlan:
    """Dollars with a month of storing what is stored, and kept images per dollar."""

    share: float
    images: int
    dollars: float
    images_per_dollar: float
    stored_first_dollars: float
    stored_first_images_per_dollar: float

    @property
    def ratio(self) -> float:
        """Kept images per dollar, over those of a campaign that is stored and then judged."""
        return self.images_per_dollar / self.stored_first_images_per_dollar


def of_plan(
    plan: BatchPlan, table: prices.PriceTable, share: float, *, is_bundled: bool
) -> KeptPlan:
    """The plan of a judged batch of PNGs; *is_bundled*: an image is no write of its own.

    Stored first, each image is written, kept for a month, and read once to be judged.
    """
    operations = plan.storage_operations
    month = plan.storage_month_dollars["png"]
    read = replace(
        operations, queue=0, blob_writes=0, blob_reads=operations.blob_writes
    )
    scoring = SCORING * plan.gpu_dollars
    stored_first = plan.dollars + table.storage.dollars(read) + month + scoring
    if not is_bundled:
        writes = round(operations.blob_writes * share)
        operations = replace(operations, blob_writes=writes)
    storage = table.storage.dollars(operations) + month * share
    dollars = plan.gpu_dollars + scoring + storage
    images = round(plan.images * share)
    return KeptPlan(
        share=share,
        images=images,
        dollars=dollars,
        images_per_dollar=images / dollars,
        stored_first_dollars=stored_first,
        stored_first_images_per_dollar=images / stored_first,
    )
