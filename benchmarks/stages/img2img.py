"""Measures img2img, hires fix and ControlNets beside txt2img.

In rows a second; a row is one image's UNet call.

    python benchmarks/stages/img2img.py --out benchmarks/results/staged-h200.json

The figures are shares of what the same rows take in txt2img alone: every other job begins with an
image of its own (strength 0.75 of 20 steps), or has a second pass at twice the side. A row of the
larger size counts as many rows of the native size as it takes the time of in txt2img alone, as more
pixels also mean longer attention. A row with a ControlNet counts as many as it has the arithmetic
of (`controlnet_by_flops`: 1 if the ControlNet costs its arithmetic alone); all those jobs have the
same random one, and images of their own. Shares compare rates of one run; the file's other figures
stay, and it is written after each rate. `--kinds img2img,controlnet` measures fewer. `--tiny` tries
it on a CPU, with meaningless figures.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

import tiny_model
from evaluation.bench import engine as bench_engine
from evaluation.bench import jobs as bench_jobs
from evaluation.bench import machine, work
from families import tiny_controlnets
from imagefleet.validation import JSONDict
from rows import amounts
from rows.groups import add_figures
from worker.engine import contract, load
from worker.engine.passes import begin
from worker.engine.slots import step
from worker.engine.slots.engine import SlotEngine
from worker.engine.slots.queue import BatchKey

Requests = Iterator[contract.ImageRequest]

STRENGTH, IMG2IMG_STEPS = 0.75, 20
HIRES_STRENGTH, HIRES_STEPS, HIRES_SCALE = 0.7, 10, 2

#: Colours of the images to begin with, upsampled.
_COARSE = 8


class Run:
    """An engine and its jobs without LoRAs."""

    def __init__(
        self,
        engine: SlotEngine,
        workload: bench_jobs.Workload,
        seconds: float,
        controlnet: Path,
    ) -> None:
        """*controlnet*: its file."""
        self.engine = engine
        self._controlnet = controlnet
        self._workload = workload
        self._seconds = seconds
        #: Work of a large image, in rows of the native size.
        self.large_row = 1.0

    @property
    def large(self) -> tuple[int, int]:
        width, height = self.engine.default_size
        return HIRES_SCALE * width, HIRES_SCALE * height

    def rows_per_second(self, requests: Requests) -> float:
        driven = work.drive(self.engine, requests, self._seconds)
        return amounts.per_second(driven, self._rows)

    def txt2img(self) -> Requests:
        return self._workload.requests()

    def large_txt2img(self) -> Requests:
        return replace(self._workload, sizes=(self.large,)).requests()

    def img2img(self) -> Requests:
        for request in self._workload.requests():
            init = contract.InitImage(pixels_of(request), STRENGTH, None)
            yield replace(request, steps=IMG2IMG_STEPS, init=init)

    def hires(self) -> Requests:
        hires = contract.HiresPass(*self.large, HIRES_STRENGTH, HIRES_STEPS, "Latent")
        return (replace(request, hires=hires) for request in self._workload.requests())

    def controlled(self) -> Requests:
        for request in self._workload.requests():
            control = contract.Control(
                self._controlnet.stem, self._controlnet, pixels_of(request)
            )
            yield replace(request, controls=(control,))

    def flops(self, request: contract.ImageRequest) -> int:
        """Operations of one UNet call of all slots, as the engine computes it uncompiled."""
        engine = self.engine
        _, opened = engine._open_lane(BatchKey.of(engine.prepare(request)))  # noqa: SLF001
        slots = len(opened.state.latents)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            step.tick(engine._unet, "shared", opened.state, opened.controls)  # noqa: SLF001
        return int(counter.get_total_flops()) // slots

    def _rows(self, request: contract.ImageRequest) -> float:
        if request.init is not None:
            taken = begin.img2img(request.steps, request.init.denoising_strength)
            return taken.t_enc + 1
        row = self.large_row if (request.width, request.height) == self.large else 1.0
        second = HIRES_STEPS * self.large_row if request.hires else 0.0
        return row * request.steps + second


def pixels_of(request: contract.ImageRequest) -> contract.Pixels:
    """Smooth colours of the seed's own."""
    size = request.width, request.height
    colours = np.random.default_rng(request.seed).integers(
        0, 256, (_COARSE, _COARSE, 3), np.uint8
    )
    return np.asarray(Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC))


def in_turn(*kinds: Requests) -> Requests:
    return itertools.chain.from_iterable(zip(*kinds, strict=True))


