"""Trains the demo's cascade: python demo_model/training/demo_world/cascade/train.py.

First the base with its text encoder, then the second stage, on pictures that other processes draw
meanwhile. `--state` keeps all that is needed to go on: stopped at any time (Ctrl-C, SIGTERM), the
same command continues, and `--only-save` writes the stages as they are. The limits, 750 seconds in
all, are for one GPU, which spends five minutes of that on compiling; docs/cascade.md says how the
repository's copy was trained.
"""

import argparse
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[4]))
sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "benchmarks"))

from demo_world.cascade import networks
from demo_world.cascade.networks import StageName
from demo_world.cascade.pictures import Pictures
from demo_world.cascade.stage import Limits, StageTraining

STAGES: tuple[StageName, ...] = ("base", "sr")

#: Of the pictures; another number would draw others.
_SEED = 1


@dataclass(slots=True)
class _Stop:
    """Set by a signal; the step that runs is finished first."""

    is_set: bool = False

    def __call__(self, *_: object) -> None:
        self.is_set = True


class _Run:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.started_at = time.monotonic()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.state: dict[str, Any] = {}
        if options.state and options.state.exists():
            self.state = torch.load(
                options.state, map_location=self.device, weights_only=True
            )
            self.log(f"continues {options.state}")
        self.stop = _Stop()

    def log(self, message: str) -> None:
        print(f"[{time.monotonic() - self.started_at:.0f} s] {message}", flush=True)

    def open(self, stage: StageName, encoder: Any = None) -> StageTraining:
        is_bfloat16 = self.device.type == "cuda" or self.options.bfloat16
        training = StageTraining(stage, self.device, encoder, is_bfloat16=is_bfloat16)
        if stage in self.state:
            training.load(self.state[stage])
        return training

    def train(self) -> None:
        options = self.options
        pictures = Pictures(options.pictures, _SEED, self.device, options.processes)
        limits: dict[StageName, Limits] = {
            "base": Limits(
                options.base_seconds, options.base_steps, options.base_batch
            ),
            "sr": Limits(options.sr_seconds, options.sr_steps, options.sr_batch),
        }
        encoder = None
        try:
            for stage in STAGES:
                training = self.open(stage, encoder)
                is_done = training.train(
                    pictures,
                    limits[stage],
                    is_stopped=lambda: self.stop.is_set,
                    on_save=lambda training=training: self.save(training),
                    save_seconds=options.save_seconds,
                    is_compiled=self.device.type == "cuda" and not options.eager,
                )
                self.log(f"{stage}: {training.step} steps in {training.seconds:.0f} s")
                if not is_done:
                    self.log("stopped: the same command continues")
                    return
                _, encoder = training.averaged()
        finally:
            pictures.close()

    def save(self, training: StageTraining) -> None:
        """Writes the stage, and the state of the whole training."""
        unet, encoder = training.averaged()
        folder = self.options.out / training.stage
        networks.save_stage(folder, training.stage, unet, encoder, training.tokenizer)
        self.state[training.stage] = training.state()
        if path := self.options.state:
            part = path.with_name(path.name + ".part")
            torch.save(self.state, part)
            part.replace(path)

    def save_only(self) -> None:
        encoder = None
        for stage in STAGES:
            if stage in self.state:
                training = self.open(stage, encoder)
                self.save(training)
                _, encoder = training.averaged()
                self.log(
                    f"{stage} of step {training.step} written to {self.options.out / stage}"
                )


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("demo_cascade"), help="of both stages"
    )
    parser.add_argument("--state", type=Path, help="a file; continued if it exists")
    parser.add_argument(
        "--only-save", action="store_true", help="write the state's stages"
    )
    parser.add_argument(
        "--pictures", type=int, default=150_000, help="different ones, to draw"
    )
    parser.add_argument(
        "--processes", type=int, help="that draw; one a core by default, 0: a thread"
    )
    parser.add_argument("--base-seconds", type=float, default=290)
    parser.add_argument("--base-steps", type=int, default=12_000)
    parser.add_argument("--base-batch", type=int, default=1024)
    parser.add_argument("--sr-seconds", type=float, default=460)
    parser.add_argument("--sr-steps", type=int, default=12_000)
    parser.add_argument("--sr-batch", type=int, default=256)
    parser.add_argument("--save-seconds", type=float, default=60)
    parser.add_argument(
        "--bfloat16", action="store_true", help="on a CPU too, if it can do it"
    )
    parser.add_argument(
        "--eager", action="store_true", help="without torch.compile on a GPU"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights and the noise"
    )
    options = parser.parse_args(given)
    if options.only_save and not options.state:
        parser.error("--only-save goes with --state")
    logging.disable_progress_bar()
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    run = _Run(options)
    if options.only_save:
        run.save_only()
        return
    kept = {
        each: signal.signal(each, run.stop) for each in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        run.train()
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
