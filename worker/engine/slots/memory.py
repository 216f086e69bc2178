"""The number of slots that fit a GPU's memory."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from imagefleet.errors import SetupError
from imagefleet.telemetry import host
from imagefleet.telemetry.logs import log

#: Storage of LoRAs of the transformers' layers: merged into a copy of the layers in each slot; or
#: into the layers themselves, of which the only slot's are loaded again from the host's memory for
#: other LoRAs.
SlotWeights = Literal["merged", "reloaded"]

#: Each slot its own weights; one set for all, the checkpoint's own or with LoRAs merged in; or each
#: slot its own weights and its own changes of convolutions, while a job in any slot has some.
WeightMode = Literal["per_slot", "shared", "per_slot_convolutions"]

#: Each computes what those before it do, and takes longer.
WEIGHT_MODES: tuple[WeightMode, ...] = ("shared", "per_slot", "per_slot_convolutions")

#: The most slots: above 16, SD1.5 at 512x512 gains nothing on the fastest card measured (14.3
#: images/s at 16, 14.5 at 32), while each slot costs 0.5 GB and every image takes longer.
MAX_SLOTS = 16

#: Images per VAE call; four are as fast as more.
MAX_DECODED = 4

#: The VAE's share of the free memory: room for another image there costs a slot.
_DECODING_SHARE = 0.125

#: Slots on a CPU, where parallel rows gain little; a few keep a small model's cores busy.
CPU_SLOTS = 4

#: What a lane with weights of its own takes, of what its slots hold: contexts of long prompts too.
_LANE_SHARE = 1.1

#: The next jobs' share of what is left then. Images that started together finish together: where a
#: LoRA for each slot is on the device by then, none is waited for.
_STAGED_SHARE = 0.25

#: Weights that are merged: their share of the margin.
_TEMPORARY_SHARE = 0.25

#: Share of the free memory left for fragments, libraries' work space and other image sizes, and
#: for the first block's changes of convolutions: 0.3 GB with six slots.
_MARGIN = 0.12

#: Sizes beside the native one for which slots leave room; so few slots leave none: each is worth
#: more than a size that runs compiled.
_SIZES_TO_COME = 2
_SLOTS_WITHOUT_ROOM = 8

#: Slots that are kept when the memory was too short. One image fewer at once costs 1 or 2 %, and to
#: compile again a minute.
_KEPT_SHARE = 0.75

#: The host's free memory that is left beside the layers, for a round of jobs and their LoRAs.
_HOST_BYTES = 3 * 2**30

#: What a slot with weights of its own takes beside them, of these: SDXL's activations and contexts,
#: and twice what decoding an image takes.
_BESIDE_WEIGHTS = 0.9

#: What a tick, decoding in stripes and the next LoRAs take beside weights that all slots share, of
#: these: 1.8 GiB beside FLUX.2-klein's 7.4, an estimate.
_BESIDE_SHARED = 0.25

#: Above this share of the memory that the UNet and the VAE leave, text encoders stay on the CPU.
#: SDXL's have room on 12 GB beside a slot that is reloaded, and not on 8 GB.
_TEXT_SHARE = 0.3

#: Above this share of the free memory, an image is decoded in stripes; slots take none of it where
#: they are reloaded.
_WHOLE_SHARE = 0.25
_WHOLE_SHARE_RELOADED = 0.45


class Fit(NamedTuple):
    """Sizes that fit beside the model; at least one of each."""

    slots: int
    #: Images per VAE call.
    decoded: int
    #: Lanes that can have weights of their own.
    blocks: int
    #: Memory for the LoRAs of the next jobs.
    staged_bytes: int
    #: Memory for weights while they are merged.
    temporary_bytes: int


def fit(
    device: torch.device,
    slot_bytes: int,
    run: Callable[[], object],
    decode: Callable[[], object],
    slots: int | None = None,
    *,
    lane_bytes: int = 0,
    change_bytes: int = 0,
    is_compiled: bool = False,
    weights: SlotWeights = "merged",
    must_fit: bool = False,
    most_slots: int = MAX_SLOTS,
) -> Fit:
    """Measures what fits; *slots*, if given, is taken as it is.

    *slot_bytes* is what a slot holds for good, *lane_bytes* of it in each lane, and *change_bytes*
    more once jobs change convolutions, in blocks after the first; *run* is a tick of one slot and
    *decode* a VAE call with one image, whose peak memory is measured. *is_compiled*: ticks will be
    compiled. *weights* that are reloaded are one slot's. *must_fit* refuses a GPU on which one
    image of the native size would fail; *most_slots* are enough. Raises SetupError if one image
    does not fit.
    """
    try:
        tick_bytes, decode_bytes = (_peak_bytes(device, work) for work in (run, decode))
    except torch.cuda.OutOfMemoryError as error:
        raise SetupError(
            "the GPU's memory is too short for one image at the model's native size: use a GPU with"
            " more memory, or a smaller model"
        ) from error
    free = free_bytes(device)
    if must_fit and (needed := slot_bytes + max(tick_bytes, decode_bytes)) > free:
        raise SetupError(
            f"the GPU has {free / 2**30:.1f} GiB left beside the model, and one image at its native"
            f" size takes {needed / 2**30:.1f} GiB: use a GPU with more memory, or a smaller model"
        )
    decoded = max(1, min(MAX_DECODED, int(free * _DECODING_SHARE // decode_bytes)))

    def sizes_to_come(slots: int) -> float:
        """Each has a lane's tensors, and graphs with an image; the next job's LoRAs, too."""
        if not is_compiled or slots <= _SLOTS_WITHOUT_ROOM:
            return 0.0
        return slot_bytes + _SIZES_TO_COME * (slots * lane_bytes + decode_bytes)

    def left_by(slots: int) -> float:
        """Ticks of all lanes use the same memory in turn."""
        work = slots * tick_bytes, decoded * decode_bytes
        # Compiled, they share what CUDA graphs keep, and what else runs has as much beside it.
        taken = 2 * max(work) if is_compiled else sum(work)
        return free * (1 - _MARGIN) - slots * slot_bytes - taken

    numbers = range(most_slots, 1, -1)
    slots = slots or next(
        (each for each in numbers if left_by(each) >= sizes_to_come(each)), 1
    )
    left = left_by(slots)
    # LoRAs that change less than all weights of a slot take less than these.
    staged = _STAGED_SHARE * left
    if weights != "reloaded":
        staged = min(staged, slots * slot_bytes)
    staged_bytes = int(max(slot_bytes, staged))
    left -= staged_bytes
    blocks = 1
    if weights != "reloaded":
        blocks += max(
            0, int(left // (slots * (_LANE_SHARE * slot_bytes + change_bytes)))
        )
    gib = 2**30
    log.info(
        f"{slots} slots, {decoded} images per VAE call, weights for {blocks} sizes:"
        f" {free / gib:.2f} GiB free; a slot takes {slot_bytes / gib:.2f} GiB, its tick"
        f" {tick_bytes / gib:.2f} GiB, decoding an image {decode_bytes / gib:.2f} GiB",
        action="slots_chosen",
        slots=slots,
    )
    return Fit(
        slots, decoded, blocks, staged_bytes, int(_TEMPORARY_SHARE * _MARGIN * free)
    )


def fewer(slots: int) -> int:
    """Number of slots to try after *slots* ran out of memory; at least one."""
    return max(1, min(slots - 1, math.ceil(_KEPT_SHARE * slots)))


class Savings(NamedTuple):
    """Measures against a GPU memory that is short for a model."""

    weights: SlotWeights
    is_striped: bool
    has_text_on_cpu: bool


def describe(slots: int, savings: Savings) -> str:
    """Describes in words how a GPU holds a model."""
    saved = [
        (
            savings.weights == "reloaded",
            "layers are copied from the host's memory for other LoRAs",
        ),
        (savings.is_striped, "the VAE decodes in stripes"),
        (savings.has_text_on_cpu, "prompts are encoded on the CPU"),
    ]
    parts = ["1 image at once" if slots == 1 else f"{slots} images at once"]
    parts += [text for is_done, text in saved if is_done]
    return "; ".join(parts)


def choose_weights(
    device: torch.device, layer_bytes: int, *, is_large: bool = True
) -> SlotWeights:
    """Chooses how slots hold LoRAs of layers of *layer_bytes*; merged unless the model is large.

    A GPU that has no room for a copy takes them from the host. Raises SetupError if that has no
    room for them either.
    """
    if device.type != "cuda" or not is_large:
        return "merged"
    if _has_room(device, layer_bytes, _BESIDE_WEIGHTS):
        return "merged"
    needed = layer_bytes + _HOST_BYTES
    found = host.free_memory_bytes() or needed
    if found < needed:
        raise SetupError(
            "the GPU's memory is too short for a copy of the model's layers, which LoRAs are merged"
            f" into, and this machine has {found / 2**30:.1f} GiB of free memory of the"
            f" {needed / 2**30:.1f} GiB that reloading them takes: use a GPU or a machine with more"
            " memory, or a smaller model"
        )
    return "reloaded"


def has_no_room_for_originals(device: torch.device, layer_bytes: int) -> bool:
    """True if copies of the layers' original weights would take more than the margin."""
    return device.type == "cuda" and layer_bytes > _MARGIN * free_bytes(device)


