import pytest
import torch

from imagefleet import errors
from imagefleet.telemetry import host
from worker.engine.slots import memory

pytestmark = pytest.mark.slow

GIB = 2**30


def set_free(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: int(free * GIB))


def find(
    monkeypatch: pytest.MonkeyPatch,
    free: float,
    slots: int | None = None,
    *,
    is_compiled: bool = False,
    weights: memory.SlotWeights = "merged",
    must_fit: bool = False,
    changes: float = 0.0,
) -> memory.Fit:
    """What fits *free* GiB beside SD1.5."""
    peaks = {"tick": 0.25 * GIB, "decode": 0.8 * GIB}
    monkeypatch.setattr(memory, "_peak_bytes", lambda _, work: peaks[work()])
    set_free(monkeypatch, free)
    return memory.fit(
        torch.device("cpu"),
        int(0.48 * GIB),
        lambda: "tick",  # type: ignore[arg-type,return-value]
        lambda: "decode",  # type: ignore[arg-type,return-value]
        slots,
        change_bytes=int(changes * GIB),
        is_compiled=is_compiled,
        weights=weights,
        must_fit=must_fit,
    )


@pytest.mark.parametrize(
    ("free", "slots", "decoded", "blocks"),
    [
        (135, 16, 4, 12),
        (75, 16, 4, 6),
        (21, 16, 3, 1),
        (13, 13, 2, 1),
        (5.2, 5, 1, 1),
        (0.5, 1, 1, 1),
    ],
)
def test_the_slots_fit_the_free_memory(
    monkeypatch, free: float, slots: int, decoded: int, blocks: int
):
    found = find(monkeypatch, free)
    assert found[:3] == (slots, decoded, blocks)
    staged = found.staged_bytes / GIB
    assert 0.47 < staged <= slots * 0.48
    used = slots * 0.73 + decoded * 0.8 + (blocks - 1) * slots * 0.48
    used += staged if blocks > 1 else 0
    used += found.temporary_bytes / GIB
    assert used <= free or slots == 1


def test_a_compiled_tick_keeps_more_memory_than_an_uncompiled_one_takes(
    monkeypatch,
):
    assert find(monkeypatch, 6, is_compiled=True).slots < find(monkeypatch, 6).slots
    assert find(monkeypatch, 80, is_compiled=True).slots == memory.MAX_SLOTS


def test_changes_of_convolutions_take_no_slot_and_have_room_in_all_lanes(
    monkeypatch,
):
    """SD1.5's take 46 MB per slot at rank 32: the first lane's fit the margin."""
    changes = 0.043
    for free in (5.2, 13, 21, 75, 135):
        plain = find(monkeypatch, free)
        found = find(monkeypatch, free, changes=changes)
        assert found._replace(blocks=plain.blocks) == plain
        assert found.slots * changes < 0.75 * memory._MARGIN * free
        used = (found.blocks - 1) * found.slots * (0.48 + changes) + found.slots * 0.73
        used += found.decoded * 0.8 + (
            found.staged_bytes / GIB if found.blocks > 1 else 0
        )
        assert used <= (1 - memory._MARGIN) * free
    assert found.blocks < plain.blocks


def test_slots_leave_room_for_the_tensors_and_graphs_of_sizes_that_come_later(
    monkeypatch,
):
    """Without it, three sizes of SDXL filled 80 GB, and a decode ran out of memory."""
    monkeypatch.setattr(memory, "_peak_bytes", lambda _, work: int(work() * GIB))

    def fit(free: float, decode: float = WHOLE) -> memory.Fit:
        set_free(monkeypatch, free)
        return memory.fit(
            torch.device("cpu"),
            int((COPY + CONTEXT) * GIB),
            lambda: TICK,
            lambda: decode,
            lane_bytes=int(CONTEXT * GIB),
            is_compiled=True,
        )

    for free in (68, 72, 80, 100, 139):
        found = fit(free)
        assert found.slots > 8
        # As much beside the recorded graphs runs uncompiled.
        taken = found.slots * (COPY + CONTEXT) + 2 * max(
            found.slots * TICK, found.decoded * WHOLE
        )
        taken += found.staged_bytes / GIB + found.temporary_bytes / GIB
        lanes = 2 * found.slots * CONTEXT
        assert taken + lanes + 2 * WHOLE <= free, (
            "two sizes more, each with graphs of its own"
        )
    assert fit(80, decode=2 * WHOLE).slots < fit(80).slots
    assert fit(15.5).slots == 2, "few slots are worth more"


