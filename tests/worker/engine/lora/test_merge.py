"""Merged LoRAs: their images, and the weights they leave unchanged."""

from pathlib import Path
from typing import Any

import torch

from drawing import draw, make_request
from worker.engine import contract


def use(
    path: Path, text_encoder: float = 0.8, unet: float | None = None
) -> contract.Lora:
    return contract.Lora(
        path.stem, path, text_encoder, text_encoder if unet is None else unet
    )


def test_weight_zero_is_the_base_model(engine: Any, lora_paths: list[Path]) -> None:
    base, zero, opposed = draw(
        engine,
        make_request(),
        make_request(loras=(use(lora_paths[0], 0.0),)),
        make_request(loras=(use(lora_paths[0], 0.5), use(lora_paths[0], -0.5))),
    )
    assert (base == zero).all()
    assert (base == opposed).all()


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
