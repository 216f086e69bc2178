"""Files of ControlNets: each spelling is read, and what does not fit is refused by name."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel
from safetensors.torch import load_file, save_file

import key_names
from drawing import difference, draw, make_request
from families import tiny_controlnets, tiny_families
from imagefleet import errors
from worker.engine.control import cache
from worker.engine.networks.transformer import Call

pytestmark = pytest.mark.slow

ROUNDING = 1


def original_layout(
    tensors: dict[str, torch.Tensor], prefix: str, layers: int = 1
) -> dict[str, torch.Tensor]:
    """A ControlNet in the original names, with blocks of *layers* layers."""
    names = key_names.unet_names(layers) | {
        "add_embedding.linear_1.": "label_emb.0.0.",
        "add_embedding.linear_2.": "label_emb.0.2.",
        "controlnet_mid_block.": "middle_block_out.0.",
        "controlnet_cond_embedding.conv_in.": "input_hint_block.0.",
        "controlnet_cond_embedding.conv_out.": "input_hint_block.14.",
    }
    names |= {
        f"controlnet_cond_embedding.blocks.{at}.": f"input_hint_block.{2 * at + 2}."
        for at in range(6)
    }
    names |= {
        f"controlnet_down_blocks.{at}.": f"zero_convs.{at}.0." for at in range(12)
    }
    renamed = {}
    for key, tensor in tensors.items():
        start = next(name for name in names if key.startswith(name))
        renamed[prefix + names[start] + key.removeprefix(start)] = tensor
    return renamed


@pytest.fixture(scope="module")
def tensors(make_control) -> dict[str, torch.Tensor]:
    return load_file(make_control().path)


@pytest.fixture
def write(tmp_path, make_control) -> Any:
    def save(tensors: dict[str, torch.Tensor], name: str = "edges") -> Any:
        path = tmp_path / f"{name}.safetensors"
        save_file({key: each.contiguous() for key, each in tensors.items()}, path)
        return make_control(path=path, name=name)

    return save


@pytest.mark.parametrize("prefix", ["control_model.", ""])
def test_the_original_names_give_the_same_image(
    prefix: str,
    slot_engine,
    tensors,
    write,
    make_control,
):
    """Projections may be linear layers there; a whole checkpoint may be beside."""
    renamed = original_layout(tensors, prefix)
    for key in renamed:
        if key.endswith("proj_in.weight"):
            renamed[key] = renamed[key].flatten(1)
    if prefix:
        renamed["model.diffusion_model.out.2.bias"] = torch.zeros(4)
    request = make_request(controls=(make_control(),))
    (expected,) = draw(slot_engine, request)
    (image,) = draw(slot_engine, make_request(controls=(write(renamed),)))
    assert difference(image, expected) <= ROUNDING
    assert difference(image, draw(slot_engine, make_request())[0]) > 20


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory) -> Path:
    return tiny_families.build(tmp_path_factory.mktemp("families") / "sdxl", "sdxl")


@pytest.fixture(scope="module")
def sdxl_nets(sdxl: Path) -> cache.ControlNets:
    from diffusers import UNet2DConditionModel

    return cache.ControlNets(
        UNet2DConditionModel.from_pretrained(sdxl / "unet"), has_own_layers=False
    )


def checked(nets: cache.ControlNets, control: Any) -> Any:
    return nets.check_file(control.name, control.path)


def test_sdxls_in_the_original_names_have_all_tensors(sdxl: Path, sdxl_nets, write):
    network = tiny_controlnets.make(sdxl)
    checked(sdxl_nets, write(original_layout(network.state_dict(), "", layers=2)))
    read = sdxl_nets._read.popitem()[1].state_dict()
    assert read.keys() == network.state_dict().keys()
    for key, tensor in network.state_dict().items():
        torch.testing.assert_close(read[key], tensor)


@pytest.mark.parametrize("size", ["small", "mid"])
@torch.no_grad()
def test_sdxls_smaller_ones_leave_attentions_out(
    size: str, sdxl: Path, sdxl_nets, write
):
    config = dict(tiny_controlnets.make(sdxl).config)
    if size == "small":
        config |= {
            "down_block_types": ["DownBlock2D"] * 3,
            "mid_block_type": "UNetMidBlock2D",
        }
    else:
        config["transformer_layers_per_block"] = [0, 0, 1]
    network = ControlNetModel.from_config(
        {key: value for key, value in config.items() if not key.startswith("_")}
    ).eval()
    tensors = {
        key: torch.randn_like(each) / 9 for key, each in network.state_dict().items()
    }
    network.load_state_dict(tensors)
    ours = sdxl_nets.get(checked(sdxl_nets, write(tensors)))
    x = torch.randn(1, 4, 8, 8)
    vectors = torch.randn(2, 77, 80)
    times = torch.tensor([300.0])
    pooled = torch.randn(2, 48)
    sizes = torch.tensor([[64.0, 64, 0, 0, 64, 64]] * 2)
    pixels = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8)
    expected = network(
        x.repeat(2, 1, 1, 1),
        times.repeat(2),
        vectors,
        (pixels.permute(2, 0, 1)[None].float() / 255).repeat(2, 1, 1, 1),
        0.5,
        added_cond_kwargs={"text_embeds": pooled, "time_ids": sizes},
        return_dict=False,
    )
    found = ours(
        x,
        times,
        Call(ours.prompt_layers.compute(vectors, {})),
        ours.added(pooled, sizes),
        ours.embed(pixels.numpy())[None],
        torch.tensor([0.5]),
    )
    for one, other in zip(found, [*expected[0], expected[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def _without(tensors: Any, name: str) -> Any:
    return {key: each for key, each in tensors.items() if key != name}


def _changed(tensors: Any, name: str, tensor: torch.Tensor) -> Any:
    return {**tensors, name: tensor}


BIAS = "controlnet_mid_block.bias"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda each: {"body.0.weight": each[BIAS]}, "is not a ControlNet"),
        (lambda each: _without(each, BIAS), f'Missing key.*"{BIAS}"'),
        (lambda each: _changed(each, BIAS, each[BIAS] * torch.nan), "holds NaN"),
        (
            lambda each: _changed(each, BIAS, torch.zeros(3)),
            f"model: size mismatch for {BIAS}",
        ),
        (
            lambda each: _changed(each, BIAS, torch.zeros(64).int()),
            "does not fit this model",
        ),
        (lambda each: _changed(each, "task", torch.ones(3)), 'Unexpected key.*"task"'),
        (
            lambda each: _without(
                original_layout(each, "control_model."),
                "control_model.zero_convs.2.0.weight",
            ),
            "Missing key",
        ),
    ],
)
def test_damaged_files_and_other_files_are_refused_by_name(
    change,
    reason: str,
    slot_engine,
    tensors,
    write,
):
    control = write(change(tensors))
    for _ in range(2):
        with pytest.raises(
            errors.UnusableFileError, match=f"the ControlNet 'edges' .*{reason}"
        ):
            slot_engine.prepare(make_request(controls=(control,)))


def test_another_familys_file_is_refused_with_the_families_names(
    slot_engine,
    sdxl: Path,
    sdxl_nets,
    write,
    make_control,
):
    control = write(tiny_controlnets.make(sdxl).state_dict(), "large")
    with pytest.raises(
        errors.UnusableFileError,
        match=r"'large' was made for SDXL .* 80 numbers; this .* 32",
    ):
        slot_engine.prepare(make_request(controls=(control,)))
    reason = "was made for another model and prompts' vectors of 32 numbers; this model's have 80"
    with pytest.raises(errors.UnusableFileError, match=reason):
        checked(sdxl_nets, make_control())


def test_a_truncated_file_is_refused_and_a_missing_one_tried_again(
    slot_engine, make_control, tmp_path
):
    path = tmp_path / "half.safetensors"
    content = make_control().path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(errors.UnusableFileError, match=r"'half' is not a complete"):
        slot_engine.prepare(
            make_request(controls=(make_control(path=path, name="half"),))
        )
    path.unlink()
    with pytest.raises(errors.TransientError, match="'half' cannot be read"):
        slot_engine.prepare(
            make_request(controls=(make_control(path=path, name="half"),))
        )


def test_a_files_weights_are_read_once_and_again_only_if_they_are_needed(
    make_slot_engine,
    make_control,
    monkeypatch,
    tmp_path,
):
    engine = make_slot_engine(slots=2)
    reads = []
    load = cache.ControlNets.load
    monkeypatch.setattr(
        cache.ControlNets,
        "load",
        lambda nets, file: reads.append(file[0]) or load(nets, file),
    )
    path = tmp_path / "edges.safetensors"
    shutil.copy(make_control(0).path, path)
    request = make_request(controls=(make_control(path=path),))
    (image,) = draw(engine, request)
    draw(
        engine,
        request,
        make_request(seed=2, controls=(make_control(path=path, image=1),)),
    )
    assert reads == [str(path)]
    prepared = engine.prepare(request)
    engine._lanes.clear()
    assert engine._caches.control_nets.keep_only(())
    assert engine._caches.control_nets.held_bytes == 0
    engine.admit(0, prepared)
    (again,) = [each for _ in range(9) for each in engine.tick()]
    assert difference(again.outcome, image) <= ROUNDING
    assert reads == [str(path)] * 2
    shutil.copy(make_control(1).path, path)
    (other,) = draw(engine, request)
    assert difference(other, image) > 20, "a replaced file is another one"


def test_beyond_their_room_the_least_recently_used_one_is_freed(
    make_slot_engine, make_control
):
    nets = make_slot_engine(slots=2)._caches.control_nets
    first, second, third = (checked(nets, make_control(seed)) for seed in range(3))
    size = nets.get(first).size_bytes
    nets.get(second)
    nets.get(first)
    nets.kept_bytes = 2.5 * size
    nets.get(third)
    assert list(nets._kept) == [first, third]
    assert nets.held_bytes == 2 * size
    nets.kept_bytes = 0
    used = nets.get(first)
    assert list(nets._kept) == [first]
    assert nets.get(second) is not used
    assert nets.held_bytes == 2 * size, "a lane holds the first"
    assert nets.get(first) is used
