"""The baseline of all comparisons: diffusers' own pipeline with peft, one job at a time."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import EulerAncestralDiscreteScheduler, PNDMScheduler
from diffusers.utils import logging as diffusers_logging
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

from imagefleet import errors
from worker.engine import checkpoint
from worker.engine.contract import ImageRequest, Lora, Pixels
from worker.engine.flow import checkpoint as flows

#: With Stable Diffusion's options. PLMS takes one step more than AUTOMATIC1111's and the engine's.
_SCHEDULERS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "euler_ancestral": (
        EulerAncestralDiscreteScheduler,
        {"timestep_spacing": "linspace"},
    ),
    "plms": (PNDMScheduler, {"skip_prk_steps": True, "set_alpha_to_one": False}),
}
_NOISE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}


def check(model: Path) -> None:
    """Raises SetupError for a model that is no Stable Diffusion's."""
    if flows.family_of(model) is not None:
        raise errors.SetupError(
            "--baseline and latency are beside diffusers' Stable Diffusion alone;"
            " benchmarks/klein/measure.py measures FLUX.2-klein's pipeline"
        )


class PlainDiffusers:
    """The family's pipeline as in its documentation: no compilation, no batching of jobs."""

    def __init__(self, model: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Loads the checkpoint as the engine does, with the errors of `load_checkpoint`."""
        # They warn of each truncated prompt and of unused image processors.
        diffusers_logging.set_verbosity_error()
        transformers_logging.set_verbosity_error()
        from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline

        if getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False):
            torch.backends.cuda.matmul.allow_fp16_accumulation = (
                False  # the engine's option
            )
        loaded = checkpoint.load_checkpoint(model, device, dtype)
        for network in (
            loaded.unet,
            loaded.vae,
        ):  # channels-last is the engine's optimisation
            network.to(memory_format=torch.contiguous_format)
        self._adapters: dict[Path, str] = {}
        self._prediction_type = loaded.prediction_type
        parts: dict[str, Any] = {
            "vae": loaded.vae,
            "text_encoder": loaded.text_encoder,
            "tokenizer": loaded.tokenizer,
            "unet": loaded.unet,
            "scheduler": self._scheduler("euler_ancestral"),
        }
        self.pipeline: Any
        if second := loaded.text_encoders.get("text_encoder_2"):
            self.pipeline = StableDiffusionXLPipeline(
                **parts,
                text_encoder_2=second,
                tokenizer_2=loaded.tokenizer,
                add_watermarker=False,
            )
        else:
            unused = {"safety_checker": None, "feature_extractor": None}
            self.pipeline = StableDiffusionPipeline(
                **parts, **unused, requires_safety_checker=False
            )
        self.pipeline.set_progress_bar_config(disable=True)

    def use_loras(self, loras: Sequence[Lora]) -> None:
        """Activates exactly these LoRAs; used ones stay in memory.

        Without any, all are unloaded and the model is as if there never were any.
        """
        if not loras:
            self.pipeline.unload_lora_weights()
            self._adapters.clear()
            return
        for lora in loras:
            if lora.path not in self._adapters:
                name = self._adapters[lora.path] = f"lora-{len(self._adapters)}"
                with warnings.catch_warnings():
                    # A second adapter in one model is intended.
                    warnings.filterwarnings("ignore", "Already found a `peft_config`")
                    self.pipeline.load_lora_weights(
                        load_file(lora.path), adapter_name=name
                    )
        names = [self._adapters[lora.path] for lora in loras]
        weights = [
            {"text_encoder": lora.text_encoder_weight, "unet": lora.unet_weight}
            for lora in loras
        ]
        self.pipeline.set_adapters(names, weights)

    def draw(self, requests: Sequence[ImageRequest]) -> list[Pixels]:
        """Draws requests that differ only in prompts and seeds, with the active LoRAs.

        Prompts are truncated to 77 tokens and have no weights, as in diffusers.

        Raises:
            SetupError: their sampler has no scheduler here.
        """
        first = requests[0]
        self.pipeline.scheduler = self._scheduler(first.sampler)
        drawn = self.pipeline(
            [request.prompt for request in requests],
            negative_prompt=[request.negative_prompt for request in requests],
            num_inference_steps=first.steps,
            guidance_scale=first.cfg_scale,
            width=first.width,
            height=first.height,
            generator=[
                torch.Generator().manual_seed(request.seed) for request in requests
            ],
            output_type="np",
        ).images
        return list((drawn * 255).round().astype(np.uint8))

    def _scheduler(self, sampler: str) -> Any:
        if sampler not in _SCHEDULERS:
            known = ", ".join(_SCHEDULERS)
            raise errors.SetupError(
                f"plain diffusers is set up for {known}, not for {sampler!r}"
            )
        scheduler, config = _SCHEDULERS[sampler]
        return scheduler(**_NOISE, **config, prediction_type=self._prediction_type)
