"""The networks of the checkpoint (Stable Diffusion 1.5's architecture, far fewer channels)."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from demo_world.captions import BEGIN_TOKEN, CHUNK_LENGTH, END_TOKEN

LATENT_CHANNELS = 4
LATENT_CELLS = 16
CONTEXT_WIDTH = 80
TEXT_LAYERS = 4
#: Emphasis divides by the mean of the text embedding. A final norm with unit weight and this
#: constant bias keeps that mean well away from zero, as it is for Stable Diffusion 1.5.
CONTEXT_MEAN = 0.25


def build_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 64, 64, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=128,
    )


def build_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=LATENT_CELLS,
        down_block_types=(
            "CrossAttnDownBlock2D",
            "CrossAttnDownBlock2D",
            "DownBlock2D",
        ),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(64, 96, 128),
        layers_per_block=1,
        cross_attention_dim=CONTEXT_WIDTH,
        attention_head_dim=4,
        norm_num_groups=16,
    )


def build_text_encoder() -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=END_TOKEN + 1,
        hidden_size=CONTEXT_WIDTH,
        intermediate_size=4 * CONTEXT_WIDTH,
        num_hidden_layers=TEXT_LAYERS,
        num_attention_heads=5,
        max_position_embeddings=CHUNK_LENGTH,
        projection_dim=CONTEXT_WIDTH,
        bos_token_id=BEGIN_TOKEN,
        eos_token_id=END_TOKEN,
        pad_token_id=END_TOKEN,
    )
    text_encoder = CLIPTextModel(config)
    norm = final_norm(text_encoder)
    nn.init.ones_(norm.weight)
    nn.init.constant_(norm.bias, CONTEXT_MEAN)
    return text_encoder


def final_norm(text_encoder: CLIPTextModel) -> nn.LayerNorm:
    # transformers 5 dropped the `text_model` level of the module tree.
    return getattr(text_encoder, "text_model", text_encoder).final_layer_norm


def encode_text(
    text_encoder: CLIPTextModel, tokens: Tensor, weights: Tensor, clip_skip: int = 1
) -> Tensor:
    """Tokens and weights [B, chunks * 77] -> context [B, chunks * 77, width].

    Weights scale each token's vector and the mean of each chunk is restored, as AUTOMATIC1111
    does; chunks are encoded on their own.
    """
    batch = tokens.shape[0]
    outputs = text_encoder(
        input_ids=tokens.reshape(-1, CHUNK_LENGTH), output_hidden_states=clip_skip > 1
    )
    context = outputs.last_hidden_state
    if clip_skip > 1:
        context = final_norm(text_encoder)(outputs.hidden_states[-clip_skip])
    context = context.float()
    mean = context.mean((1, 2), keepdim=True)
    context = context * weights.reshape(-1, CHUNK_LENGTH, 1).float()
    context = context * (mean / context.mean((1, 2), keepdim=True))
    return context.reshape(batch, -1, context.shape[-1])


class MovingAverage:
    """An exponential moving average of parameters; the first steps count for more."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self._live = list(parameters)
        self.average = [p.detach().clone() for p in self._live]
        self._decay = decay
        self._steps = 0

    @torch.no_grad()
    def update(self) -> None:
        self._steps += 1
        decay = min(self._decay, (1 + self._steps) / (10 + self._steps))
        torch._foreach_lerp_(self.average, [p.detach() for p in self._live], 1 - decay)

    @torch.no_grad()
    def copy_to_live(self) -> None:
        for live, average in zip(self._live, self.average, strict=True):
            live.copy_(average)

    def state(self) -> tuple[int, list[Tensor]]:
        """What `load` continues from."""
        return self._steps, self.average

    @torch.no_grad()
    def load(self, state: tuple[int, list[Tensor]]) -> None:
        self._steps, averages = state
        for own, average in zip(self.average, averages, strict=True):
            own.copy_(average)


def save_pipeline_files(folder: Path) -> None:
    """Writes model_index.json and the scheduler's settings, as Stable Diffusion 1.5 has them."""
    index = {
        "_class_name": "StableDiffusionPipeline",
        "_diffusers_version": "0.42.1",
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "requires_safety_checker": False,
        "safety_checker": [None, None],
        "scheduler": ["diffusers", "EulerAncestralDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    scheduler = {
        "_class_name": "EulerAncestralDiscreteScheduler",
        "_diffusers_version": "0.42.1",
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "num_train_timesteps": 1000,
        "prediction_type": "epsilon",
        "steps_offset": 1,
        "timestep_spacing": "linspace",
        "trained_betas": None,
    }
    (folder / "scheduler").mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    scheduler_file = folder / "scheduler" / "scheduler_config.json"
    scheduler_file.write_text(json.dumps(scheduler, indent=2) + "\n")


def save_text_encoder(text_encoder: CLIPTextModel, folder: Path) -> None:
    """Saves half-precision weights that load as float32 unless a type is asked for.

    transformers loads a model in the type that its config names, diffusers in float32; a
    pipeline loaded without a type would otherwise mix both.
    """
    text_encoder.half().save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"dtype": "float32"}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def noise_shares() -> tuple[Tensor, Tensor]:
    """Signal and noise share of each of the 1,000 steps: sqrt(a), sqrt(1 - a), each [1000]."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    kept = torch.cumprod(1 - betas, 0)
    return kept.sqrt().float(), (1 - kept).sqrt().float()
