"""What img2img and hires fix cost beside txt2img, in rows a second: a row is one image's UNet call.

    python benchmarks/stages/img2img.py --out benchmarks/results/staged-h200.json

The figures are shares of what the same rows take in txt2img alone: every other job begins with an
image of its own (strength 0.75 of 20 steps), or has a second pass at twice the side. A row of the
larger size counts as many rows of the native size as it takes the time of in txt2img alone, as more
pixels also mean longer attention. Shares compare rates of one run; the file's other figures stay.
`--kinds img2img,inpainting,hires,hires_lanczos` measures more, `--alone` each kind alone as well.
`--tiny` tries it on a CPU, with meaningless figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

import tiny_model
from fleet.bench import engine as bench_engine
from fleet.bench import jobs as bench_jobs
from fleet.bench import machine, work
from worker.engine import contract, load
from worker.engine import device as devices
from worker.engine.passes import steps
from worker.engine.slots.engine import SlotEngine

Requests = Iterator[contract.ImageRequest]

STRENGTH, IMG2IMG_STEPS = 0.75, 20
HIRES_STRENGTH, HIRES_STEPS, HIRES_SCALE = 0.7, 10, 2

#: Colours of the images to begin with, upsampled.
_COARSE = 8


class Run:
    """An engine and its jobs without LoRAs."""

    def __init__(self, engine: SlotEngine, workload: bench_jobs.Workload, seconds: float) -> None:
        self.engine = engine
        self._workload = workload
        self._seconds = seconds
        self.large_row = 1.0
        """In rows of the native size."""

    @property
    def large(self) -> tuple[int, int]:
        width, height = self.engine.default_size
        return HIRES_SCALE * width, HIRES_SCALE * height

    def rows_per_second(self, requests: Requests) -> float:
        return work.drive(
            self.engine, requests, self._seconds, pixels_of=self._rows
        ).pixels_per_second

    def txt2img(self) -> Requests:
        return self._workload.requests()

    def large_txt2img(self) -> Requests:
        return replace(self._workload, sizes=(self.large,)).requests()

    def img2img(self, *, masked: bool = False) -> Requests:
        for request in self._workload.requests():
            init = make_init(request, masked=masked)
            yield replace(request, steps=IMG2IMG_STEPS, init=init)

    def hires(self, upscaler: str = "Latent") -> Requests:
        hires = contract.HiresPass(*self.large, HIRES_STRENGTH, HIRES_STEPS, upscaler)
        return (replace(request, hires=hires) for request in self._workload.requests())

    def _rows(self, request: contract.ImageRequest) -> float:
        if request.init is not None:
            taken = steps.img2img(request.steps, request.init.denoising_strength)
            return taken.t_enc + 1
        row = self.large_row if (request.width, request.height) == self.large else 1.0
        second = HIRES_STEPS * self.large_row if request.hires else 0.0
        return row * request.steps + second


def make_init(request: contract.ImageRequest, *, masked: bool) -> contract.InitImage:
    """Smooth colours of the seed's own; the right half of *masked* ones is drawn anew."""
    size = request.width, request.height
    colours = np.random.default_rng(request.seed).integers(0, 256, (_COARSE, _COARSE, 3), np.uint8)
    pixels = np.asarray(Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC))
    mask = None
    if masked:
        mask = np.zeros((request.height, request.width), np.uint8)
        mask[:, request.width // 2 :] = 255
    return contract.InitImage(pixels, STRENGTH, mask)


def in_turn(*kinds: Requests) -> Requests:
    return itertools.chain.from_iterable(zip(*kinds, strict=True))


KINDS: Mapping[str, Callable[[Run], Requests]] = {
    "img2img": Run.img2img,
    "inpainting": lambda run: run.img2img(masked=True),
    "hires": Run.hires,
    "hires_lanczos": lambda run: run.hires("Lanczos"),
}


def measure(run: Run, kinds: Sequence[str], *, alone: bool) -> dict[str, Any]:
    """Rows a second of each kind of jobs, and their shares."""
    rows: dict[str, float] = {}

    def add(name: str, requests: Requests) -> None:
        rows[name] = run.rows_per_second(requests)
        print(f"{name}: {rows[name]:.2f} rows/s", flush=True)

    add("txt2img", run.txt2img())
    add("large_txt2img", run.large_txt2img())
    run.large_row = rows["txt2img"] / rows["large_txt2img"]
    for name in kinds:
        add(f"{name}_beside_txt2img", in_turn(run.txt2img(), KINDS[name](run)))
        if alone:
            add(f"{name}_alone", KINDS[name](run))
    add("txt2img_again", run.txt2img())
    plain = (rows["txt2img"] + rows["txt2img_again"]) / 2
    shares = {name: round(rate / plain, 4) for name, rate in rows.items()}
    figures = {
        "img2img_over_txt2img": shares.get("img2img_beside_txt2img"),
        "hires_over_txt2img_by_rows": shares.get("hires_beside_txt2img"),
    }
    return {
        **{name: share for name, share in figures.items() if share is not None},
        "img2img_rows": {
            "rows_per_second": rows,
            "shares": shares,
            "large_row_in_native_rows": run.large_row,
            "slots": run.engine.slots,
            "recompiles_after_warmup": run.engine.recompiles,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/imagefleet-img2img"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--family", default="sd1", help="of the random model: sd1, sd2 or sdxl")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--seconds", type=float, default=40.0, help="per measured rate")
    parser.add_argument("--kinds", default="img2img,hires", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    model = tiny_model.build_tiny_checkpoint(arguments.folder / "tiny") if arguments.tiny else None
    setup = bench_engine.prepare(model, arguments.folder, arguments.device, 1, arguments.family)
    engine = load.load_engine(setup.model, arguments.device, slots=arguments.slots)
    native = replace(setup.workload, loras=(), sizes=(engine.default_size,))
    work.draw(engine, [native.request(at) for at in range(engine.slots)])
    run = Run(engine, native, arguments.seconds)
    engine.warm_up(*run.large)  # nothing on a CPU
    found = measure(run, arguments.kinds.split(","), alone=arguments.alone)
    found["img2img_rows"] |= {
        "hardware": machine.hardware(devices.find_device(arguments.device)),
        "versions": machine.versions(),
    }
    engine.close()
    table = Table("jobs", "rows/s", "of txt2img")
    rows = found["img2img_rows"]
    for name, rate in rows["rows_per_second"].items():
        table.add_row(name, f"{rate:.1f}", f"{rows['shares'][name]:.3f}")
    Console().print(table)
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**results, **found}, indent=2) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
