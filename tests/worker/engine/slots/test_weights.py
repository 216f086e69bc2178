"""What the weights hold: another model's, nothing of the one before; a slot's that is reloaded."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import tiny_model
from drawing import ROUNDING, assert_alike, difference, draw, finish, make_request
from families import tiny_families
from packages import TracedPackages
from pixel import tiny_cascade
from worker.engine import contract, load
from worker.engine.checkpoint import load_checkpoint
from worker.engine.contract import Settings
from worker.engine.families.latents import of_latents
from worker.engine.lora.merge import LoraChanges
from worker.engine.networks.linear import ReloadedStack, SlotLinear, stack_by_shape
from worker.engine.networks.unet import SlotUnet
from worker.engine.slots import engine as slots

CPU = torch.device("cpu")


#: A change that is clearly seen.
VISIBLE = 20

#: What slots cannot hold: the magnitudes of a 3x3 convolution.
CONVOLUTION = "lora_unet_down_blocks_1_resnets_0_conv2"


def change_all_weights(source: Path, folder: Path) -> Path:
    """A model of the same architecture; returns its folder."""
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(5)
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        for key, tensor in tensors.items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensors[key] = tensor + (0.05 * noise * (1 + tensor.abs())).to(
                    tensor.dtype
                )
        save_file(tensors, path, {"format": "pt"})
    return folder


def two_models(folder: Path, family: tiny_families.FamilyName) -> tuple[Path, Path]:
    first = tiny_families.build(folder / "first", family)
    second = change_all_weights(first, folder / "second")
    if family == "sd2":  # the schedule is the model's own, too
        path = second / "scheduler" / "scheduler_config.json"
        config = json.loads(path.read_text()) | {"prediction_type": "v_prediction"}
        path.write_text(json.dumps(config))
    return first, second


def engine_of(folder: Path, **settings: Any) -> slots.SlotEngine:
    checkpoint = load_checkpoint(folder, CPU, torch.float32)
    return slots.SlotEngine(
        of_latents(checkpoint, Settings(**{"slots": 2, **settings}))
    )


def take(engine: slots.SlotEngine, folder: Path) -> None:
    assert load.read_beside(engine, load.EngineSettings(folder))()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("small", {"packages": TracedPackages()}),
        ("sd2", {}),
        ("sdxl", {"slot_weights": "reloaded"}),
    ],
)
@pytest.mark.slow
def test_an_engine_draws_the_images_of_the_model_that_it_took_and_then_of_its_own(
    tmp_path, small_model: Path, family, settings: dict[str, Any]
):
    if family == "small":
        first = small_model
        second = change_all_weights(first, tmp_path / "second")
    else:
        first, second = two_models(tmp_path, family)
    style = tiny_model.build_tiny_lora(tmp_path / "style.safetensors", first)
    lora = contract.Lora("style", style, 0.7, 0.9)
    small = partial(make_request, width=32, height=32)  # what the small one compiles
    requests = [
        small(seed=1, steps=2),
        small(seed=2, steps=2, loras=(lora,), height=40),
    ]
    # All slots with the same LoRA: it is merged into the shared weights, and must not stay there.
    alike = [small(seed=3, steps=5, loras=(lora,), prompt="a dog")] * 2

    def drawn_by(engine: slots.SlotEngine) -> list[Any]:
        return [*draw(engine, *requests), *draw(engine, *alike)]

    engine = engine_of(first, **settings)
    if "packages" in settings:
        engine.warm_up()
    alone = engine_of(second, **settings | {"packages": None})
    models = {first: engine, second: alone}
    expected = {folder: drawn_by(each) for folder, each in models.items()}
    sums = {folder: each.checkpoint.weight_sums for folder, each in models.items()}
    alone.close()
    assert difference(expected[first][0], expected[second][0]) > 20
    for folder in (second, first):
        take(engine, folder)
        assert engine.model_name == folder.name
        images = drawn_by(engine)
        if "slot_weights" not in settings:
            assert engine.weight_mode == "shared"
            assert engine._weights.merged
        assert_alike(images, expected[folder], within=1)
        assert engine.self_check.find_fault() is None
        assert engine.checkpoint.weight_sums == sums[folder]
    engine.close()


def test_a_model_is_not_taken_while_there_are_jobs(
    tmp_path, checkpoint: Path, make_slot_engine: Callable[..., slots.SlotEngine]
):
    second = shutil.copytree(checkpoint, tmp_path / "second")
    engine = make_slot_engine()
    engine.admit(0, engine.prepare(make_request()))
    assert not load.read_beside(engine, load.EngineSettings(second))()
    assert engine.model_name == checkpoint.name


def with_native_size(model: Path, folder: Path) -> Path:
    config = Path(shutil.copytree(model, folder)) / "unet" / "config.json"
    found = json.loads(config.read_text())
    config.write_text(json.dumps({**found, "sample_size": 2 * found["sample_size"]}))
    return folder


@pytest.mark.parametrize(
    "build",
    [
        lambda _, folder: tiny_families.build(folder, "sd2"),
        with_native_size,
        lambda _, folder: tiny_cascade.build(folder, "base"),
        lambda _, folder: folder,
    ],
    ids=["another family", "another native size", "a stage of a cascade", "no model"],
)
def test_a_model_of_another_architecture_needs_another_engine(
    tmp_path,
    build: Callable[[Path, Path], Path],
    checkpoint: Path,
    slot_engine: slots.SlotEngine,
):
    second = build(checkpoint, tmp_path / "second")
    assert load.read_beside(slot_engine, load.EngineSettings(second)) is None


@pytest.fixture(scope="module")
def styles(tmp_path_factory, checkpoint: Path) -> list[contract.Lora]:
    folder = tmp_path_factory.mktemp("styles")
    paths = [
        tiny_model.build_tiny_lora(
            folder / f"{seed}.safetensors", checkpoint, seed=seed
        )
        for seed in range(2)
    ]
    return [contract.Lora(path.stem, path, 0.7, 0.9) for path in paths]


@pytest.fixture
def engine(make_slot_engine: Callable[..., slots.SlotEngine]) -> slots.SlotEngine:
    return make_slot_engine(slot_weights="reloaded")


@pytest.fixture
def loads(monkeypatch) -> list[bool]:
    """Of each time that weights are loaded: whether with LoRAs."""
    seen = []
    original = SlotUnet.load_slot

    def load_slot(self: SlotUnet, slot: int, changes: LoraChanges) -> None:
        seen.append(bool(changes.stacked))
        original(self, slot, changes)

    monkeypatch.setattr(SlotUnet, "load_slot", load_slot)
    return seen


def draw_all(
    engine: slots.SlotEngine, requests: list[contract.ImageRequest]
) -> dict[int, Any]:
    """All admitted at once, in the order in which they are done."""
    for ticket, request in enumerate(requests):
        engine.admit(ticket, engine.prepare(request))
    return finish(engine)


def test_weights_are_not_loaded_again_for_the_loras_that_they_hold(
    engine: slots.SlotEngine,
    styles: list[contract.Lora],
    loads: list[bool],
):
    plain = ()
    (one, other) = styles
    for loras, expected in [
        (plain, [False]),
        (plain, []),
        ((one,), [True]),
        ((one,), []),
        ((other,), [True]),
        (plain, [False]),
    ]:
        loads.clear()
        draw(engine, *[make_request(seed=at, steps=1, loras=loras) for at in (1, 2)])
        assert loads == expected


def test_a_job_with_the_loras_that_are_loaded_goes_before_an_older_one_but_not_for_ever(
    engine: slots.SlotEngine,
    styles: list[contract.Lora],
    loads: list[bool],
):
    own, other = ((style,) for style in styles)
    requests = [make_request(steps=1, loras=each) for each in (own, other)]
    requests += [make_request(steps=1, loras=own) for _ in range(20)]
    order = list(draw_all(engine, requests))
    assert sorted(order) == list(range(22))
    assert 2 <= order.index(1) <= 8
    assert loads == [True, True, True], "own, the other one, own again"


def test_what_slots_cannot_hold_is_merged_below_the_slot_and_undone(
    engine: slots.SlotEngine,
    make_slot_engine: Callable[..., slots.SlotEngine],
    styles: list[contract.Lora],
    tmp_path,
):
    layer = engine.checkpoint.unet.get_submodule("down_blocks.1.resnets.0.conv2")
    generator = torch.Generator().manual_seed(3)
    change = 0.3 * torch.randn(layer.weight.shape, generator=generator)
    path = tmp_path / "full.safetensors"
    save_file({f"{CONVOLUTION}.diff": change}, path)
    full = contract.Lora("full", path, 1.0, 1.0)
    plain = make_request()
    styled = make_request(loras=(styles[0],))
    merged = make_request(loras=(full, styles[0]))
    assert "unet" not in engine.prepare(merged).packs
    before = draw(engine, plain, styled)
    (changed,) = draw(engine, merged)
    assert engine.weight_mode == "shared"
    assert difference(changed, draw(make_slot_engine(), merged)[0]) <= ROUNDING
    assert difference(changed, before[1]) > VISIBLE
    assert_alike(draw(engine, plain, styled), before, within=0)
    assert engine.self_check.find_fault() is None


def test_weights_that_could_not_be_loaded_are_loaded_again(
    engine: slots.SlotEngine,
    styles: list[contract.Lora],
    monkeypatch,
):
    requests = [make_request(loras=(styles[0],)), make_request(seed=2)]
    sound = draw(engine, *requests)
    original = ReloadedStack.load
    failed = []

    def load(self: ReloadedStack, *arguments: Any) -> None:
        original(self, *arguments)
        if not failed:  # the first stack is loaded then, the others are not
            failed.append(self)
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ReloadedStack, "load", load)
    engine._runner._may_compile = True  # what is given up first
    images = draw(engine, *requests)
    assert failed
    assert_alike(images, sound, within=0)


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_bit_that_flips_is_found_where_the_layers_compute_and_in_the_hosts_memory(
    engine: slots.SlotEngine,
    styles: list[contract.Lora],
    place: str,
):
    check = engine.self_check
    draw(engine, make_request(loras=(styles[0],)))
    assert check.find_fault() is None, "LoRAs do not count"
    stack = next(
        each
        for each in engine._unet._stacks.values()
        if isinstance(each, ReloadedStack)
    )
    damaged = stack.shared if place == "host" else stack._own
    if place == "host":
        draw(engine, make_request(loras=(styles[0],)))  # loaded again from there
    damaged.view(torch.int32)[0, 0, 0] ^= 1 << 20
    assert "not the checkpoint's" in str(check.find_fault())


def test_a_check_of_the_weights_leaves_images_in_flight_as_they_are(
    engine: slots.SlotEngine, styles: list[contract.Lora]
):
    request = make_request(loras=(styles[0],))
    (expected,) = draw(engine, request)
    engine.admit(0, engine.prepare(request))
    engine.tick()
    assert engine.self_check.find_fault() is None
    assert (finish(engine)[0] == expected).all()


def test_the_layers_of_a_model_are_once_on_the_device_and_once_in_the_hosts_memory():
    layers = {str(number): torch.nn.Linear(4, 6) for number in range(3)}
    expected = [layer.weight.clone() for layer in layers.values()]
    linears = [SlotLinear({name: layer}) for name, layer in layers.items()]
    (stack,) = stack_by_shape(ReloadedStack, "slots", linears).values()
    for at, (layer, linear) in enumerate(zip(layers.values(), linears, strict=True)):
        assert layer.weight.data_ptr() == stack.shared[at].data_ptr()
        assert (
            linear.slots.data_ptr()
            == linear.weight.data_ptr()
            != layer.weight.data_ptr()
        )
        assert (linear.weight == expected[at]).all()
    with pytest.raises(ValueError, match="2 slots"):
        stack.resize(2)
