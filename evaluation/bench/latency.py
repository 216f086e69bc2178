"""`imagefleet bench latency`: the seconds of so many images at once, beside diffusers eager."""

import functools
import statistics
import timeit
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from evaluation.bench import baseline, machine, work
from evaluation.bench import engine as bench_engine
from evaluation.bench.engine import Setup, StartStep
from evaluation.bench.jobs import Workload
from evaluation.bench.options import BenchOptions
from imagefleet.pricing import families
from imagefleet.validation import JSONDict
from worker.engine import contract, load
from worker.engine import device as devices
from worker.files import check

#: Images that somebody waits for together, each number with an engine of as many slots.
AT_ONCE = (1, 2, 4)

#: A batch whose images are drawn as fast as the machine can: its seconds follow from the rate.
FULL = 512

#: Images of one call of diffusers in the full batch, all of which no card holds.
_DIFFUSERS_BATCH = {"cuda": 32, "cpu": 4}

_SAMPLER = "plms"
_CFG_SCALE = 7.5
_STEPS = 50
_SIDE = 512
_REPEATS = 3

Draw = Callable[[Sequence[contract.ImageRequest]], object]


def measure(setup: Setup, asked: BenchOptions, step: StartStep) -> JSONDict:
    """The figures of `--json`; raises FleetError if an image failed.

    PLMS with guidance and no LoRA, from before a prompt is encoded to after its image is decoded.
    """
    device = devices.find_device(asked.device)
    baseline.check(setup.model)
    workload = replace(
        setup.workload,
        loras=(),
        samplers=(_SAMPLER,),
        cfg_scales=(_CFG_SCALE,),
        steps=(asked.steps or _STEPS,),
    )
    seconds = {}
    for images in (*AT_ONCE, FULL):
        step(f"{images} at once", 1)
        slots = asked.slots if images == FULL else images
        engine = load.load_engine(
            load.EngineSettings(setup.model, asked.device, slots=slots)
        )
        size = (_SIDE, _SIDE) if device.type == "cuda" else engine.default_size
        workload = replace(workload, sizes=(size,))
        engine.warm_up(workload.request(0))
        if images == FULL:
            at_least = asked.seconds or bench_engine.SECONDS[device.type]
            width = engine.slots_for(workload.request(0))
            rate = work.drive(engine, workload.requests(), at_least, width=width)
            seconds[images] = images / rate.images_per_second
        else:
            draw = functools.partial(work.draw, engine)
            seconds[images] = _median_seconds(draw, workload, images)
        engine.close()
        del engine
        machine.free_memory(device)
    of_diffusers = _of_diffusers(setup, device, workload, step)
    width, height = workload.sizes[0]
    return {
        "model": str(setup.model),
        "family": families.of_title(check.family(setup.model)).slug,
        "width": width,
        "height": height,
        "sampler": _SAMPLER,
        "cfg_scale": _CFG_SCALE,
        "steps": workload.steps[0],
        "seconds": seconds,
        "diffusers_seconds": of_diffusers,
        "over_diffusers": {
            images: of_diffusers[images] / seconds[images] for images in seconds
        },
        "diffusers_batch": _DIFFUSERS_BATCH[device.type],
        "hardware": machine.hardware(device),
        "versions": machine.versions(),
    }


def _of_diffusers(
    setup: Setup,
    device: torch.device,
    workload: Workload,
    step: StartStep,
) -> dict[int, float]:
    plain = baseline.PlainDiffusers(
        setup.model, device, devices.find_dtype("auto", device)
    )
    seconds = {}
    for images in AT_ONCE:
        step(f"{images} at once, diffusers", 1)
        seconds[images] = _median_seconds(plain.draw, workload, images)
    batch = _DIFFUSERS_BATCH[device.type]
    step(f"{FULL} by {batch}, diffusers", 1)
    of_batch = _median_seconds(plain.draw, workload, batch, repeats=1)
    return {**seconds, FULL: of_batch * FULL / batch}


def _median_seconds(
    draw: Draw, workload: Workload, images: int, repeats: int = _REPEATS
) -> float:
    """Median time of a draw of so many images, after one that is not counted."""
    requests = [workload.request(number) for number in range(images)]
    draw(requests)
    times = timeit.repeat(lambda: draw(requests), number=1, repeat=repeats)
    return statistics.median(times)
