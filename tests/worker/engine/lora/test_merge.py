"""Merged LoRAs: their images, and the weights they leave unchanged."""

from pathlib import Path

import torch

from drawing import draw, make_request
from worker.engine import contract


def use(
    path: Path, text_encoder: float = 0.8, unet: float | None = None
) -> contract.Lora:
    return contract.Lora(
        path.stem, path, text_encoder, text_encoder if unet is None else unet
    )


def test_weight_zero_is_the_base_model(engine, lora_paths: list[Path]):
    base, zero, opposed = draw(
        engine,
        make_request(),
        make_request(loras=(use(lora_paths[0], 0.0),)),
        make_request(loras=(use(lora_paths[0], 0.5), use(lora_paths[0], -0.5))),
    )
    assert (base == zero).all()
    assert (base == opposed).all()


def test_many_merges_leave_the_checkpoints_weights_bit_exact(
    engine, lora_paths: list[Path]
):
    unet = engine.checkpoint.unet
    merger = engine._merger
    merger.activate(())
    before = {name: tensor.clone() for name, tensor in unet.state_dict().items()}
    for at in range(12):
        loras = (use(lora_paths[at % 3], 0.1 + at / 10), use(lora_paths[at % 2], -1.0))
        prepared = engine.prepare(make_request(loras=loras[: 1 + at % 2]))
        merger.activate(prepared.loras["unet"])
    changed = unet.state_dict()
    assert not all(torch.equal(changed[name], before[name]) for name in before)
    merger.activate(())
    after = unet.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
