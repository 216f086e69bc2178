"""diffusers' pipeline of the same weights: plain, compiled by an expert's hand, with peft."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from worker.engine import contract

#: Images of a call of the compiled pipeline.
BATCH = 4


def draw(
    pipeline: Any, requests: Sequence[contract.ImageRequest]
) -> list[contract.Pixels]:
    """Requests that differ in prompts and seeds alone, in one call."""
    first = requests[0]
    images = pipeline(
        prompt=[str(each.prompt) for each in requests],
        width=first.width,
        height=first.height,
        num_inference_steps=first.steps,
        generator=[torch.Generator().manual_seed(each.seed) for each in requests],
        output_type="np",
    ).images
    return [(255 * image).round().astype(np.uint8) for image in images]


def compiled_rate(
    pipeline: Any, like: contract.ImageRequest, seconds: float, *, compiles: bool
) -> float:
    """Images/s of whole calls of BATCH images without LoRA."""
    if compiles:
        pipeline.transformer.to(memory_format=torch.channels_last)
        pipeline.vae.to(memory_format=torch.channels_last)
        pipeline.transformer.compile(fullgraph=True, mode="max-autotune-no-cudagraphs")
        pipeline.vae.decoder.compile(fullgraph=True, mode="max-autotune-no-cudagraphs")
    requests = [like] * BATCH
    draw(pipeline, requests)
    return BATCH * _calls_per_second(lambda _: draw(pipeline, requests), seconds)


def lora_rate(
    pipeline: Any,
    like: contract.ImageRequest,
    loras: Sequence[contract.Lora],
    seconds: float,
) -> float:
    """Images/s one by one, each with the next of *loras*, which are in memory."""
    for lora in loras:
        pipeline.load_lora_weights(str(lora.path), adapter_name=lora.name)
    names = [lora.name for lora in loras]

    def draw_next(number: int) -> None:
        pipeline.set_adapters([names[number % len(names)]])
        draw(pipeline, [like])

    draw_next(0)
    rate = _calls_per_second(draw_next, seconds)
    pipeline.unload_lora_weights()
    return rate


def _calls_per_second(call: Any, seconds: float) -> float:
    began_at = time.monotonic()
    calls = 0
    while time.monotonic() - began_at < seconds:
        call(calls)
        calls += 1
    return calls / (time.monotonic() - began_at)
