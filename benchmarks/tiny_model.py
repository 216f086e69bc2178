"""A tiny random checkpoint with SD1.5's architecture, and LoRAs for it: no download, no GPU.

All modules have SD1.5's names, so that LoRAs, checkpoint conversions and tests exercise the real
code paths; only the widths differ. Its images are colourful patterns.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from evaluation.bench import random_model
from imagefleet.job import clip
from imagefleet.validation import JSONDict, JSONObject

_TEXT_WIDTH = 32

_VAE_CHANNELS = (16, 16, 32, 32)

#: Of a UNet, in place of SD1.5's four levels: each kind of block, and an image in half the time.
TWO_LEVELS: JSONObject = {
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}

#: kohya's default adapts the linear layers of both networks' transformer blocks.
ADAPTED_SUFFIXES = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "ff.net.0.proj",
    "ff.net.2",
    "proj_in",
    "proj_out",
    "q_proj",
    "k_proj",
    "v_proj",
    "out_proj",
    "fc1",
    "fc2",
)

SCHEDULER = {
    "_class_name": "EulerAncestralDiscreteScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "steps_offset": 1,
}


def build_tiny_checkpoint(
    folder: Path,
    *,
    size: int = 64,
    seed: int = 0,
    clips_tokenizer: bool = False,
    vae_channels: tuple[int, ...] = _VAE_CHANNELS,
    **unet_changes: Any,
) -> Path:
    """Writes a random checkpoint in diffusers format; returns its folder.

    The same seed gives the same weights. *size* is its native width and height in pixels, a
    multiple of 8. *clips_tokenizer* is SD1.5's, for which it has no folder. Takes about a second.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = _tokenizer()
        if clips_tokenizer:
            tokenizer = CLIPTokenizer.from_pretrained(clip.TOKENIZER)
        text_encoder = make_text_encoder(tokenizer)
        unet = make_unet(size, **unet_changes)
        vae = make_vae(size, channels=vae_channels)
    networks = {"unet": unet, "vae": vae, "text_encoder": text_encoder}
    save(folder, "StableDiffusionPipeline", networks, {"scheduler": SCHEDULER})
    if not clips_tokenizer:
        tokenizer.save_pretrained(folder / "tokenizer")
    return folder


def build_half_checkpoint(folder: Path, **changes: Any) -> Path:
    """A tiny checkpoint with half of SD1.5's levels and a narrower VAE."""
    return build_tiny_checkpoint(
        folder, vae_channels=(8, 8, 16, 16), **TWO_LEVELS, **changes
    )


def save(
    folder: Path,
    pipeline: str,
    networks: Mapping[str, Any],
    schedulers: Mapping[str, JSONObject],
    **settings: Any,
) -> None:
    """Writes networks and the configurations of schedulers as a pipeline of diffusers reads them.

    *settings*: the pipeline's own, beside its parts.
    """
    index = {
        "_class_name": pipeline,
        "tokenizer": ["transformers", "CLIPTokenizer"],
        **settings,
    }
    for part, network in networks.items():
        network.save_pretrained(folder / part)
        library = "diffusers"
        if part.startswith("text"):
            library = "transformers"
            # With the level `text_model` of the module tree, which transformers 5 dropped.
            file = folder / part / "model.safetensors"
            save_file(network.state_dict(), file, {"format": "pt"})
        index[part] = [library, type(network).__name__]
    for part, config in schedulers.items():
        _write_json(folder / part / "scheduler_config.json", config)
        index[part] = ["diffusers", config["_class_name"]]
    _write_json(folder / "model_index.json", index)


def build_tiny_lora(
    path: Path, checkpoint: Path, *, rank: int = 4, alpha: float = 2.0, seed: int = 0
) -> Path:
    """Writes a random LoRA in kohya's format for a tiny checkpoint; returns its path."""
    networks: dict[str, nn.Module] = {
        "lora_unet_": UNet2DConditionModel.from_config(
            _read_config(checkpoint / "unet")
        ),
        "lora_te_text_model_": CLIPTextModel(
            CLIPTextConfig(**_read_config(checkpoint / "text_encoder"))
        ),
    }
    layers = {
        prefix + name.removeprefix("text_model.").replace(".", "_"): module
        for prefix, network in networks.items()
        for name, module in network.named_modules()
        if name.endswith(ADAPTED_SUFFIXES)
    }
    write_lora_of(layers, path, rank, alpha, torch.Generator().manual_seed(seed))
    return path


def write_lora_of(
    layers: Mapping[str, Any],
    path: Path,
    rank: int,
    alpha: float,
    generator: torch.Generator,
) -> None:
    """Writes a random LoRA in kohya's format for layers given by key, in float32."""
    tensors = {}
    for key, layer in layers.items():
        shape = tuple(layer.weight.shape)
        for part, tensor in random_model.lora(shape, rank, generator).items():
            tensors[f"{key}.{part}"] = tensor.cpu().contiguous()
        tensors[f"{key}.alpha"] = torch.tensor(alpha)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


def _tokenizer() -> CLIPTokenizer:
    """CLIP's tokenizer with a vocabulary of bytes and no merges."""
    alphabet = [letter for _, letter in sorted(bytes_to_unicode().items())]
    words = [letter + "</w>" for letter in alphabet]
    tokens = [*alphabet, *words, "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def make_text_encoder(
    tokenizer: CLIPTokenizer,
    made: Any = CLIPTextModel,
    width: int = _TEXT_WIDTH,
    layers: int = 4,
    **more: Any,
) -> Any:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        **more,
    )
    text_encoder = made(config)
    random_model.raise_mean(text_encoder)
    return text_encoder


def make_unet(size: int, **changes: Any) -> UNet2DConditionModel:
    """SD1.5's UNet, far narrower; with *changes* of its configuration, another family's."""
    config: JSONDict = {
        "sample_size": size // 8,
        "block_out_channels": (32, 32, 64, 64),
        "layers_per_block": 1,
        "cross_attention_dim": _TEXT_WIDTH,
        "attention_head_dim": 4,
        "norm_num_groups": 8,
    }
    unet = UNet2DConditionModel(**{**config, **changes})
    # An untrained UNet predicts almost 0: prompt and LoRA would hardly change the image.
    _raise_gain(unet.conv_out, 4.0)
    return unet


def make_vae(
    size: int,
    scaling_factor: float = 0.18215,
    channels: tuple[int, ...] = _VAE_CHANNELS,
) -> AutoencoderKL:
    """A VAE with a block for each of *channels*; each but one halves the sides."""
    vae = AutoencoderKL(
        sample_size=size,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=channels,
        layers_per_block=1,
        norm_num_groups=8,
        scaling_factor=scaling_factor,
    )
    # An untrained decoder turns everything into the same fine grey noise; with blurring upsamplers
    # and contrast it draws large coloured shapes.
    for layer in [
        vae.decoder.conv_in,
        *(block.upsamplers[0].conv for block in vae.decoder.up_blocks[:-1]),
    ]:
        _blur(layer)
    _raise_gain(vae.decoder.conv_out, 2.0)
    return vae


def _raise_gain(layer: nn.Conv2d, factor: float) -> None:
    with torch.no_grad():
        layer.weight.mul_(factor)


def _read_config(folder: Path) -> JSONDict:
    return cast("JSONDict", json.loads((folder / "config.json").read_text()))


def _blur(layer: nn.Conv2d) -> None:
    with torch.no_grad():
        layer.weight.copy_(
            layer.weight.mean(dim=(2, 3), keepdim=True).expand_as(layer.weight) * 3
        )


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2))
