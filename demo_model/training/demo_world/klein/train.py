"""Trains the demo's klein: python demo_model/training/demo_world/klein/train.py.

Pictures are drawn by other processes meanwhile. The autoencoder is the demo model's. The
transformer learns with its text encoder to draw with guidance; a copy learns to draw in four steps
without; a LoRA and a LoKr learn a style. `--state` keeps all that is needed to go on: stopped at
any time (Ctrl-C, SIGTERM), the same command continues. The limits, 14 minutes in all, are for one
GPU.
"""

import argparse
import copy
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, Flux2Transformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen2TokenizerFast, Qwen3ForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from demo_world import answers
from demo_world.klein import base, distil, drawing, flow, networks, pictures
from demo_world.klein.adapters import Adapter, LokrAdapter, LoraAdapter, Placed
from demo_world.klein.drawing import Drawing
from demo_world.klein.flow import Flow, TextEncoder
from demo_world.klein.pictures import Pictures, Studio
from demo_world.klein.stage import Limits, Stop, Task, Training
from evaluation.score.demo import judge as judges

ROOT = Path(__file__).resolve().parents[4]

#: Each goes on from what the earlier ones made; "style" is the teacher of the last two.
STAGES = ("base", "distilled", "style", "outline-style", "outline-style-lokr")

STYLE = "outline"

#: Of the guided model, when the judge is asked.
_GUIDED_STEPS = 20

_JUDGE_SEED = 7


@dataclass(frozen=True, slots=True)
class StageSettings:
    limits: Limits
    batch: int
    learning_rate: float
    decay: float


@dataclass(frozen=True, slots=True)
class Settings:
    stages: dict[str, StageSettings]
    pictures: int
    style_pictures: int
    least_pictures: int
    judged: int


_USUAL = Settings(
    {
        "base": StageSettings(Limits(460, 30_000), 1024, 1.5e-3, 0.999),
        "distilled": StageSettings(Limits(220, 8_000), 1024, 4e-4, 0.998),
        "style": StageSettings(Limits(30, 1_500), 1024, 3e-3, 0.99),
        "outline-style": StageSettings(Limits(45, 1_500), 1024, 1e-3, 0.99),
        "outline-style-lokr": StageSettings(Limits(55, 1_500), 1024, 2e-3, 0.99),
    },
    pictures=500_000,
    style_pictures=16_000,
    least_pictures=4_000,
    judged=400,
)

#: Minutes on a CPU: shows that every stage runs, not that it learns.
_TOY = Settings(
    {name: StageSettings(Limits(600, 2), 4, 1e-3, 0.9) for name in STAGES},
    pictures=6,
    style_pictures=6,
    least_pictures=6,
    judged=2,
)


