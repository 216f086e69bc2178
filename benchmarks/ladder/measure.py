"""Measures what each step from plain diffusers to this engine gains, on one card in one run.

    python benchmarks/ladder/measure.py --dollars-per-hour 3.29

SD1.5 with random weights, 512 x 512, 15 Euler ancestral steps with guidance. Each rung has what the
ones before it have. The first six draw one image after the other by diffusers' pipeline, and are
medians; the last two are the rate of an engine that is always full. Writes the figures to
`--out`, and their picture to `--picture`. A fast card takes some eight minutes, most of them to
compile. `--tiny` tries it on a CPU, with meaningless figures.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.ladder import picture
from evaluation.bench import baseline, machine, work
from evaluation.bench import engine as bench_engine
from evaluation.bench import jobs as bench_jobs
from imagefleet.validation import JSONDict
from worker.engine import device as devices
from worker.engine import load

ROOT = Path(__file__).resolve().parents[2]

SECONDS_PER_HOUR = 3600
REPEATS = 3
FEW_STEPS = 4


class Rung(NamedTuple):
    """A way to draw, by the name of what it adds to the one before."""

    name: str
    seconds_per_image: float


class Ladder:
    """The rungs on one checkpoint; each frees what the one before has taken."""

    def __init__(
        self, setup: bench_engine.Setup, device: torch.device, seconds: float
    ) -> None:
        self.model = setup.model
        self.device = device
        self.seconds = seconds
        self.is_tiny = device.type == "cpu"
        side = 64 if self.is_tiny else 512
        steps = (2 if self.is_tiny else 15,)
        sizes = ((side, side),)
        self.workload = replace(setup.workload, loras=(), sizes=sizes, steps=steps)

    def rungs(self) -> Iterator[Rung]:
        half = torch.float32 if self.is_tiny else torch.float16
        yield self._one_by_one("diffusers, float32", self._plain(torch.float32))
        plain = self._plain(half)
        yield self._one_by_one("float16", plain)
        inference = torch.inference_mode()(plain.draw)
        yield self._one_by_one("inference mode", plain, inference)
        pipeline = plain.pipeline
        pipeline.fuse_qkv_projections()
        for network in (pipeline.unet, pipeline.vae):
            network.to(memory_format=torch.channels_last)
        yield self._one_by_one("fused kernels", plain, inference)
        # The first compiles without graphs, the second records one of each call.
        for name, mode in (("compile", "default"), ("graphs", "reduce-overhead")):
            if not self.is_tiny:
                _compile(pipeline, mode)
            yield self._one_by_one(name, plain, _marked(inference))
        del plain, inference, pipeline
        yield from self._engine()

    def _plain(self, dtype: torch.dtype) -> baseline.PlainDiffusers:
        machine.free_memory(self.device)
        return baseline.PlainDiffusers(self.model, self.device, dtype)

    def _one_by_one(
        self,
        name: str,
        plain: baseline.PlainDiffusers,
        draw: Callable[..., Any] | None = None,
    ) -> Rung:
        """The median seconds of an image, after two that are not counted."""
        draw = draw or plain.draw
        times = []
        for number in range(REPEATS + 2):
            began_at = time.perf_counter()
            draw([self.workload.request(number)])
            times.append(time.perf_counter() - began_at)
        return Rung(name, statistics.median(times[2:]))

    def _engine(self) -> Iterator[Rung]:
        machine.free_memory(self.device)
        slots = 2 if self.is_tiny else None
        settings = load.EngineSettings(self.model, str(self.device), slots=slots)
        engine = load.load_engine(settings)
        few = replace(self.workload, steps=(FEW_STEPS,), cfg_scales=(1.0,))
        rows: dict[str, bench_jobs.Workload] = {
            f"slots, {engine.slots} at once": self.workload,
            f"few steps ({FEW_STEPS}, no guidance)": few,
        }
        for name, workload in rows.items():
            request = workload.request(0)
            engine.warm_up(request)
            width = engine.slots_for(request)
            rate = work.drive(engine, workload.requests(), self.seconds, width=width)
            yield Rung(name, 1 / rate.images_per_second)
        engine.close()


def _compile(pipeline: Any, mode: str) -> None:
    torch.compiler.reset()
    unet, vae = pipeline.unet, pipeline.vae
    unet.forward = torch.compile(type(unet).forward.__get__(unet), mode=mode)
    vae.decode = torch.compile(type(vae).decode.__get__(vae), mode=mode)


def _marked(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Tells CUDA graphs where an image begins: its tensors may take the last one's place."""

    def marked(requests: Any) -> Any:
        if torch.cuda.is_available():
            torch.compiler.cudagraph_mark_step_begin()
        return draw(requests)

    return marked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dollars-per-hour", type=float, required=True)
    parser.add_argument("--seconds", type=float, default=15.0, help="of the last rungs")
    parser.add_argument("--tiny", action="store_true")
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=results / "ladder.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "ladder.svg")
    arguments = parser.parse_args()
    device = devices.find_device("cpu" if arguments.tiny else "cuda")
    rows: list[JSONDict] = []
    with tempfile.TemporaryDirectory() as folder:
        setup = bench_engine.prepare(None, Path(folder), str(device), loras=1)
        for rung in Ladder(setup, device, arguments.seconds).rungs():
            dollars = arguments.dollars_per_hour * rung.seconds_per_image
            per_dollar = SECONDS_PER_HOUR / dollars
            rows.append({**rung._asdict(), "images_per_dollar": per_dollar})
            print(json.dumps(rows[-1]), flush=True)
            # After each, so that one that fails loses none before it.
            report = {
                "rungs": rows,
                "dollars_per_hour": arguments.dollars_per_hour,
                "hardware": machine.hardware(device),
                "versions": machine.versions(),
            }
            arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    arguments.picture.write_text(picture.ladder(report))


if __name__ == "__main__":
    main()
