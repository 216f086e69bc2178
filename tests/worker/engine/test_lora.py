"""LoRAs on the model: what they change, what they leave alone, and whose picture they are in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler, StableDiffusionPipeline
from safetensors.torch import load_file, save_file

from jobs import errors
from worker.engine import contract, lora, tiny

#: See test_batch_engine.
ROUNDING = 2


def use(path: Path, text_encoder: float = 0.8, unet: float | None = None) -> contract.Lora:
    return contract.Lora(path.stem, path, text_encoder, text_encoder if unet is None else unet)


def test_a_lora_changes_the_image_and_leaves_no_trace_in_the_next(
    engine: Any, lora_paths: list[Path], make_request: Any, draw: Any, difference: Any
) -> None:
    before = draw(engine, make_request())[0]
    styled = draw(engine, make_request(loras=(use(lora_paths[0]),)))[0]
    draw(engine, make_request(loras=(use(lora_paths[1], 1.0), use(lora_paths[2], -0.5))))
    after = draw(engine, make_request())[0]
    assert difference(before, styled) > 20
    assert (before == after).all()
    assert (styled == draw(engine, make_request(loras=(use(lora_paths[0]),)))[0]).all()


def test_different_loras_in_one_stream_go_to_their_own_tickets(
    engine: Any, lora_paths: list[Path], make_request: Any, draw: Any, difference: Any
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
    for request, image in zip(requests, together, strict=True):
        assert difference(image, draw(engine, request)[0]) <= ROUNDING
    distinct = [together[at] for at in (0, 1, 2, 4, 5)]
    for at, image in enumerate(distinct):
        assert all(difference(image, other) > 10 for other in distinct[:at])
    assert (together[5] == together[6]).all(), "their order in the prompt does not matter"


def test_only_requests_with_the_same_loras_and_weights_share_a_call(
    engine: Any, lora_paths: list[Path], make_request: Any
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


def test_weight_zero_is_the_base_model(
    engine: Any, lora_paths: list[Path], make_request: Any, draw: Any
) -> None:
    base, zero, opposed = draw(
        engine,
        make_request(),
        make_request(loras=(use(lora_paths[0], 0.0),)),
        make_request(loras=(use(lora_paths[0], 0.5), use(lora_paths[0], -0.5))),
    )
    assert (base == zero).all()
    assert (base == opposed).all()


def test_each_network_has_its_own_weight(
    engine: Any, lora_paths: list[Path], make_request: Any, draw: Any, difference: Any
) -> None:
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


# diffusers hands torch tensors to numpy 2 in a way that numpy will drop
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("alpha", [2.0, 4.0, 7.0])
def test_a_lora_does_what_it_does_in_diffusers(
    engine: Any,
    checkpoint: Path,
    make_request: Any,
    draw: Any,
    difference: Any,
    tmp_path: Path,
    alpha: float,
) -> None:
    path = tiny.build_tiny_lora(tmp_path / "a.safetensors", checkpoint, alpha=alpha)
    scheduler = EulerAncestralDiscreteScheduler.from_pretrained(
        checkpoint / "scheduler", timestep_spacing="linspace"
    )
    pipeline = StableDiffusionPipeline.from_pretrained(checkpoint, scheduler=scheduler)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(load_file(path), adapter_name="a")
    pipeline.set_adapters("a", 0.6)
    request = make_request(loras=(use(path, 0.6),))
    reference = pipeline(
        request.prompt,
        negative_prompt=request.negative_prompt,
        num_inference_steps=request.steps,
        guidance_scale=request.cfg_scale,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="np",
    ).images[0]
    assert (
        difference(draw(engine, request)[0], (reference * 255).round().astype("uint8")) <= ROUNDING
    )


def kohya_to(path: Path, spelling: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """A tiny kohya LoRA (alpha 2, rank 4) respelt, its layers' names from the tiny model."""
    weights = load_file(path)
    respelt = {}
    for key, weight in weights.items():
        flat, part = key.split(".", 1)
        if part == "alpha":
            continue
        layer = LAYERS[flat]
        side = "down" if "down" in part else "up"
        network, name = layer
        is_processor = name.endswith(("to_q", "to_k", "to_v", "to_out.0"))
        if spelling == "peft":
            new = f"base_model.model.{network}.{name}.lora_{'A' if side == 'down' else 'B'}.weight"
        elif spelling == "diffusers":
            new = f"{network}.{name}.lora.{side}.weight"
        elif is_processor:
            parent, leaf = name.removesuffix(".0").rsplit(".", 1)
            new = f"{network}.{parent}.processor.{leaf}_lora.{side}.weight"
        elif network == "text_encoder":
            new = f"{network}.{name}.lora_linear_layer.{side}.weight"
        else:
            new = f"{network}.{name}.lora.{side}.weight"
        respelt[new] = weight
    config = {"unet.lora_alpha": 2, "text_encoder.lora_alpha": 2, "unet.alpha_pattern": {}}
    return respelt, {"format": "pt", "lora_adapter_metadata": json.dumps(config)}