def choose(
    monkeypatch: pytest.MonkeyPatch,
    free: float,
    *,
    host_gib: float = 12,
    device: str = "cuda:0",
) -> memory.SlotWeights:
    """How SDXL's slots hold LoRAs beside the model, with *free* GiB."""
    set_free(monkeypatch, free)
    monkeypatch.setattr(host, "free_memory_bytes", lambda: int(host_gib * GIB))
    return memory.choose_weights(torch.device(device), int(3.48 * GIB))


def test_a_host_without_room_for_the_layers_is_refused_before_the_first_job(
    monkeypatch,
):
    with pytest.raises(errors.SetupError, match=r"5\.0 GiB of free memory of the 6\.5"):
        choose(monkeypatch, 6, host_gib=5)
    assert choose(monkeypatch, 6, host_gib=0) == "reloaded", "not known"
    assert choose(monkeypatch, 17, host_gib=5) == "merged"


@pytest.mark.parametrize(
    ("free", "have_none"), [(132, False), (41, False), (17, True), (6, True)]
)
def test_copies_of_merged_layers_are_on_the_gpu_only_where_slots_leave_room_for_them(
    monkeypatch, free: float, have_none: bool
):
    """A campaign's jobs may all have one LoRA, which is then merged for all of them."""
    set_free(monkeypatch, free)
    gpu = torch.device("cuda", 0)
    assert memory.has_no_room_for_originals(gpu, int(3.48 * GIB)) == have_none
    assert not memory.has_no_room_for_originals(torch.device("cpu"), int(3.48 * GIB))


def test_running_out_of_memory_means_stripes_first_and_then_a_plain_error(
    monkeypatch,
):
    def fail(*_: object) -> int:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory, "_peak_bytes", fail)
    assert memory.is_too_large(torch.device("cpu"), lambda: None)
    with pytest.raises(errors.SetupError, match="one image at the model's native size"):
        memory.fit(torch.device("cpu"), 1, lambda: None, lambda: None, must_fit=True)


def test_a_gpu_that_cannot_hold_one_image_is_refused_before_the_first_job(
    monkeypatch,
):
    with pytest.raises(
        errors.SetupError, match=r"0.5 GiB left beside the model.* takes 1.3 GiB"
    ):
        find(monkeypatch, 0.5, must_fit=True)
    assert find(monkeypatch, 1.4, must_fit=True).slots == 1


#: SDXL in float16, GiB, measured on an H200: a slot's copies of linear layers, a tick of one slot,
#: and decoding an image; by its shape, a slot's keys and values of two prompts.
COPY = 3.57
TICK = 0.28
WHOLE = 1.88
CONTEXT = 0.055


def test_on_8_gb_sdxl_encodes_prompts_on_the_cpu_copies_layers_and_decodes_in_stripes(
    monkeypatch,
):
    model = int(5.15 * GIB)
    text = int(1.53 * GIB)
    gpu = torch.device("cuda", 0)
    for free, has_none in ((7.4, True), (11.1, False)):
        set_free(monkeypatch, free)
        assert memory.has_no_room_for_text(gpu, text, model) == has_none
    assert choose(monkeypatch, 2.2) == "reloaded"
    monkeypatch.setattr(memory, "_peak_bytes", lambda _, work: int(work() * GIB))
    assert memory.is_too_large(gpu, lambda: WHOLE)
