"""Measures DeepFloyd IF's base in slots against diffusers one by one, at full size, random weights.

    python benchmarks/pixel/measure.py --out benchmarks/results/staged-h200.json
    python benchmarks/pixel/measure.py --size XL --slots 32 --out /tmp/xl.json
    python benchmarks/pixel/measure.py --tiny --out /tmp/tiny.json

Both draw the same images: 64x64 pixels, 100 DDPM steps, guidance 7, float16 on a GPU, each image
with another prompt and seed. Text states are random numbers, as T5 belongs to neither. diffusers
draws one image after the other, then as many at once as there are slots; the slots are refilled as
images leave them. Warm-up and compiling are excluded. Of a few steps in float32 the largest
difference between both is measured as well. `--tiny` tries all on a CPU, with meaningless
figures.

The figures are added to those that the file has already: `if_base_over_diffusers`, and what it was
made of under `if_base`.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])

import numpy as np
import torch
from diffusers import IFPipeline, UNet2DConditionModel
from torch.utils.flop_counter import FlopCounterMode

from evaluation.bench import machine, work
from pixel import tiny_cascade
from rows.groups import Figures, add_figures
from worker.engine import contract, load
from worker.engine import device as devices
from worker.engine.pixel import text_stage, text_states
from worker.engine.slots.engine import SlotEngine

#: Channels of the first block; the names are DeepFloyd's.
CHANNELS = {"M": 192, "L": 320, "XL": 704}

STEPS, TINY_STEPS = 100, 4
GUIDANCE = 7.0
BASELINE_IMAGES, TINY_BASELINE_IMAGES = 4, 2
ROUNDS, TINY_ROUNDS = 3, 1


def make_unet(size: str) -> UNet2DConditionModel:
    """IF-I's UNet, whose parameters are as many as published: 0.4, 0.9 and 4.3 billion."""
    channels = CHANNELS[size]
    return UNet2DConditionModel(
        sample_size=64,
        in_channels=3,
        **tiny_cascade.IF_UNET,
        layers_per_block=3,
        block_out_channels=tuple(channels * level for level in (1, 2, 3, 4)),
        down_block_types=(
            "ResnetDownsampleBlock2D",
            *["SimpleCrossAttnDownBlock2D"] * 3,
        ),
        up_block_types=(*["SimpleCrossAttnUpBlock2D"] * 3, "ResnetUpsampleBlock2D"),
        cross_attention_dim=4 * channels,
        encoder_hid_dim=4096,
        attention_head_dim=64,
        addition_embed_type_num_heads=64,
    )


def build_model(arguments: argparse.Namespace, device: torch.device) -> Path:
    """A stage with random weights and no text encoder, made once."""
    folder: Path = arguments.folder / (
        "tiny" if arguments.tiny else f"IF-I-{arguments.size}"
    )
    if not (folder / "done").exists():
        tiny_cascade.build(folder, "base", has_encoder=False)
        if not arguments.tiny:
            torch.manual_seed(0)
            with torch.device(device):
                unet = make_unet(arguments.size)
            unet.to(devices.find_dtype("auto", device)).save_pretrained(folder / "unet")
            del unet
        (folder / "done").touch()
    return folder


def make_states(number: int, width: int) -> torch.Tensor:
    """Random text states [77, *width*] of a prompt's number, in float16 as files have them."""
    random = torch.Generator().manual_seed(number)
    return 0.2 * torch.randn(text_states.TOKENS, width, generator=random).half()


def make_requests(
    folder: Path, engine: SlotEngine, count: int, width: int, steps: int
) -> list[contract.ImageRequest]:
    """Requests with a prompt and a seed each, and files of text states."""
    states = folder / "states"
    states.mkdir(exist_ok=True)
    encoder = text_stage.encoder_name(folder)
    paths = []
    for number in range(count + 1):
        prompt = f"prompt {number}"
        paths.append(states / f"{text_states.stem(prompt, encoder)}.safetensors")
        paths[-1].write_bytes(
            text_states.content(prompt, encoder, make_states(number, width))
        )
    side, _ = engine.default_size
    return [
        contract.ImageRequest(
            prompt=f"prompt {number}",
            negative_prompt="prompt 0",
            loras=(),
            sampler="ddpm",
            steps=steps,
            cfg_scale=GUIDANCE,
            seed=number,
            width=side,
            height=side,
            text_states=(paths[number], paths[0]),
        )
        for number in range(1, count + 1)
    ]


def measure_slots(arguments: argparse.Namespace, folder: Path, width: int) -> Figures:
    """Images/s of the engine, from the first image after a full round to the last."""
    began_at = time.monotonic()
    engine = load.load_engine(
        load.EngineSettings(
            folder,
            arguments.device,
            slots=arguments.slots,
            compile="auto" if arguments.compile else "off",
        )
    )
    steps = TINY_STEPS if arguments.tiny else STEPS
    rounds = TINY_ROUNDS if arguments.tiny else ROUNDS
    requests = make_requests(folder, engine, engine.slots, width, steps)
    work.draw(engine, requests)
    ready_seconds = time.monotonic() - began_at
    machine.reset_peak(devices.find_device(arguments.device))
    began_at = time.monotonic()
    outcomes = work.draw(engine, requests * rounds)
    seconds = time.monotonic() - began_at
    figures = {
        "slots": engine.slots,
        "images": len(outcomes),
        "images_per_second": len(outcomes) / seconds,
        "ready_seconds": ready_seconds,
        "graphs": dict(engine.graphs),
        "peak_memory_bytes": machine.peak_memory_bytes(
            devices.find_device(arguments.device)
        ),
    }
    engine.close()
    return figures


