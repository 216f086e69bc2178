"""Finds near-duplicates among the kept images of a campaign (point 5 of `keeping.rule`)."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

#: Bits of a perceptual hash.
HASH_BITS = 64


class Hashed(NamedTuple):
    """A kept image that may be a near-duplicate of others: its place among all of its campaign."""

    rank: float
    id: str
    #: Its perceptual hash.
    bits: int
    distinct: int


def near_duplicates(images: Iterable[Hashed]) -> dict[Hashed, str]:
    """The images that are dropped as near-duplicates, each with the id of the other's job."""
    ranked = sorted(images)
    parts = max((image.distinct for image in ranked), default=0) + 1
    width = -(-HASH_BITS // parts)
    better: dict[tuple[int, int], list[Hashed]] = defaultdict(list)
    found: dict[Hashed, str] = {}
    for image in ranked:
        # Hashes that differ in fewer bits than there are parts have one part in common.
        keys = [
            (part, image.bits >> part * width & (1 << width) - 1)
            for part in range(parts)
        ]
        for other in (each for key in keys for each in better[key]):
            if (other.bits ^ image.bits).bit_count() <= image.distinct:
                found[image] = other.id
                break
        for key in keys:
            better[key].append(image)
    return found