LAYERS: dict[str, tuple[str, str]] = {}


@pytest.fixture(autouse=True, scope="module")
def _layer_names(checkpoint: Path) -> None:
    for file, prefix, network, level in (
        (checkpoint / "unet", "lora_unet_", "unet", ""),
        (checkpoint / "text_encoder", "lora_te_text_model_", "text_encoder", "text_model."),
    ):
        (weights,) = file.glob("*.safetensors")
        for name in load_file(weights):
            path = name.removesuffix(".weight").removeprefix("text_model.")
            LAYERS[prefix + path.replace(".", "_")] = (network, level + path)


@pytest.mark.parametrize("spelling", ["peft", "diffusers", "old diffusers"])
def test_every_spelling_of_a_lora_draws_the_same_image(
    engine: Any, lora_paths: list[Path], make_request: Any, draw: Any, tmp_path: Path, spelling: str
) -> None:
    weights, metadata = kohya_to(lora_paths[0], spelling)
    other = tmp_path / "other.safetensors"
    save_file(weights, other, metadata)
    kohya, respelt = draw(
        engine,
        make_request(loras=(use(lora_paths[0]),)),
        make_request(loras=(use(other),)),
    )
    assert (kohya == respelt).all()


def test_convolutions_and_ranks_of_their_own_are_applied(
    engine: Any, checkpoint: Path, make_request: Any, draw: Any, difference: Any, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "locon.safetensors"
    weights = {
        "lora_unet_conv_in.lora_down.weight": torch.randn((2, 4, 3, 3), generator=generator),
        "lora_unet_conv_in.lora_up.weight": torch.randn((32, 2, 1, 1), generator=generator),
        "lora_unet_mid_block_attentions_0_proj_in.lora_down.weight": torch.randn(
            (3, 64), generator=generator
        ),
        "lora_unet_mid_block_attentions_0_proj_in.lora_up.weight": torch.randn(
            (64, 3), generator=generator
        ),
    }
    save_file(weights, path)
    plain, styled = draw(engine, make_request(), make_request(loras=(use(path),)))
    assert difference(plain, styled) > ROUNDING
    unet = engine._checkpoint.unet
    engine._adapters.activate(engine.prepare(make_request(loras=(use(path),))).loras)
    inputs = torch.randn((1, 4, 8, 8), generator=generator)
    down, up = (weights[f"lora_unet_conv_in.lora_{side}.weight"] for side in ("down", "up"))
    merged = unet.conv_in.base_layer.weight + 0.8 * torch.einsum(
        "or,rixy->oixy", up[..., 0, 0], down
    )
    with torch.inference_mode():
        expected = torch.nn.functional.conv2d(inputs, merged, unet.conv_in.bias, padding=1)
        torch.testing.assert_close(unet.conv_in(inputs), expected, rtol=1e-4, atol=1e-4)


def test_the_eldest_loras_leave_the_gpu_and_come_back(
    engine: Any, lora_paths: list[Path], make_request: Any, draw: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(lora, "_MAX_LOADED_BYTES", lora_paths[0].stat().st_size)
    requests = [make_request(loras=(use(path),), steps=1) for path in lora_paths]
    first = draw(engine, *requests)
    assert len(engine._adapters._loaded) == 1
    both = make_request(loras=(use(lora_paths[0]), use(lora_paths[1])), steps=1)
    draw(engine, both)
    assert len(engine._adapters._loaded) == 2, "what one image needs is never dropped"
    again = draw(engine, *requests)
    assert all((one == other).all() for one, other in zip(first, again, strict=True))
    assert not any("lora1." in name for name, _ in engine._checkpoint.unet.named_parameters())


def test_a_prompt_of_all_loras_there_are_is_refused(
    engine: Any, lora_paths: list[Path], make_request: Any
) -> None:
    with pytest.raises(errors.JobError, match="17 LoRAs"):
        engine.prepare(make_request(loras=(use(lora_paths[0]),) * 17))


def test_a_lora_that_peft_refuses_harms_no_other_image(
    make_engine: Any, lora_paths: list[Path], make_request: Any, draw: Any, monkeypatch: Any
) -> None:
    engine = make_engine()
    before = draw(engine, make_request())[0]

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("not today")

    with monkeypatch.context() as patched:
        patched.setattr(lora, "set_peft_model_state_dict", refuse)
        styled, plain = draw(engine, make_request(loras=(use(lora_paths[0]),)), make_request())
    assert isinstance(styled, errors.TransientError)
    assert "not today" in styled.message
    assert (plain == before).all()
    assert not isinstance(draw(engine, make_request(loras=(use(lora_paths[0]),)))[0], Exception)
