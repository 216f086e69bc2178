"""Merged LoRAs: their images, and the weights they leave unchanged."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import key_names
from drawing import ROUNDING, assert_alike, difference, draw, draw_alone, make_request
from imagefleet import errors
from worker.engine import contract
from worker.engine.lora import file as lora_file


def use(
    path: Path, text_encoder: float = 0.8, unet: float | None = None
) -> contract.Lora:
    return contract.Lora(
        path.stem, path, text_encoder, text_encoder if unet is None else unet
    )


def test_a_lora_changes_its_image_and_not_the_next(
    engine: Any, lora_paths: list[Path]
) -> None:
    before = draw(engine, make_request())[0]
    styled = draw(engine, make_request(loras=(use(lora_paths[0]),)))[0]
    draw(
        engine, make_request(loras=(use(lora_paths[1], 1.0), use(lora_paths[2], -0.5)))
    )
    after = draw(engine, make_request())[0]
    assert difference(before, styled) > 20
    assert (before == after).all()
    assert (styled == draw(engine, make_request(loras=(use(lora_paths[0]),)))[0]).all()


def test_different_loras_stay_with_their_own_tickets(
    engine: Any, lora_paths: list[Path]
) -> None:
    first, second, _ = lora_paths
    sets: list[tuple[contract.Lora, ...]] = [
        (use(first),),
        (use(second),),
        (),
        (use(first),),
        (use(first, 0.3),),
        (use(first), use(second)),
        (use(second), use(first)),
    ]
    requests = [make_request(loras=loras) for loras in sets]
    together = draw(engine, *requests)
    assert_alike(together, draw_alone(engine, requests))
    distinct = [together[at] for at in (0, 1, 2, 4, 5)]
    for at, image in enumerate(distinct):
        assert all(difference(image, other) > 10 for other in distinct[:at])
    assert (together[5] == together[6]).all(), (
        "their order in the prompt does not matter"
    )


def test_only_requests_with_the_same_loras_and_weights_share_a_call(
    engine: Any, lora_paths: list[Path]
) -> None:
    first, second, _ = lora_paths
    sets: list[tuple[contract.Lora, ...]] = [
        (use(first),),
        (use(second),),
        (use(first),),
        (use(first, 0.8, 0.7),),
        (),
    ]
    for ticket, loras in enumerate(sets):
        engine.admit(ticket, engine.prepare(make_request(loras=loras, steps=1)))
    ticks = []
    while engine.busy:
        ticks.append([finished.ticket for finished in engine.tick()])
    assert ticks == [[0, 2], [1], [3], [4]]


def test_weight_zero_is_the_base_model(engine: Any, lora_paths: list[Path]) -> None:
    base, zero, opposed = draw(
        engine,
        make_request(),
        make_request(loras=(use(lora_paths[0], 0.0),)),
        make_request(loras=(use(lora_paths[0], 0.5), use(lora_paths[0], -0.5))),
    )
    assert (base == zero).all()
    assert (base == opposed).all()


def test_each_network_has_its_own_weight(engine: Any, lora_paths: list[Path]) -> None:
    base, text_only, unet_only, both = draw(
        engine,
        make_request(),
        make_request(loras=(use(lora_paths[0], 1.0, 0.0),)),
        make_request(loras=(use(lora_paths[0], 0.0, 1.0),)),
        make_request(loras=(use(lora_paths[0], 1.0, 1.0),)),
    )
    images = [base, text_only, unet_only, both]
    for at, image in enumerate(images):
        assert all(difference(image, other) > ROUNDING for other in images[:at])


@pytest.mark.parametrize("spelling", ["peft", "diffusers", "old diffusers"])
def test_every_key_format_of_a_lora_draws_the_same_image(
    engine: Any,
    checkpoint: Path,
    lora_paths: list[Path],
    tmp_path: Path,
    spelling: str,
) -> None:
    weights, metadata = key_names.respell(lora_paths[0], checkpoint, spelling)
    other = tmp_path / "other.safetensors"
    save_file(weights, other, metadata)
    kohya, respelt = draw(
        engine,
        make_request(loras=(use(lora_paths[0]),)),
        make_request(loras=(use(other),)),
    )
    assert (kohya == respelt).all()


def test_convolutions_and_different_ranks_are_merged_and_unmerged_bit_exactly(
    engine: Any, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = {
        "conv_in": (4, 2, 32, (3, 3)),
        "mid_block_attentions_0_proj_in": (64, 3, 64, ()),
    }
    weights = {}
    for name, (inner, rank, outer, kernel) in layers.items():
        down = torch.randn((rank, inner, *kernel), generator=generator)
        up = torch.randn((outer, rank, *[1] * len(kernel)), generator=generator)
        weights[f"lora_unet_{name}.lora_down.weight"] = down
        weights[f"lora_unet_{name}.lora_up.weight"] = up
    path = tmp_path / "locon.safetensors"
    save_file(weights, path)
    unet = engine.checkpoint.unet
    before = unet.conv_in.weight.clone()
    engine.activate(engine.prepare(make_request(loras=(use(path),))).loras)
    down, up = (
        weights[f"lora_unet_conv_in.lora_{side}.weight"] for side in ("down", "up")
    )
    inputs = torch.randn((1, 4, 8, 8), generator=generator)
    conv = torch.nn.functional.conv2d
    with torch.inference_mode():
        apart = conv(conv(inputs, down, padding=1), up)
        expected = conv(inputs, before, unet.conv_in.bias, padding=1) + 0.8 * apart
        torch.testing.assert_close(unet.conv_in(inputs), expected, rtol=1e-4, atol=1e-4)
    engine.activate({})
    assert torch.equal(unet.conv_in.weight, before)


def test_a_hundred_merges_leave_the_checkpoints_weights_bit_exact(
    engine: Any, lora_paths: list[Path]
) -> None:
    networks = (engine.checkpoint.unet, engine.checkpoint.text_encoder)
    engine.activate({})
    before = [network.state_dict(keep_vars=False) for network in networks]
    before = [
        {name: tensor.clone() for name, tensor in state.items()} for state in before
    ]
    for at in range(100):
        loras = (use(lora_paths[at % 3], 0.1 + at / 10), use(lora_paths[at % 2], -1.0))[
            : 1 + at % 2
        ]
        engine.activate(engine.prepare(make_request(loras=loras)).loras)
    changed = networks[0].state_dict()
    assert not all(
        torch.equal(changed[name], tensor) for name, tensor in before[0].items()
    )
    engine.activate({})
    for network, state in zip(networks, before, strict=True):
        after = network.state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in state.items())


def test_an_image_is_the_same_alone_and_with_seven_others_with_other_loras(
    engine: Any, lora_paths: list[Path]
) -> None:
    one = make_request(loras=(use(lora_paths[0], 0.35),), seed=77)
    others = [
        make_request(
            loras=tuple(use(path, 0.2 * at) for path in lora_paths[: at % 4]), seed=at
        )
        for at in range(7)
    ]
    base = draw(engine, make_request())[0]
    alone = draw(engine, one)[0]
    together = draw(engine, *others[:3], one, *others[3:])
    assert difference(alone, together[3]) <= ROUNDING
    assert (base == draw(engine, make_request())[0]).all()


def test_a_failed_merge_affects_no_other_image(
    make_engine: Any,
    lora_paths: list[Path],
    monkeypatch: Any,
) -> None:
    engine = make_engine()
    before = draw(engine, make_request())[0]
    delta, calls = lora_file.WeightDelta.compute, itertools.count()

    def refuse(*arguments: Any) -> torch.Tensor:
        if next(calls) > 20:
            raise RuntimeError("not today")
        return delta(*arguments)

    styled = make_request(loras=(use(lora_paths[0]),))
    engine.prepare(styled)
    with monkeypatch.context() as patched:
        patched.setattr(lora_file.WeightDelta, "compute", refuse)
        failed, plain = draw(engine, styled, make_request())
    assert isinstance(failed, errors.TransientError)
    assert "not today" in failed.message
    assert (plain == before).all()
    assert not isinstance(draw(engine, styled)[0], Exception)
