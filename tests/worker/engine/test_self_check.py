"""The engine's check of its weights: a flipped bit is found."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drawing import draw, make_request
from imagefleet import concurrency, errors
from imagefleet.storage.open import Storage
from packages import PlainPackages
from storages import local_only
from worker.engine import contract, load
from worker.engine.slots import engine as slots
from worker.pipeline import Pipeline
from worker.settings import WorkerSettings

DEMO_MODEL = Path(__file__).parents[3] / "demo_model"


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flips one bit of one element."""
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.detach().view(integers).flatten()[-1:] ^= 1 << bit


@pytest.mark.parametrize(
    ("precision", "network"),
    [("float32", "unet"), ("float16", "vae"), ("bfloat16", "text_encoder")],
)
def test_one_flipped_bit_of_any_network_is_found_and_named(
    make_slot_engine: Callable[..., slots.SlotEngine],
    small_model: Path,
    precision: str,
    network: str,
):
    engine = make_slot_engine(precision, small_model)
    assert engine.self_check.find_fault() is None
    name, parameter = list(getattr(engine.checkpoint, network).named_parameters())[3]
    for bit in (0, 14):
        flip(parameter, bit)
        fault = engine.self_check.find_fault()
        assert (
            fault
            == f"the weights on the device are not the checkpoint's: {network}.{name}"
        )
        flip(parameter, bit)
        assert engine.self_check.find_fault() is None


def test_a_flipped_bit_is_found_in_what_is_made_of_the_weights(
    make_slot_engine: Callable[..., slots.SlotEngine], small_model: Path
):
    engine = make_slot_engine("float32", small_model, packages=PlainPackages())
    assert engine.self_check.find_fault() is None
    folded = next(
        each for each in engine.checkpoint.vae.modules() if hasattr(each, "folded")
    )
    flip(folded.folded, 3)
    fault = str(engine.self_check.find_fault())
    assert fault.endswith("vae's own decoder.up_blocks.0.upsamplers.0.folded")


def test_merged_loras_are_no_fault_and_a_flipped_bit_beside_them_is(
    make_slot_engine: Callable[..., slots.SlotEngine],
    styles: list[contract.Lora],
):
    engine = make_slot_engine("float32")
    # So many steps of one job that merging its LoRA for all slots pays.
    (image,) = draw(engine, make_request(loras=(styles[0],), steps=9))
    assert not isinstance(image, Exception)
    assert engine._merger.originals
    assert engine.self_check.find_fault() is None
    merged = next(iter(engine._merger._originals.values()))
    flip(merged, 5)
    assert engine.self_check.find_fault() is not None
    flip(merged, 5)
    draw(engine, make_request())  # without: restored
    assert engine.self_check.find_fault() is None


def test_a_vae_that_was_widened_is_no_fault(
    make_slot_engine: Callable[..., slots.SlotEngine], small_model: Path
):
    engine = make_slot_engine("float16", small_model)
    engine.checkpoint.vae.float()
    assert engine.self_check.find_fault() is None


# The demo model in the whole pipeline


@local_only
async def test_a_bit_that_flips_while_a_worker_draws_ends_it_and_its_images_are_suspect(
    storage: Storage,
    worker_settings: Callable[..., WorkerSettings],
    monkeypatch,
):
    monkeypatch.setattr("worker.node.checks.WEIGHTS_SECONDS", 0.1)
    monkeypatch.setattr("worker.stages.record.LOCAL_FLUSH_SECONDS", 0.01)
    torch.set_num_threads(1)
    jobs = [
        {"prompt": "a star", "id": f"j{n}", "steps": 1, "width": 64, "height": 64}
        for n in range(40)
    ]
    await storage.queue.send(map(json.dumps, jobs))
    engine = load.load_engine(load.EngineSettings(DEMO_MODEL, "cpu", slots=4))
    vae = engine.checkpoint.vae
    finished = []

    def settled(outcome: str) -> None:
        finished.append(outcome)
        if len(finished) == 5:
            flip(vae.decoder.conv_in.weight, 1)

    pipeline = Pipeline(
        storage,
        lambda: engine,
        worker_settings(model=DEMO_MODEL),
        on_settled=settled,
        retry_policy=concurrency.NEVER,
    )
    with pytest.raises(
        errors.NodeError,
        match="the weights on the device are not the checkpoint's: vae",
    ):
        await pipeline.run(asyncio.Event(), asyncio.Event())
    suspects = [name async for name in storage.blobs.names("-suspect/")]
    assert len(suspects) == 1
    assert (await storage.queue.depth()).leased == 0