CONTROLNET = "controlnet"

KINDS: Mapping[str, Callable[[Run], Requests]] = {
    "img2img": Run.img2img,
    "hires": Run.hires,
    CONTROLNET: Run.controlled,
}


def _details(kinds: Sequence[str]) -> str:
    """The name of their figures."""
    return "controlnet_rows" if list(kinds) == [CONTROLNET] else "img2img_rows"


def measure(run: Run, kinds: Sequence[str]) -> Iterator[JSONDict]:
    """The figures so far, after each rate: rows a second of each kind of jobs, and their shares."""
    rows: dict[str, float] = {}
    for name, requests in _workloads(run, kinds):
        rows[name] = run.rows_per_second(requests)
        print(f"{name}: {rows[name]:.2f} rows/s", flush=True)
        if name == "large_txt2img":
            run.large_row = rows["txt2img"] / rows[name]
        if name == CONTROLNET:
            more_flops = run.flops(next(run.controlled())) / run.flops(
                next(run.txt2img())
            )
            rows["controlnet_by_flops"] = rows[name] * more_flops
        yield _summarise(run, kinds, rows)


def _workloads(run: Run, kinds: Sequence[str]) -> Iterator[tuple[str, Requests]]:
    yield "txt2img", run.txt2img()
    if "hires" in kinds:
        yield "large_txt2img", run.large_txt2img()
    for name in kinds:
        if name == CONTROLNET:
            yield name, run.controlled()
            continue
        yield f"{name}_beside_txt2img", in_turn(run.txt2img(), KINDS[name](run))
    yield "txt2img_again", run.txt2img()


def _summarise(run: Run, kinds: Sequence[str], rows: Mapping[str, float]) -> JSONDict:
    plain = statistics.mean(
        rows[name] for name in ("txt2img", "txt2img_again") if name in rows
    )
    shares = {name: round(rate / plain, 4) for name, rate in rows.items()}
    figures = {
        "img2img_over_txt2img": shares.get("img2img_beside_txt2img"),
        "hires_over_txt2img_by_rows": shares.get("hires_beside_txt2img"),
        "controlnet_by_flops": shares.get("controlnet_by_flops"),
    }
    return {
        **{name: share for name, share in figures.items() if share is not None},
        _details(kinds): {
            "rows_per_second": dict(rows),
            "shares": shares,
            "large_row_in_native_rows": run.large_row,
            "slots": run.engine.slots,
            "graphs": dict(run.engine.graphs),
            "hardware": machine.hardware(run.engine._device),  # noqa: SLF001
            "versions": machine.versions(),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/imagefleet-img2img"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--family", default="sd1", help="of the random model: sd1, sd2 or sdxl"
    )
    parser.add_argument("--slots", type=int)
    parser.add_argument("--seconds", type=float, default=40.0, help="per measured rate")
    parser.add_argument(
        "--kinds", default="img2img,hires,controlnet", help=f"of {', '.join(KINDS)}"
    )
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    model = (
        tiny_model.build_tiny_checkpoint(arguments.folder / "tiny")
        if arguments.tiny
        else None
    )
    setup = bench_engine.prepare(
        model, arguments.folder, arguments.device, 1, arguments.family
    )
    # No job has a LoRA.
    engine = load.load_engine(
        load.EngineSettings(
            setup.model,
            arguments.device,
            slots=arguments.slots,
            compiled_modes=("shared",),
        )
    )
    native = replace(setup.workload, loras=(), sizes=(engine.default_size,))
    work.draw(engine, [native.request(at) for at in range(engine.slots)])
    controlnet = arguments.folder / f"{setup.model.name}-controlnet.safetensors"
    tiny_controlnets.build(controlnet, setup.model)
    run = Run(engine, native, arguments.seconds, controlnet)
    kinds = arguments.kinds.split(",")
    if "hires" in kinds:
        engine.warm_up(
            replace(native, sizes=(run.large,)).request(0)
        )  # nothing on a CPU
    if CONTROLNET in kinds:
        engine.warm_up(next(run.controlled()))
    found: JSONDict = {}
    for found in measure(run, kinds):
        add_figures(arguments.out, found)
    engine.close()
    table = Table("jobs", "rows/s", "of txt2img")
    rows = found[_details(kinds)]
    for name, rate in rows["rows_per_second"].items():
        table.add_row(name, f"{rate:.1f}", f"{rows['shares'][name]:.3f}")
    Console().print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
