"""LoRAs of every kind in slots, beside other jobs: the images of the weights merged one by one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from calls import watch_calls
from drawing import ROUNDING, assert_alike, difference, draw, make_request
from families import lora_kinds
from worker.engine import contract
from worker.engine.lora.file import adaptable_layers
from worker.engine.lora.merge import Shape
from worker.engine.networks import linear

#: Kind and rank; the tiny UNet's narrowest layer has 32 inputs.
FILES = {
    "lora of rank 40": ("lora", 40),
    "loha": ("loha", 5),
    "lokr": ("lokr", 2),
    "dora": ("dora", 3),
    "full differences": ("full", 0),
}


@pytest.fixture(scope="module")
def files(slot_engine, tmp_path_factory) -> dict[str, Path]:
    """LoRAs of all linear and 1x1 layers that slots can hold, and of the text encoder."""
    folder = tmp_path_factory.mktemp("kinds")
    generator = torch.Generator().manual_seed(0)
    networks = slot_engine.checkpoint.networks
    layers = {
        f"{prefix}_{path.removeprefix('text_model.').replace('.', '_')}": layer.weight.shape
        for network, prefix in {
            "unet": "lora_unet",
            "text_encoder": "lora_te_text_model",
        }.items()
        for group, paths in slot_engine._preparer._loras.groups[network].items()
        if not isinstance(group, Shape)
        for path, layer in adaptable_layers(networks[network]).items()
        if path in paths
    }
    paths = {}
    for name, (kind, rank) in FILES.items():
        tensors = {}
        for key, shape in layers.items():
            parts = (
                {"diff": torch.randn(shape, generator=generator) / shape[1] ** 0.5}
                if kind == "full"
                else lora_kinds.MAKERS[kind](tuple(shape), rank, generator)
            )
            tensors |= {
                f"{key}.{part}": tensor.contiguous() for part, tensor in parts.items()
            }
        paths[name] = folder / f"{name}.safetensors"
        save_file(tensors, paths[name])
    return paths


def use(path: Path, unet: float = 0.3, text_encoder: float = 0.2) -> contract.Lora:
    return contract.Lora(path.stem, path, text_encoder, unet)


def test_jobs_with_every_kind_share_calls(
    engine,
    slot_engine,
    files: dict[str, Path],
    lora_paths: list[Path],
    monkeypatch,
):
    sets = [(use(path),) for path in files.values()]
    sets += [
        (),
        (use(files["dora"], 0.5), use(files["loha"], -0.2), use(lora_paths[0], 0.4)),
        (
            use(files["lora of rank 40"], 0.2),
            use(lora_paths[1]),
            use(lora_paths[2], -0.5),
        ),
        (use(files["lokr"], 0.0, 0.5),),
    ]
    requests = [make_request(loras=loras, steps=2) for loras in sets]
    calls = watch_calls(monkeypatch, slot_engine)
    together = draw(slot_engine, *requests)
    modes = [(call.mode, call.slots) for call in calls]
    assert modes == [("per_slot", 3)] * (len(requests) // 3 * requests[0].steps)
    plain = together[len(files)]
    for request, image in zip(requests, together, strict=True):
        assert difference(image, draw(engine, request)[0]) <= ROUNDING, request.loras
        assert not request.loras or difference(image, plain) > 10, request.loras


def test_no_kind_leaves_a_trace_in_its_slot_or_the_text_encoder(
    slot_engine,
    files: dict[str, Path],
    lora_paths: list[Path],
):
    text_encoder = slot_engine.checkpoint.text_encoder
    before = {name: value.clone() for name, value in text_encoder.state_dict().items()}
    company = make_request(seed=9, loras=(use(lora_paths[0]),), steps=12)
    (clean,) = draw(slot_engine, make_request(steps=1))
    # Each kind's slot is refilled with an image that has no LoRA.
    requests = [company]
    for path in files.values():
        requests.append(make_request(loras=(use(path, 2.0, 2.0),), steps=1))
        requests.append(make_request(steps=1))
    _, *images = draw(slot_engine, *requests)
    for styled, plain in zip(images[::2], images[1::2], strict=True):
        assert difference(plain, clean) <= ROUNDING
        assert difference(styled, clean) > 10
    for name, value in text_encoder.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_slots_weights_in_several_tensors_make_the_same_images(
    make_slot_engine,
    slot_engine,
    files: dict[str, Path],
    monkeypatch,
):
    requests = [make_request(loras=(use(path),), steps=2) for path in files.values()]
    whole = draw(slot_engine, *requests)
    monkeypatch.setattr(linear, "_MAX_PART_BYTES", 1)
    engine = make_slot_engine(slots=3)
    parts = [len(stack._parts) for stack in engine._unet._stacks.values()]
    assert max(parts) > 1
    assert_alike(draw(engine, *requests), whole)
