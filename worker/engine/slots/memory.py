"""The number of slots that fit a GPU's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

log = logging.getLogger(__name__)

#: Above 16, SD1.5 at 512x512 gains nothing on the fastest card measured (14.3 images/s at 16, 14.5
#: at 32), while each slot costs 0.5 GB and every image takes longer.
MAX_SLOTS = 16

#: Images per VAE call; four are as fast as more.
MAX_DECODED = 4

#: The VAE's share of the free memory: room for another image there costs a slot.
_DECODING_SHARE = 0.125

#: On a CPU, parallel rows gain little; a few keep a small model's cores busy.
CPU_SLOTS = 4

#: What a lane with weights of its own takes, of what its slots hold: contexts of long prompts too.
_LANE_SHARE = 1.1

#: The next jobs' share of what is left then. Images that started together finish together: where a
#: LoRA for each slot is on the device by then, none is waited for.
_STAGED_SHARE = 0.25

#: Weights that are merged: their share of the margin.
_TEMPORARY_SHARE = 0.25

#: Share of the free memory left for fragments, libraries' work space and other image sizes.
_MARGIN = 0.12


class Fit(NamedTuple):
    """What fits beside the model; at least one of each."""

    slots: int
    decoded: int
    """Images per VAE call."""
    blocks: int
    """Lanes that can have weights of their own."""
    staged_bytes: int
    """For LoRAs of the next jobs."""
    temporary_bytes: int
    """For weights while they are merged."""


def fit(
    device: torch.device,
    slot_bytes: int,
    run: Callable[[], object],
    decode: Callable[[], object],
    slots: int | None = None,
) -> Fit:
    """Measures what fits; *slots*, if given, is taken as it is.

    *slot_bytes* is what a slot holds for good; *run* is a tick of one slot and *decode* a VAE call
    with one image, whose peak memory is measured.
    """
    tick_bytes, decode_bytes = (_peak_bytes(device, work) for work in (run, decode))
    free = free_bytes(device)
    decoded = max(1, min(MAX_DECODED, int(free * _DECODING_SHARE // decode_bytes)))
    room = free * (1 - _MARGIN) - decoded * decode_bytes
    slots = slots or max(1, min(MAX_SLOTS, int(room // (slot_bytes + tick_bytes))))
    # Ticks of all lanes use the same memory in turn.
    left = room - slots * (slot_bytes + tick_bytes)
    # LoRAs that change less than all weights of a slot take less than these.
    staged_bytes = int(max(slot_bytes, min(_STAGED_SHARE * left, slots * slot_bytes)))
    left -= staged_bytes
    blocks = 1 + max(0, int(left // (_LANE_SHARE * slots * slot_bytes)))
    log.info(
        "%d slots, %d images per VAE call, weights for %d sizes: %.2f GiB free; a slot takes"
        " %.2f GiB, its tick %.2f GiB, decoding an image %.2f GiB",
        slots,
        decoded,
        blocks,
        *(size / 2**30 for size in (free, slot_bytes, tick_bytes, decode_bytes)),
        extra={"action": "slots_chosen", "slots": slots},
    )
    return Fit(slots, decoded, blocks, staged_bytes, int(_TEMPORARY_SHARE * _MARGIN * free))


def free_bytes(device: torch.device) -> int:
    """What torch may still allocate: free on the card, within this process' limit."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # Missing in older supported versions of torch; there, a limit only shows as out of memory.
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    limit = total * fraction(device)
    return int(min(free, limit - torch.cuda.memory_allocated(device)))


def _peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    work()  # the first run also loads kernels
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