class _Run:
    def __init__(self, options: argparse.Namespace, studio: Studio) -> None:
        self.options = options
        self.settings = _settings(options)
        self.started_at = time.monotonic()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.stop = Stop()
        self._studio = studio
        is_compiled = self.device.type == "cuda" and not options.eager
        self._layers = flow.make_layers(is_compiled=is_compiled)
        self._eager = flow.make_layers(is_compiled=False)
        self._pictures: dict[str, Pictures] = {}

    def log(self, message: str) -> None:
        print(f"[{time.monotonic() - self.started_at:.0f} s] {message}", flush=True)

    @cached_property
    def tokenizer(self) -> Qwen2TokenizerFast:
        return open_tokenizer(self.options.state)

    @cached_property
    def empty(self) -> Tensor:
        return pictures.token_ids(self.tokenizer, [""]).to(self.device)

    @cached_property
    def vae(self) -> AutoencoderKLFlux2:
        """The demo model's autoencoder, with the statistics of the world's latents."""
        file = self.options.state / "vae.safetensors"
        if file.exists():
            vae = networks.build_vae()
            vae.load_state_dict(load_file(file))
            return vae.float().to(self.device, memory_format=torch.channels_last)
        known = AutoencoderKL.from_pretrained(self.options.vae)
        vae = networks.build_vae(known.float()).to(
            self.device, memory_format=torch.channels_last
        )
        drawn = self._open_pictures("world", vae)
        drawn.take(self.settings.least_pictures)
        drawn.measure_statistics()
        save_tensors(vae.state_dict(), file)
        self.log(f"autoencoder: statistics of {drawn.ready} pictures")
        return vae

    def _open_pictures(
        self, name: str, vae: AutoencoderKLFlux2 | None = None
    ) -> Pictures:
        if name not in self._pictures:
            counts = {
                "world": self.settings.pictures,
                "style": self.settings.style_pictures,
            }
            self._pictures[name] = Pictures(
                self._studio, name, counts[name], vae or self.vae
            )
        return self._pictures[name]

    def encoder(self, network: Qwen3ForCausalLM) -> TextEncoder:
        return TextEncoder(network, self._layers, self.tokenizer.pad_token_id)

    def flow(self, transformer: Flux2Transformer2DModel) -> Flow:
        return Flow(transformer, self._layers)

    def load(self, name: str) -> tuple[Flux2Transformer2DModel, Qwen3ForCausalLM]:
        """The networks that the stage *name* made; the encoder is always the base's."""
        transformer = networks.build_transformer()
        encoder = networks.build_text_encoder(self.tokenizer)
        transformer.load_state_dict(load_file(self._result(name)))
        encoder.model.load_state_dict(load_file(self._result("encoder")))
        return transformer.to(self.device), encoder.to(self.device)

    def _result(self, name: str) -> Path:
        return self.options.state / f"{name}.safetensors"

    def train(self) -> None:
        least = self.settings.least_pictures
        _ = self.vae
        for name in STAGES:
            if self.stop.is_set:
                break
            if not self._is_done(name):
                self.log(f"{name}: begins")
                getattr(self, "_" + name.replace("-", "_"))(name, least)
        self.log("stopped: the same command continues" if self.stop.is_set else "done")

    def _is_done(self, name: str) -> bool:
        file = self.options.state / f"{name}.pt"
        if not file.exists():
            # What was carried here without the optimizer's state is not trained further.
            return self._result(name).exists()
        state = torch.load(file, map_location="cpu", weights_only=True)
        limits = self.settings.stages[name].limits
        return limits.progress(state["step"], state["seconds"]) >= 1

    def _run(self, training: Training, task: Task, on_save: Any) -> None:
        own = self.settings.stages[training.name]
        file = self.options.state / f"{training.name}.pt"
        if file.exists():
            training.load(torch.load(file, map_location=self.device, weights_only=True))
            self.log(f"{training.name}: continues at step {training.step}")

        def save() -> None:
            part = file.with_name(file.name + ".part")
            torch.save(training.state(), part)
            part.replace(file)
            with training.averaged():
                on_save()

        training.run(
            task,
            own.limits,
            is_stopped=lambda: self.stop.is_set,
            on_save=save,
            save_seconds=self.options.save_seconds,
        )
        self.log(f"{training.name}: {training.step} steps in {training.seconds:.0f} s")

    def _training(self, name: str, *trained: nn.Module) -> Training:
        own = self.settings.stages[name]
        return Training(name, trained, learning_rate=own.learning_rate, decay=own.decay)

    def _base(self, name: str, least: int) -> None:
        transformer = networks.build_transformer().to(self.device)
        encoder = networks.build_text_encoder(self.tokenizer).to(self.device)
        head = base.LabelHead(transformer.inner_dim).to(self.device)
        task = base.BaseTask(
            self._open_pictures("world"),
            self.flow(transformer),
            self.encoder(encoder),
            self.empty,
            batch=self.settings.stages[name].batch,
            least_pictures=least,
            head=head,
        )

        def save() -> None:
            save_tensors(transformer.state_dict(), self._result(name))
            save_tensors(encoder.model.state_dict(), self._result("encoder"))

        self._run(self._training(name, transformer, encoder, head), task, save)
        self._write(name)
        self._ask_judge(name, steps=_GUIDED_STEPS, guidance=distil.GUIDANCE)

    def _distilled(self, name: str, least: int) -> None:
        teacher, encoder = self.load("base")
        student = copy.deepcopy(teacher)
        task = distil.DistilTask(
            self._open_pictures("world"),
            self.flow(teacher.requires_grad_(False)),
            self.flow(student),
            self.encoder(encoder),
            self.empty,
            batch=self.settings.stages[name].batch,
            least_pictures=least,
        )
        self._run(
            self._training(name, student),
            task,
            lambda: save_tensors(student.state_dict(), self._result(name)),
        )
        self._write(name)
        self._ask_judge(name)

    def _style(self, name: str, least: int) -> None:
        """A LoRA of the guided model, which teaches those of the distilled one."""
        transformer, encoder = self.load("base")
        placed = Placed(LoraAdapter(transformer), transformer)
        task = base.BaseTask(
            self._open_pictures("style"),
            self.flow(transformer),
            self.encoder(encoder),
            self.empty,
            batch=self.settings.stages[name].batch,
            least_pictures=least,
            placed=placed,
        )
        self._run_adapter(name, placed.adapter, task)

    def _outline_style(self, name: str, least: int) -> None:
        adapter = LoraAdapter(self.load("distilled")[0])
        adapter.load(self._result("style"))
        self._distil_style(name, adapter, least)

    def _outline_style_lokr(self, name: str, least: int) -> None:
        self._distil_style(name, LokrAdapter(self.load("distilled")[0]), least)

    def _distil_style(self, name: str, adapter: Adapter, least: int) -> None:
        teacher, encoder = self.load("base")
        style = LoraAdapter(teacher)
        style.load(self._result("style"))
        Placed(style, teacher).place()
        student, _ = self.load("distilled")
        task = distil.DistilTask(
            self._open_pictures("style"),
            self.flow(teacher.requires_grad_(False)),
            self.flow(student),
            self.encoder(encoder),
            self.empty,
            batch=self.settings.stages[name].batch,
            least_pictures=least,
            placed=Placed(adapter, student),
        )
        self._run_adapter(name, adapter, task)
        self.options.out.joinpath("loras").mkdir(parents=True, exist_ok=True)
        shutil.copy(self._result(name), self.options.out / "loras")
        self._ask_judge(name)

    def _run_adapter(self, name: str, adapter: Adapter, task: Task) -> None:
        self._run(
            self._training(name, adapter),
            task,
            lambda: adapter.save(self._result(name)),
        )

    def _write(self, name: str) -> None:
        """The stage's model as a folder that diffusers loads."""
        out = self.options.out
        transformer, encoder = self.load(name)
        transformer.half().save_pretrained(out / "transformer")
        copy.deepcopy(self.vae).half().save_pretrained(out / "vae")
        networks.save_text_encoder(encoder, self.tokenizer, out)
        networks.save_index(out, is_distilled=name != "base")
        self.log(f"{name}: written to {out}")

    @torch.no_grad()
    def _ask_judge(
        self, name: str, *, steps: int = networks.STEPS, guidance: float = 1.0
    ) -> None:
        """How much is right of captions that training never showed."""
        is_adapter = name not in ("base", "distilled")
        transformer, network = self.load("distilled" if is_adapter else name)
        if is_adapter:
            kind = LokrAdapter if name.endswith("lokr") else LoraAdapter
            adapter = kind(transformer)
            adapter.load(self._result(name))
            Placed(adapter, transformer).place()
        scenes = drawing.held_out_scenes(self.settings.judged, _JUDGE_SEED)
        judge = judges.load_judge(device=str(self.device))
        drawn = []
        for first in range(0, len(scenes), 200):
            texts = [text for _, text in scenes[first : first + 200]]
            shape = (len(texts), networks.IMAGE_TOKENS, networks.CHANNELS)
            tokens = flow.draw(
                Flow(transformer, self._eager),
                TextEncoder(network, self._eager, self.tokenizer.pad_token_id),
                pictures.token_ids(self.tokenizer, texts).to(self.device),
                torch.randn(shape, device=self.device),
                steps=steps,
                guidance=guidance,
                empty=self.empty if guidance != 1 else None,
            )
            drawn.append(pictures.decode(self.vae, tokens))
        images = torch.cat(drawn)
        found = answers.find(judge, images)
        pairs = [(scene, own) for (scene, _), own in zip(scenes, found, strict=True)]
        things = answers.share([answers.objects_right(*each) for each in pairs])
        colours = answers.share([answers.colours_right(*each) for each in pairs])
        paper = float((images.amin(1) > 0.9).float().mean())
        self.log(
            f"{name}: of {len(pairs)} captions, {steps} steps: things {things:.1%},"
            f" colours {colours:.1%} right; white {paper:.1%}"
        )