def has_no_room_for_weights(device: torch.device, weight_bytes: int) -> bool:
    """True if a GPU cannot hold the weights that all slots share, and draw an image beside them."""
    return device.type == "cuda" and not _has_room(device, weight_bytes, _BESIDE_SHARED)


def _has_room(device: torch.device, weight_bytes: int, beside: float) -> bool:
    """True if weights fit, and what is *beside* them, as a share of theirs."""
    return free_bytes(device) * (1 - _MARGIN) >= weight_bytes * (1 + beside)


def has_no_room_for_text(
    device: torch.device,
    text_bytes: int,
    others_bytes: int = 0,
    share: float = _TEXT_SHARE,
) -> bool:
    """True if text encoders would take more than a *share* of what other networks leave of a GPU.

    On the CPU a prompt takes a second or so, while a small GPU takes several for its image.
    """
    is_gpu = device.type == "cuda"
    return is_gpu and text_bytes > share * (free_bytes(device) - others_bytes)


def is_too_large(
    device: torch.device, decode: Callable[[], object], weights: SlotWeights = "merged"
) -> bool:
    """True if a VAE call for one image takes more than its share of the memory."""
    share = _WHOLE_SHARE_RELOADED if weights == "reloaded" else _WHOLE_SHARE
    try:
        return _peak_bytes(device, decode) > share * free_bytes(device)
    except torch.cuda.OutOfMemoryError:
        return True


def free_bytes(device: torch.device) -> int:
    """Bytes that torch may still allocate: free on the card, within this process' limit."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(min(free, limit_bytes(device) - torch.cuda.memory_allocated(device)))


def limit_bytes(device: torch.device) -> float:
    """A card's memory, or this process' limit."""
    # Missing in older supported versions of torch; there, a limit only shows as out of memory.
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    return float(torch.cuda.mem_get_info(device)[1] * fraction(device))


def _peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    work()  # the first run also loads kernels
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
