"""The model families: all that differs between Stable Diffusion's versions.

The configurations are those of single files without a configuration folder, as published.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imagefleet.files import contents
from imagefleet.files.safetensors import Header
from imagefleet.job.sizes import Size
from imagefleet.validation import JSONDict, JSONObject
from worker.engine import checksums, text
from worker.engine.families import reading
from worker.engine.families.reading import ImageNoise
from worker.engine.files.safetensors import Tensors
from worker.engine.lora.file import Layers, Network
from worker.engine.lora.original_names import OriginalNames, unet_names
from worker.engine.text import Rules

Config = JSONObject


@dataclass(frozen=True)
class TextEncoder:
    """One of a family's text encoders: a CLIPTextModel, or one with a projection."""

    #: The encoder's name, which is that of its folder in diffusers' format.
    network: Network
    config: Config
    rules: Rules
    #: The prefix of its keys in single files that have OpenCLIP's names, not transformers'.
    open_clip: str = ""


@dataclass(frozen=True)
class Family:
    """One row of the table of model families; the rest of the engine is the same for all."""

    name: str
    #: The family's name for programs.
    slug: str
    unet_config: Config = field(default_factory=dict)
    vae_config: Config = field(default_factory=dict)
    text_encoders: tuple[TextEncoder, ...] = ()
    #: The name of the network that draws, which is that of its folder in diffusers' format.
    backbone: Network = "unet"
    #: Pixels by which images are wide and high: other sizes are rounded down.
    cell: int = 8
    #: The context of ordinary prompts.
    plain_tokens: int = text.PLAIN_TOKENS
    #: Contexts of longer prompts, which are masked; the last holds the longest prompt.
    long_tokens: tuple[int, ...] = text.LONG_TOKENS
    #: A GPU without room for one image of the native size is refused at the start.
    must_fit: bool = False
    #: The schedule Align Your Steps has the steps that were found for SDXL, not for SD1.5.
    has_sdxl_steps: bool = False
    #: The UNet takes the image's size and the last text encoder's pooled vector.
    has_size_ids: bool = False
    #: Aesthetic scores that the UNet takes, of prompts and of negative ones, if it takes them.
    scores: tuple[float, float] | None = None
    #: An empty negative prompt is zeros, as AUTOMATIC1111 has it, not the encoding of no words.
    zeroes_empty_negative: bool = False
    #: The VAE's activations exceed float16: they are computed at a fraction of their size.
    overflows_in_float16: bool = False
    #: A copy of all linear layers per slot fits large GPUs only; on others much has to be saved.
    has_large_layers: bool = False
    #: Finds the prediction type of a UNet, where nothing states it.
    find_prediction: Callable[[Any], str] = field(default=lambda _: "epsilon")
    #: The UNet takes an image in the size of the latents, with noise, and that noise's level.
    enlarges_image: bool = False
    #: The noise where the scheduler has no configuration; empty for SD's usual one.
    scheduler_config: Config = field(default_factory=dict)
    #: Pixels, by what the UNet predicts; otherwise the UNet's configuration says.
    native_sides: Mapping[str, int] = field(default_factory=dict)
    #: It draws one row without guidance, whatever `cfg_scale` and the negative prompt say.
    is_distilled: bool = False
    #: Slots have copies of the linear layers; else LoRAs are thin products beside them.
    has_slot_weights: bool = True
    #: Images of the native size in a call, above which it is no faster.
    most_slots: int = 16
    #: The layers' names in LoRAs that are not diffusers'.
    original_names: OriginalNames = field(default=unet_names)

    @cached_property
    def networks(self) -> tuple[Network, ...]:
        """The names of its text encoders."""
        return tuple(encoder.network for encoder in self.text_encoders)

    def lora_layers(self, networks: JSONObject) -> Layers:
        """What LoRAs can change of a model with these *networks*, by name."""
        return Layers(
            networks[self.backbone],
            {name: networks[name] for name in self.networks},
            self.backbone,
            self.original_names,
        )

    def size_ids(self, width: int, height: int, *, is_negative: bool = False) -> Tensor:
        """Original size, crop's corner, and target size or score, as AUTOMATIC1111 sends them."""
        told = [height, width] if self.scores is None else [self.scores[is_negative]]
        return torch.tensor([height, width, 0, 0, *told], dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class Model:
    """One checkpoint on its device, of any family."""

    name: str
    family: Family
    #: diffusers' UNet2DConditionModel.
    unet: Any
    #: The native width and height in pixels.
    default_size: Size
    #: Pixels for each row of what is drawn.
    factor: int
    #: The noise that families which enlarge an image add to it; None for other families.
    image_noise: ImageNoise | None = None
    #: The encoder whose states of the prompts come with each request; None: none do.
    states_encoder: str | None = None
    #: Checksums of the networks' weights as they were on the CPU; None: they are not checked.
    weight_sums: checksums.Sums | None = None
    #: Most weights are held in int8.
    is_int8: bool = False

    @property
    def channels(self) -> int:
        return int(self.unet.config.out_channels)

    @property
    def conditioning_channels(self) -> int:
        """Number of extra input channels of the UNet: 5 for inpainting, 3 to enlarge an image."""
        return int(self.unet.config.in_channels) - self.channels

    @property
    def networks(self) -> JSONDict:
        return {self.family.backbone: self.unet}

    @property
    def has_text_on_cpu(self) -> bool:
        """True where the GPU's memory is too short for the text encoders."""
        return False

    def exchange(self, other: Any) -> Any:
        """Copies the weights of *other*, of the same kind, into the own networks.

        Returns *other* with these. Raises TypeError for a kind whose weights are not exchanged.
        """
        raise TypeError(f"the weights of {other.name} are not exchanged")


#: What fills a chunk for OpenCLIP, where CLIP repeats the end; the token "!" of their tokenizer.
OPEN_CLIP_PADDING = 0

_CLIP = TextEncoder(
    network="text_encoder",
    config={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "projection_dim": 768,
    },
    rules=Rules(),
)
SD1 = Family(
    name="Stable Diffusion 1.x",
    slug="sd1",
    unet_config={
        "sample_size": 64,
        "cross_attention_dim": 768,
        "attention_head_dim": 8,
    },
    vae_config={
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "sample_size": 512,
        "scaling_factor": 0.18215,
    },
    text_encoders=(_CLIP,),
)


@torch.no_grad()
def find_prediction(unet: Any) -> str:
    """Prediction type of SD2's UNet by AUTOMATIC1111's rule: its answer to grey at timestep 999.

    Of v-prediction it is the image's negative, far below the input. Inpainting checkpoints predict
    epsilon, as there.
    """
    if unet.config.in_channels != unet.config.out_channels:
        return "epsilon"
    grey = torch.full((1, unet.config.in_channels, 8, 8), 0.5)
    context = torch.full((1, 2, unet.config.cross_attention_dim), 0.5)
    # On the CPU and in float32, where float16 may overflow or be missing.
    answer = unet.float()(grey, torch.tensor([999.0]), context).sample
    if (answer - grey).mean() < -1:
        return "v_prediction"
    return "epsilon"


#: OpenCLIP-H up to its penultimate layer. Configurations ask for attention in float32, since its
#: scores overflow in float16; the kernels here keep them in float32 anyway.
SD2 = Family(
    name="Stable Diffusion 2.x",
    slug="sd2",
    unet_config={
        "sample_size": 64,
        "cross_attention_dim": 1024,
        "attention_head_dim": [5, 10, 20, 20],
        "use_linear_projection": True,
    },
    vae_config=SD1.vae_config,
    text_encoders=(
        TextEncoder(
            network="text_encoder",
            # Without the last of its 24 layers, as in diffusers' format.
            config={
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 23,
                "num_attention_heads": 16,
                "hidden_act": "gelu",
                "projection_dim": 512,
            },
            open_clip="cond_stage_model.model.",
            # AUTOMATIC1111 ignores clip_skip here.
            rules=Rules(padding=OPEN_CLIP_PADDING, layer=1),
        ),
    ),
    find_prediction=find_prediction,
    native_sides={"epsilon": 512, "v_prediction": 768},
)

#: Both text encoders give their penultimate layer as it is, whatever `clip_skip` says, as in
#: AUTOMATIC1111.
_SDXL_RULES = Rules(layer=2, is_normalised=False)

SDXL = Family(
    name="SDXL",
    slug="sdxl",
    unet_config={
        "sample_size": 128,
        "cross_attention_dim": 2048,
        "attention_head_dim": [5, 10, 20],
        "block_out_channels": [320, 640, 1280],
        "down_block_types": [
            "DownBlock2D",
            "CrossAttnDownBlock2D",
            "CrossAttnDownBlock2D",
        ],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 2, 10],
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    vae_config={**SD1.vae_config, "sample_size": 1024, "scaling_factor": 0.13025},
    text_encoders=(
        replace(_CLIP, rules=_SDXL_RULES),
        TextEncoder(
            network="text_encoder_2",
            config={
                "hidden_size": 1280,
                "intermediate_size": 5120,
                "num_hidden_layers": 32,
                "num_attention_heads": 20,
                "hidden_act": "gelu",
                "projection_dim": 1280,
            },
            open_clip="conditioner.embedders.1.model.",
            rules=replace(_SDXL_RULES, padding=OPEN_CLIP_PADDING, has_pooled=True),
        ),
    ),
    has_size_ids=True,
    zeroes_empty_negative=True,
    overflows_in_float16=True,
    has_large_layers=True,
    must_fit=True,
    has_sdxl_steps=True,
)


#: SDXL's own refiner goes on with its images, and draws none from the beginning: it has the second
#: text encoder alone, and is told a score in place of the target size.
REFINER = replace(
    SDXL,
    name="SDXL refiner",
    slug="sdxl_refiner",
    unet_config={
        **SDXL.unet_config,
        "cross_attention_dim": 1280,
        "attention_head_dim": [6, 12, 24, 24],
        "block_out_channels": [384, 768, 1536, 1536],
        "down_block_types": [
            "DownBlock2D",
            *["CrossAttnDownBlock2D"] * 2,
            "DownBlock2D",
        ],
        "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 2, "UpBlock2D"],
        "transformer_layers_per_block": 4,
        "projection_class_embeddings_input_dim": 2560,
    },
    text_encoders=(
        replace(SDXL.text_encoders[1], open_clip="conditioner.embedders.0.model."),
    ),
    scores=(6.0, 2.5),
)


#: What an upscaler's UNet takes beside the latents: red, green and blue.
IMAGE_CHANNELS = 3

#: Stable Diffusion's x4 upscaler: SD2's text encoder, and a UNet that sees the image it enlarges,
#: of the latents' size and with some noise. Its VAE makes four times the width and height of them.
X4_UPSCALER = replace(
    SD2,
    name="Stable Diffusion x4 upscaler",
    slug="x4_upscaler",
    unet_config={
        "sample_size": 128,
        "in_channels": 4 + IMAGE_CHANNELS,
        "cross_attention_dim": 1024,
        "attention_head_dim": 8,
        "block_out_channels": [256, 512, 512, 1024],
        "down_block_types": ["DownBlock2D", *["CrossAttnDownBlock2D"] * 3],
        "up_block_types": [*["CrossAttnUpBlock2D"] * 3, "UpBlock2D"],
        "num_class_embeds": 1000,
        "only_cross_attention": [True, True, True, False],
        "use_linear_projection": True,
    },
    vae_config={
        "down_block_types": ["DownEncoderBlock2D"] * 3,
        "up_block_types": ["UpDecoderBlock2D"] * 3,
        "block_out_channels": [128, 256, 512],
        "layers_per_block": 2,
        "sample_size": 256,
        "scaling_factor": 0.08333,
    },
    # Of the latents, and of the image.
    scheduler_config={
        "beta_start": 0.0001,
        "beta_end": 0.02,
        "beta_schedule": "scaled_linear",
    },
    # "The decoder seems to break in half precision", says its own configuration (x4-upscaling.yaml
    # in Stability-AI/stablediffusion); diffusers' pipeline decodes in float32.
    overflows_in_float16=True,
    find_prediction=lambda _: "v_prediction",
    native_sides={},
    enlarges_image=True,
)

FAMILIES = (SD1, SD2, SDXL)

_OF_FILES = {
    contents.SD1: SD1,
    contents.SD2: SD2,
    contents.SDXL: SDXL,
    contents.REFINER: REFINER,
    contents.X4_UPSCALER: X4_UPSCALER,
}


def of_file(weights: Tensors) -> Family | None:
    """The family of a single file."""
    header = Header({name: tuple(each.shape) for name, each in weights.items()}, {})
    return _OF_FILES.get(contents.identify(header))


def of_folder(unet: Config, text_encoder: Config) -> Family:
    """The family of a folder in diffusers' format, by these parts' configurations.

    SD2 is told from SD1 by its text encoder: OpenCLIP has another activation than CLIP. Of SDXL's,
    the refiner has the second alone.
    """
    if unet.get("num_class_embeds") is not None:
        return X4_UPSCALER
    if unet.get("addition_embed_type") is not None:
        return SDXL if text_encoder else REFINER
    return SD2 if text_encoder.get("hidden_act") == "gelu" else SD1


def pipeline_of(model: Path) -> str:
    """The class of a folder's pipeline by its model_index.json; '' for a file or without one."""
    return str(reading.read_json(model / "model_index.json").get("_class_name", ""))
