"""LoCons and other changes of layers whose weights slots hold no copy of."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from calls import watch_calls
from drawing import ROUNDING, assert_alike, difference, draw, draw_alone, make_request
from worker.engine import contract
from worker.engine.lora.file import adaptable_layers
from worker.engine.lora.merge import NO_CHANGES
from worker.engine.networks.convolution import LowRankChange, SlotChanges
from worker.engine.networks.transformer import Call
from worker.engine.slots import engine as slots

pytestmark = pytest.mark.slow


Write = Callable[..., contract.Lora]


def strong(
    shape: torch.Size, rank: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """A LoCon's tensors for a layer: as large a change as the weights themselves, or a third."""
    outer, inner, *kernel = shape
    down = torch.randn((rank, inner, *kernel), generator=generator)
    up = torch.randn((outer, rank, *[1] * len(kernel)), generator=generator)
    return {
        "lora_down.weight": down / down[0].numel() ** 0.5,
        "lora_up.weight": 0.3 * up / rank**0.5,
    }


@pytest.fixture
def write_lora(slot_engine: slots.SlotEngine, tmp_path) -> Write:
    """Writes a LoRA on the given layers of the UNet, by default all that are no linear ones."""

    def write(
        *paths: str,
        rank: int = 3,
        seed: int = 0,
        weight: float = 1.0,
        make: Any = strong,
    ) -> contract.Lora:
        generator = torch.Generator().manual_seed(seed)
        layers = adaptable_layers(slot_engine.checkpoint.unet)
        tensors = {
            f"lora_unet_{path.replace('.', '_')}.{part}": tensor
            for path in paths or sorted(every_path(slot_engine))
            for part, tensor in make(layers[path].weight.shape, rank, generator).items()
        }
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
        save_file(tensors, file)
        return contract.Lora(file.stem, file, 0.0, weight)

    return write


def every_path(engine: slots.SlotEngine) -> set[str]:
    return set(itertools.chain.from_iterable(engine._unet.changes.groups.values()))


def test_slots_can_hold_a_change_of_every_layer_of_the_unet(
    slot_engine: slots.SlotEngine,
):
    held = [path for paths in slot_engine._unet.groups.values() for path in paths]
    changed = [
        path for paths in slot_engine._unet.changes.groups.values() for path in paths
    ]
    assert sorted(held + changed) == sorted(
        adaptable_layers(slot_engine.checkpoint.unet)
    )


@pytest.mark.parametrize(
    "path",
    [
        "conv_in",
        "conv_out",
        "time_embedding.linear_1",
        "time_embedding.linear_2",
        "down_blocks.0.resnets.0.conv1",  # computed for both rows of a slot at once
        "down_blocks.0.downsamplers.0.conv",
        "up_blocks.1.resnets.1.conv_shortcut",
        "mid_block.resnets.1.conv2",
        "mid_block.resnets.0.time_emb_proj",
        "up_blocks.1.resnets.1.time_emb_proj",
        "up_blocks.0.upsamplers.0.conv",
    ],
)
@pytest.mark.parametrize(("height", "tiles"), [(8, False), (9, False), (9, True)])
def test_a_slots_own_change_of_a_layer_computes_what_merging_it_does(
    slot_engine: slots.SlotEngine,
    write_lora: Write,
    path: str,
    height: int,
    tiles: bool,
):
    """A height of 9 is odd, so that upsamplers cut what they double."""
    unet = slot_engine._unet
    prepared = slot_engine.prepare(make_request(loras=(write_lora(path, weight=2.0),)))
    packed = prepared.packs["unet"]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((3, 4, height, 8), generator=generator)
    context = torch.randn((6, 2, unet.context_width), generator=generator)
    arguments = (x, torch.tensor([1.0, 500.0, 900.0]))
    with torch.no_grad():
        unet.use_block(0, len(x))  # whatever lane has drawn before
        unet.changes.grow(packed.ranks.items())
        for slot, changes in enumerate(
            [NO_CHANGES, packed.of(packed.assemble()), NO_CHANGES]
        ):
            unet.load_slot(slot, changes)
        own = unet(*arguments, Call(context, per_slot=True, slots=len(x), tiles=tiles))
        plain = unet(*arguments, Call(context, tiles=tiles))
        slot_engine._merger.activate(prepared.loras["unet"])
        merged = unet(*arguments, Call(context, tiles=tiles))
        slot_engine._merger.activate(())
    assert (merged - plain).abs().max() > 0.02
    expected = torch.cat([plain[:2], merged[2:4], plain[4:]])
    torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)


def test_each_of_several_locons_draws_its_own_image_in_any_slot_and_company(
    slot_engine: slots.SlotEngine,
    engine,
    write_lora: Write,
    styles: list[contract.Lora],
):
    one = write_lora(rank=5)
    other = write_lora(rank=2, seed=1, weight=-0.7)
    style, *_ = styles
    loras = [(one,), (other, style), (), (style,), (one, other), ()]
    requests = [
        make_request(seed=seed, loras=each, steps=2 + seed % 3)
        for seed, each in enumerate(loras)
    ]
    alone = draw_alone(engine, requests)
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 4, 0, 2, 1]):
        images = draw(slot_engine, *(requests[at] for at in order))
        for at, image in zip(order, images, strict=True):
            assert difference(image, alone[at]) <= ROUNDING, (order, at)


