"""How many slots a GPU has room for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

log = logging.getLogger(__name__)

#: Above 16, SD1.5 at 512x512 gains nothing any more on the fastest card measured (14.3 images a
#: second at 16, 14.5 at 32), while each slot costs 0.5 GB and every image waits longer.
MOST_SLOTS = 16

#: Images that the VAE decodes in one call at most; it is as fast with four as with more.
MOST_DECODED = 4

#: Of the free memory, for the VAE: a decoding slot for each further image costs a drawing one.
_DECODING_SHARE = 0.125

#: On a CPU, rows side by side gain little; a few keep a small model's cores busy.
CPU_SLOTS = 4

#: Left free, of what is free at the start: fragments, libraries' work space, other sizes.
_MARGIN = 0.12


@dataclass(frozen=True, slots=True)
class Room:
    """What a GPU's memory holds beside the model: at least one of each."""

    slots: int
    decoded: int
    """Images decoded in one call."""


def find_room(
    device: torch.device, slot_bytes: int, run: Callable[[], None], decode: Callable[[], None]
) -> Room:
    """Measures the room beside the model.

    *slot_bytes* is what a slot holds for good; *run* ticks one slot and *decode* decodes one
    image, so that what they take for a moment is measured.
    """
    tick_bytes, decode_bytes = (_peak_bytes(device, work) for work in (run, decode))
    free = free_bytes(device)
    decoded = max(1, min(MOST_DECODED, int(free * _DECODING_SHARE // decode_bytes)))
    room = free * (1 - _MARGIN) - decoded * decode_bytes
    slots = max(1, min(MOST_SLOTS, int(room // (slot_bytes + tick_bytes))))
    log.info(
        "%d slots, %d images decoded at once: %.2f GiB are free; a slot takes %.2f, its tick %.2f,"
        " an image's decoding %.2f",
        slots,
        decoded,
        *(size / 2**30 for size in (free, slot_bytes, tick_bytes, decode_bytes)),
        extra={"action": "slots_chosen", "slots": slots},
    )
    return Room(slots, decoded)


def free_bytes(device: torch.device) -> int:
    """What torch may still take: free on the card, within the limit set for this process."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # Not in every torch that is supported; there, a limit shows as memory that runs out.
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    limit = total * fraction(device)
    return int(min(free, limit - torch.cuda.memory_allocated(device)))


def _peak_bytes(device: torch.device, work: Callable[[], None]) -> int:
    work()  # the first run also loads kernels
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
