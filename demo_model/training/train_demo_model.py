"""Makes the demo checkpoint with one command: python demo_model/training/train_demo_model.py.

Stages run in order: pictures are drawn in the background; the autoencoder and the judge train on
them; then the UNet with the text encoder; then the LoRAs, and last the one for few steps.
`--stages` repeats some of them on what `--output` already holds.
"""

import argparse
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file
from transformers import CLIPTextModel, CLIPTokenizer

from demo_world import networks
from demo_world.captions import CaptionWriter
from demo_world.pictures import Pictures, PictureSet, Studio
from demo_world.shapes import SHAPES
from demo_world.training import (
    train_few_steps,
    train_judge,
    train_lora,
    train_unet,
    train_vae,
)
from demo_world.training.train_unet import LatentSet
from demo_world.world import NEW_OBJECT, STYLES, SceneOptions
from evaluation.score.demo import judge
from imagefleet.job import clip

STAGES = ("vae", "judge", "unet", "soften", "loras", "few-steps")
#: Everything that the autoencoder and the judge must know: styles and the new object too.
_ALL_SCENES = (
    *(SceneOptions(),) * 6,
    SceneOptions(objects=tuple(SHAPES)),
    SceneOptions(first_object=NEW_OBJECT),
    *(SceneOptions(styles=(style,)) for style in STYLES),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """How much of everything; the seconds, 26 minutes in all, cut a stage short on a slower GPU."""

    vae_pictures: int = 44_000
    base_pictures: int = 260_000
    lora_pictures: int = 16_000
    vae_steps: int = 14_000
    vae_seconds: float = 260
    judge_steps: int = 2_500
    judge_seconds: float = 45
    unet_steps: int = 12_000
    unet_seconds: float = 480
    soften_steps: int = 4_000
    soften_seconds: float = 150
    lora_steps: int = 1_500
    lora_seconds: float = 45
    few_steps_captions: int = 30_000
    few_steps_steps: int = 6_000
    few_steps_seconds: float = 420
    unet_batch: int = train_unet.BATCH
    lora_batch: int = train_lora.BATCH
    vae_batch: int = train_vae.BATCH
    judge_batch: int = train_judge.BATCH
    few_steps_batch: int = train_few_steps.BATCH


#: Minutes on a CPU: shows that every stage runs, not that it learns.
TOY = Settings(
    300, 250, 250, 3, 60, 3, 60, 4, 90, 1, 90, 1, 60, 20, 2, 60, unet_batch=8, lora_batch=8,
    vae_batch=4, judge_batch=8, few_steps_batch=4,
)  # fmt: skip


def _latent_set(pictures: Pictures, vae: AutoencoderKL) -> LatentSet:
    device = vae.device
    images = torch.from_numpy(pictures.images)
    latents = train_vae.encode(vae, images) * vae.config.scaling_factor

    def to_device(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(
            values.astype(np.int32) if values.dtype == np.uint16 else values
        ).to(device, dtype)

    return LatentSet(
        latents.half(),
        to_device(pictures.tokens_1, torch.int32), to_device(pictures.weights_1, torch.float16),
        to_device(pictures.tokens_2, torch.int32), to_device(pictures.weights_2, torch.float16),
        to_device(pictures.strengths, torch.float32),
    )  # fmt: skip


def _picture_sets(stages: list[str], settings: Settings) -> dict[str, PictureSet]:
    sets = {}
    if "vae" in stages or "judge" in stages:
        sets["all"] = PictureSet(settings.vae_pictures, _ALL_SCENES, seed=1)
    if {"unet", "soften"} & set(stages):
        sets["base"] = PictureSet(settings.base_pictures, (SceneOptions(),), seed=2)
    if "loras" in stages:
        for seed, recipe in enumerate(train_lora.RECIPES, start=3):
            sets[recipe.name] = PictureSet(settings.lora_pictures, recipe.scenes, seed)
    return sets


class _Run:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.started = time.monotonic()
        self.output: Path = arguments.output
        self.judge_file: Path = arguments.judge
        self.settings = TOY if arguments.toy else Settings()
        if arguments.few_steps_seconds is not None:
            self.settings = replace(
                self.settings, few_steps_seconds=arguments.few_steps_seconds
            )
        self._base: LatentSet | None = None
        tokenizer = CLIPTokenizer.from_pretrained(clip.TOKENIZER)
        self.writer = CaptionWriter(tokenizer, tokenizer.get_vocab())
        sets = _picture_sets(arguments.stages, self.settings)
        self.studio = Studio(sets, self.writer, arguments.processes) if sets else None
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(0)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True

    def log(self, message: str) -> None:
        print(f"[{time.monotonic() - self.started:.0f} s] {message}", flush=True)

    def pictures(self, name: str) -> Pictures:
        assert self.studio is not None, "a stage asked for pictures that nobody draws"
        pictures = self.studio.pictures(name)
        self.log(f"{len(pictures.images)} pictures drawn: {name}")
        return pictures

    def load_vae(self) -> AutoencoderKL:
        vae = AutoencoderKL.from_pretrained(self.output / "vae").float().to(self.device)
        return vae.to(memory_format=torch.channels_last).eval()

    def run_vae_and_judge(self, stages: list[str]) -> None:
        settings = self.settings
        drawn = self.pictures("all")
        images = torch.from_numpy(drawn.images).to(self.device)
        if "vae" in stages:
            vae, error = train_vae.train_vae(
                images, settings.vae_steps, settings.vae_seconds, settings.vae_batch
            )
            vae.half().save_pretrained(self.output / "vae", safe_serialization=True)
            self.log(f"autoencoder: mean absolute error {error:.4f} of a range of 2")
        if "judge" in stages:
            labels = torch.from_numpy(drawn.labels).to(self.device)
            kept_back = min(2_000, len(images) // 4)
            network = train_judge.train_judge(
                images[kept_back:], labels[kept_back:], self.load_vae(), settings.judge_steps,
                settings.judge_seconds, settings.judge_batch,
            )  # fmt: skip
            weights = {
                name: value.half().cpu() for name, value in network.state_dict().items()
            }
            names = {
                "shapes": ",".join(network.shapes),
                "colours": ",".join(network.colours),
            }
            save_file(weights, self.judge_file, metadata=names)
            network = judge.load_judge(self.judge_file, str(self.device))
            right = train_judge.judge_accuracy(
                network, images[:kept_back], labels[:kept_back]
            )
            self.log(
                f"judge: objects {right[0]:.3f}, colours {right[1]:.3f} on drawn pictures"
            )

    def load_model(self, fresh: bool) -> tuple[UNet2DConditionModel, CLIPTextModel]:
        if fresh:
            unet, text_encoder = networks.build_unet(), networks.build_text_encoder()
        else:
            unet = UNet2DConditionModel.from_pretrained(self.output / "unet")
            text_encoder = CLIPTextModel.from_pretrained(self.output / "text_encoder")
        return unet.float().to(self.device), text_encoder.float().to(self.device)

    def run_unet(self) -> None:
        settings = self.settings
        data = self.base_latents()
        unet, text_encoder = self.load_model(fresh=True)
        train_unet.train_unet(
            unet, text_encoder, data, settings.unet_steps, settings.unet_seconds,
            settings.unet_batch,
        )  # fmt: skip
        self.save_model(unet, text_encoder)
        self.log("UNet and text encoder saved")

    def run_soften(self) -> None:
        """Makes guidance 7 the model's natural setting; the teacher is the model as it is."""
        settings = self.settings
        data = self.base_latents()
        unet, text_encoder = self.load_model(fresh=False)
        teacher = tuple(
            network.requires_grad_(False).eval() for network in self.load_model(False)
        )
        train_unet.train_unet(
            unet, text_encoder, data, settings.soften_steps, settings.soften_seconds,
            settings.unet_batch, train_unet.LEARNING_RATE * 0.5, teacher,
        )  # fmt: skip
        self.save_model(unet, text_encoder)
        self.log("captions softened for guidance 7")

    def save_model(
        self, unet: UNet2DConditionModel, text_encoder: CLIPTextModel
    ) -> None:
        unet.half().save_pretrained(self.output / "unet")
        networks.save_text_encoder(text_encoder, self.output / "text_encoder")
        networks.save_pipeline_files(self.output)

    def base_latents(self) -> LatentSet:
        if self._base is None:
            self._base = _latent_set(self.pictures("base"), self.load_vae())
            self.log("latents ready")
        return self._base

    def run_loras(self) -> None:
        settings = self.settings
        vae = self.load_vae()
        unet, text_encoder = self.load_model(fresh=False)
        for recipe in train_lora.RECIPES:
            data = _latent_set(self.pictures(recipe.name), vae)
            lora = train_lora.train_lora(
                recipe, unet, text_encoder, data, settings.lora_steps, settings.lora_seconds,
                settings.lora_batch,
            )  # fmt: skip
            lora.save(self.output / "loras" / f"{recipe.name}.safetensors")
            self.log(f"LoRA saved: {recipe.name}")

    def run_few_steps(self) -> None:
        settings = self.settings
        unet, text_encoder = self.load_model(fresh=False)
        lora = train_few_steps.train_few_steps(
            unet, text_encoder, self.writer, settings.few_steps_captions,
            settings.few_steps_steps, settings.few_steps_seconds, settings.few_steps_batch,
        )  # fmt: skip
        lora.save(self.output / "loras" / f"{train_few_steps.RECIPE.name}.safetensors")
        self.log(f"LoRA saved: {train_few_steps.RECIPE.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("demo_model"), help="the checkpoint"
    )
    parser.add_argument(
        "--judge", type=Path, default=judge.WEIGHTS_FILE, help="the judge's file"
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument(
        "--toy", action="store_true", help="a few steps of everything, on a CPU"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--few-steps-seconds", type=float)
    arguments = parser.parse_args()
    run = _Run(arguments)
    if {"vae", "judge"} & set(arguments.stages):
        run.run_vae_and_judge(arguments.stages)
    later = (run.run_unet, run.run_soften, run.run_loras, run.run_few_steps)
    for stage, train in zip(STAGES[2:], later, strict=True):
        if stage in arguments.stages:
            train()
    run.log("done")


if __name__ == "__main__":
    main()