@pytest.mark.parametrize("blocks", [1, 2])
def test_locons_of_two_sizes_take_turns(
    make_slot_engine,
    engine,
    write_lora: Write,
    blocks: int,
):
    """Both lanes' changes are in the same memory, or in blocks of their own that grow together."""
    path = "mid_block.resnets.0.conv1"
    small = write_lora(path, rank=4)
    large = write_lora(path, rank=17, seed=1)
    ours = make_slot_engine(slots=2, blocks=blocks)
    requests = [
        make_request(seed=1, loras=(small,), steps=6),
        make_request(seed=2, steps=3),
        make_request(seed=3, loras=(small,), steps=7, width=72),
        make_request(seed=4, steps=2, width=72),
        make_request(seed=5, loras=(large,), steps=4, width=72),
    ]
    images = draw(ours, *requests)
    assert_alike(images, draw_alone(engine, requests))


def test_a_block_that_memory_is_too_short_for_is_not_the_one_in_use(monkeypatch):
    """The engine takes up the same block again, after it has freed memory elsewhere."""
    change = LowRankChange({"a": torch.nn.Linear(2, 2)})
    changes = SlotChanges([change], torch.zeros(1))
    changes.resize(1)
    changes.grow([(change.shape, 1)])
    monkeypatch.setattr(torch.Tensor, "new_zeros", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        changes.use_block(1)
    assert changes.block == (0, None)


def test_no_trace_of_a_slots_last_locon_is_left(
    make_slot_engine,
    write_lora: Write,
    styles: list[contract.Lora],
    monkeypatch,
):
    engine = make_slot_engine(slots=2)
    calls = watch_calls(monkeypatch, engine)
    mixed = [make_request(seed=seed, loras=(styles[seed],)) for seed in range(2)]
    before = draw(engine, *mixed)
    strong = write_lora(weight=3.0)
    weak = write_lora(seed=1, weight=0.01)
    # Both slots hold one; then a slot holds none, in calls with another's.
    draw(
        engine,
        make_request(loras=(strong,)),
        make_request(seed=2, loras=(weak, strong)),
    )
    calls.clear()
    beside, _ = draw(engine, mixed[0], make_request(loras=(weak,)))
    assert {call.mode for call in calls} == {"per_slot_convolutions"}
    assert difference(beside, before[0]) <= ROUNDING
    calls.clear()
    for image, expected in zip(draw(engine, *mixed), before, strict=True):
        assert difference(image, expected) == 0
    assert "per_slot_convolutions" not in {call.mode for call in calls}


def test_memory_is_taken_at_the_first_locon_and_grows_with_the_rank(
    make_slot_engine,
    engine,
    write_lora: Write,
):
    ours = make_slot_engine(slots=2)
    path = "mid_block.resnets.0.conv1"
    before = ours._unet.slot_bytes
    draw(ours, make_request(steps=1), make_request(steps=1, seed=2))
    assert ours._unet.slot_bytes == before
    assert not ours._unet.changes.exist
    long = make_request(steps=5, loras=(write_lora(path, rank=4),))
    requests = [long, make_request(steps=1, seed=2), make_request(steps=4, seed=3)]
    draw(ours, *requests)
    size = ours._unet.slot_bytes - before
    assert size > 0
    # The memory is replaced while a slot is using it.
    requests[2] = make_request(steps=4, seed=3, loras=(write_lora(path, rank=17),))
    images = draw(ours, *requests)
    assert ours._unet.slot_bytes == before + 2 * size
    assert_alike(images, draw_alone(engine, requests))


def _dora(
    shape: torch.Size, rank: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    return {
        **strong(shape, rank, generator),
        "dora_scale": torch.ones(shape[0], 1, 1, 1),
    }


@pytest.mark.parametrize(("make", "rank"), [(_dora, 3), (strong, 129)])
def test_a_change_that_is_not_of_low_rank_is_merged_instead(
    slot_engine: slots.SlotEngine,
    engine,
    write_lora: Write,
    monkeypatch,
    make,
    rank: int,
):
    lora = write_lora("down_blocks.1.resnets.0.conv2", rank=rank, make=make)
    request = make_request(loras=(lora,), steps=3)
    calls = watch_calls(monkeypatch, slot_engine)
    image, _ = draw(slot_engine, request, make_request(seed=2, steps=3))
    assert "shared" in {call.mode for call in calls}
    assert difference(image, draw(engine, request)[0]) <= ROUNDING


def test_loras_of_one_job_add_up_to_at_most_the_highest_rank(
    slot_engine: slots.SlotEngine, write_lora: Write
):
    path = "down_blocks.1.resnets.0.conv2"
    one = write_lora(path, rank=64)
    other = write_lora(path, rank=64, seed=1)
    fits = slot_engine.prepare(make_request(loras=(one, other)))
    assert list(fits.packs["unet"].ranks.values()) == [128]
    more = (one, other, write_lora(path, rank=1, seed=2))
    assert "unet" not in slot_engine.prepare(make_request(loras=more)).packs


def test_a_job_runs_beside_others_when_memory_runs_out_for_its_change(
    make_slot_engine,
    engine,
    write_lora: Write,
    monkeypatch,
):
    ours = make_slot_engine(slots=4)
    allocate = torch.Tensor.new_zeros

    def new_zeros(self: torch.Tensor, size: Any, **options: Any) -> torch.Tensor:
        if size[0] > 2 and len(size) == 2:
            raise torch.OutOfMemoryError("the card is full")
        return allocate(self, size, **options)

    monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros)
    lora = write_lora()
    requests = [
        make_request(seed=seed, loras=(lora,) * (seed == 1)) for seed in range(4)
    ]
    images = draw(ours, *requests)
    assert ours.slots == 2
    assert_alike(images, draw_alone(engine, requests))