def open_tokenizer(state: Path) -> Qwen2TokenizerFast:
    folder = state / "tokenizer"
    if not folder.exists():
        networks.build_tokenizer().save_pretrained(folder)
    return Qwen2TokenizerFast.from_pretrained(folder)


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """In float16; the file is whole at any time."""
    part = file.with_name(file.name + ".part")
    halves = {
        name: (each.half() if each.is_floating_point() else each).contiguous().cpu()
        for name, each in tensors.items()
    }
    save_file(halves, part)
    part.replace(file)


def _settings(options: argparse.Namespace) -> Settings:
    usual = _TOY if options.toy else _USUAL
    stages = {}
    for name, own in usual.stages.items():
        seconds = own.limits.seconds * options.time
        limits = Limits(seconds, options.steps or own.limits.steps)
        stages[name] = replace(own, limits=limits)
    return Settings(
        stages,
        options.pictures or usual.pictures,
        usual.style_pictures,
        usual.least_pictures,
        usual.judged,
    )


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo_klein"))
    parser.add_argument(
        "--state", type=Path, default=Path("klein-state"), help="continued if it exists"
    )
    parser.add_argument(
        "--vae", type=Path, default=ROOT / "demo_model" / "vae", help="taken over"
    )
    parser.add_argument(
        "--time", type=float, default=1.0, help="each stage has so many times its usual"
    )
    parser.add_argument("--steps", type=int, help="of each stage at most")
    parser.add_argument("--pictures", type=int, help="different ones, to draw")
    parser.add_argument(
        "--processes", type=int, help="that draw; one a core by default, 0: a thread"
    )
    parser.add_argument("--save-seconds", type=float, default=60)
    parser.add_argument(
        "--toy", action="store_true", help="a few steps of everything, on a CPU"
    )
    parser.add_argument(
        "--eager", action="store_true", help="without torch.compile on a GPU"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(given)
    logging.disable_progress_bar()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    options.state.mkdir(parents=True, exist_ok=True)
    writer = pictures.caption_writer(open_tokenizer(options.state))
    settings = _settings(options)
    drawings = {
        "world": Drawing(settings.pictures, seed=1),
        "style": Drawing(settings.style_pictures, seed=2, style=STYLE),
    }
    studio = Studio(drawings, writer, options.processes)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    # Its attention refuses some masks.
    torch.backends.cuda.enable_cudnn_sdp(False)
    run = _Run(options, studio)
    kept = {
        each: signal.signal(each, run.stop) for each in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        run.train()
    finally:
        studio.close()
        for number, handler in kept.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