class Diffusers:
    """`IFPipeline`, drawing the images of `make_requests` by their numbers."""

    def __init__(
        self, folder: Path, device: torch.device, dtype: torch.dtype, width: int
    ) -> None:
        self._pipeline = IFPipeline.from_pretrained(folder, dtype=dtype).to(device)
        self._pipeline.set_progress_bar_config(disable=True)
        self._device, self._dtype, self._width = device, dtype, width

    def draw(self, numbers: Sequence[int], steps: int) -> np.ndarray:
        """Images [images, height, width, 3] of so many levels as the engine's, at once."""
        states = torch.stack([make_states(number, self._width) for number in numbers])
        negative = make_states(0, self._width).expand(len(numbers), -1, -1)
        images = self._pipeline(
            prompt_embeds=states.to(self._device, self._dtype),
            negative_prompt_embeds=negative.to(self._device, self._dtype),
            num_inference_steps=steps,
            guidance_scale=GUIDANCE,
            generator=[torch.Generator().manual_seed(number) for number in numbers],
            output_type="np",
        ).images
        return np.round(images * 255).astype(np.uint8)


def measure_diffusers(
    arguments: argparse.Namespace, folder: Path, width: int, *, together: int
) -> Figures:
    """Images/s of `IFPipeline`, so many images at once."""
    device = devices.find_device(arguments.device)
    plain = Diffusers(folder, device, devices.find_dtype("auto", device), width)
    steps = TINY_STEPS if arguments.tiny else STEPS
    numbers = range(1, together + 1)
    plain.draw(numbers, steps)
    calls = TINY_BASELINE_IMAGES if arguments.tiny else BASELINE_IMAGES
    calls = calls if together == 1 else max(1, calls // 2)
    began_at = time.monotonic()
    for _ in range(calls):
        plain.draw(numbers, steps)
    seconds = time.monotonic() - began_at
    return {"at_once": together, "images_per_second": calls * together / seconds}


def measure_difference(arguments: argparse.Namespace, folder: Path, width: int) -> int:
    """The largest difference from diffusers' images, of 255, in float32 after few steps."""
    device = devices.find_device(arguments.device)
    torch.backends.cudnn.allow_tf32 = False
    engine = load.load_engine(
        load.EngineSettings(
            folder, arguments.device, precision="float32", slots=2, compile="off"
        )
    )
    drawn = work.draw(engine, make_requests(folder, engine, 3, width, TINY_STEPS))
    engine.close()
    plain = Diffusers(folder, device, torch.float32, width)
    expected = [plain.draw([number], TINY_STEPS)[0] for number in (1, 2, 3)]
    torch.backends.cudnn.allow_tf32 = True
    difference = np.stack(drawn).astype(int) - np.stack(expected)
    return int(np.abs(difference).max())


def count_flops(folder: Path, steps: int) -> float:
    """Operations of an image with guidance, as diffusers computes it."""
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(
            UNet2DConditionModel.load_config(folder / "unet")
        )
        side = unet.config.sample_size
        inputs = torch.empty(1, 3, side, side), torch.empty(1)
        context = torch.empty(1, text_states.TOKENS, unet.config.encoder_hid_dim)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            unet(*inputs, context)
    return 2.0 * steps * counter.get_total_flops()


def measure(arguments: argparse.Namespace) -> Figures:
    device = devices.find_device(arguments.device)
    dtype = devices.find_dtype("auto", device)
    folder = build_model(arguments, device)
    config = UNet2DConditionModel.load_config(folder / "unet")
    width = int(config["encoder_hid_dim"])
    steps = TINY_STEPS if arguments.tiny else STEPS
    plain = measure_diffusers(arguments, folder, width, together=1)
    slots = measure_slots(arguments, folder, width)
    batch = measure_diffusers(arguments, folder, width, together=slots["slots"])
    difference = measure_difference(arguments, folder, width)
    flops = count_flops(folder, steps)
    matrix_rate = machine.measure_matrix_rate(device, dtype)
    return {
        "size": "tiny" if arguments.tiny else arguments.size,
        "steps": steps,
        "slots": slots,
        "diffusers": plain,
        "diffusers_batch": batch,
        "over_diffusers_batch": slots["images_per_second"] / batch["images_per_second"],
        "largest_difference_of_255_float32": difference,
        "flops_per_image": flops,
        "matrix_limit_fraction": slots["images_per_second"] * flops / matrix_rate,
        "hardware": machine.hardware(device),
        "versions": machine.versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=list(CHANNELS), default="M", help="of IF-I")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/imagefleet-pixel"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--slots", type=int, help="as many as fit, unless given")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    figures = measure(arguments)
    for name in ("diffusers", "diffusers_batch", "slots"):
        print(
            f"{name:<16} {figures[name]['images_per_second']:.3f} images/s", flush=True
        )
    rates = (figures[name]["images_per_second"] for name in ("slots", "diffusers"))
    ratio = round(next(rates) / next(rates), 4)
    add_figures(arguments.out, {"if_base_over_diffusers": ratio, "if_base": figures})
    print(json.dumps({"if_base_over_diffusers": ratio}))


if __name__ == "__main__":
    main()
