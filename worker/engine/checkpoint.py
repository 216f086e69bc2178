"""Loads an SD1.x checkpoint from local files: a diffusers folder or one `.safetensors` file.

Single files are read here, not by diffusers' `from_single_file`: that needs the Hub or a folder for
the configuration, does not name missing weights, and does not read the text encoder. Their kind was
found before, from the header alone (`worker.files.kinds`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.loaders.single_file_utils import (
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
)
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer
from transformers.utils import logging as transformers_logging

from imagefleet import errors
from imagefleet.job import clip
from imagefleet.telemetry import logs
from worker.engine import checksums

#: What the libraries raise for missing, truncated or mismatched files.
_LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError)

#: SD1.5's configuration, for single files without a configuration folder.
UNET_CONFIG = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
VAE_CONFIG = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "sample_size": 512,
    "scaling_factor": 0.18215,
}
TEXT_CONFIG = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
}
_TEXT_PREFIX = "cond_stage_model.transformer."

#: An average of the UNet's weights during training, which some files have beside the weights.
_AVERAGE_PREFIX = "model_ema."

_PREDICTION_TYPES = frozenset({"epsilon", "v_prediction"})

#: Any of them makes a folder a single file's configuration.
_CONFIGURATION = (
    *("tokenizer", "unet/config.json", "vae/config.json", "text_encoder/config.json"),
    "scheduler/scheduler_config.json",
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The networks of one checkpoint on their device, and their noise schedule."""

    name: str
    tokenizer: CLIPTokenizer
    text_encoder: CLIPTextModel
    unet: UNet2DConditionModel
    vae: AutoencoderKL
    alphas_cumprod: torch.Tensor
    prediction_type: str
    vae_factor: int
    """Pixels per latent, in each direction."""
    default_size: tuple[int, int]
    """The native width and height in pixels."""
    weight_sums: checksums.Sums
    """Of the networks' weights as they were on the CPU (`networks`)."""
    weights_id: str
    """Identifies the weights, in whatever file and precision they are."""

    @property
    def networks(self) -> dict[str, nn.Module]:
        return {"unet": self.unet, "vae": self.vae, "text_encoder": self.text_encoder}


def load_checkpoint(
    model: Path,
    device: torch.device,
    dtype: torch.dtype,
    config: Path | None = None,
    prediction_type: str | None = None,
) -> Checkpoint:
    """Loads a checkpoint.

    *config* is a folder with a single file's configuration; *prediction_type* holds where there is
    no configuration of the scheduler.

    Raises:
        SetupError: something is missing, damaged or of another architecture; names the file.
    """
    logs.take_over_libraries()
    hide_progress_bars()
    if model.is_dir():
        name, folder, networks = model.resolve().name, model, _read_folder(model)
    elif model.is_file():
        folder = _config_folder(model, config)
        name, networks = model.stem, _read_file(model, folder)
    else:
        raise errors.SetupError(f"the model {str(model)!r} does not exist")
    unet, vae, text_encoder = networks
    tokenizer = _find_tokenizer(folder, text_encoder.config.vocab_size)
    noise = {"prediction_type": prediction_type or "epsilon"} | _read_json(
        folder / "scheduler" / "scheduler_config.json"
    )
    _check_architecture(model, unet, text_encoder, tokenizer)
    by_name = {"unet": unet, "vae": vae, "text_encoder": text_encoder}
    weights_id = "" if dtype == checksums.IDENTITY_TYPE else checksums.identify(by_name)
    for network in networks:
        network.requires_grad_(requires_grad=False).eval()
        # diffusers' own to() warns about modules to keep in float32, even if there are none.
        nn.Module.to(network, dtype=dtype)
    # On the CPU, before any of them is on the device.
    weight_sums = checksums.sum_bits(checksums.named_parameters(by_name))
    for network in networks:
        nn.Module.to(network, device=device)
        if device.type == "cpu":
            # Not mapped from the file: truncating it would kill the process.
            for parameter in network.parameters():
                parameter.data = parameter.data.clone()
    if device.type == "cuda":
        for network in (unet, vae):
            network.to(memory_format=torch.channels_last)
    factor = vae_factor(vae)
    side = unet.config.sample_size * factor
    return Checkpoint(
        name=name,
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        unet=unet,
        vae=vae,
        alphas_cumprod=_alphas_cumprod(model, noise),
        prediction_type=_prediction_type(model, noise),
        vae_factor=factor,
        default_size=(side, side),
        weight_sums=weight_sums,
        weights_id=weights_id or checksums.identity(weight_sums),
    )


def vae_factor(vae: AutoencoderKL) -> int:
    """Pixels per latent, in each direction."""
    return int(2 ** (len(vae.config.block_out_channels) - 1))


def hide_progress_bars() -> None:
    """They would break the worker's log and the console's own progress bar."""
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


_Networks = tuple[UNet2DConditionModel, AutoencoderKL, CLIPTextModel]


def _read_folder(folder: Path) -> _Networks:
    return (
        _read_network(UNet2DConditionModel, folder / "unet"),
        _read_network(AutoencoderKL, folder / "vae"),
        _read_network(CLIPTextModel, folder / "text_encoder"),
    )


def _read_network(network: type[Any], folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise errors.SetupError(
            f"{str(folder.parent)!r} is not a checkpoint in diffusers format: it has no"
            f" {folder.name}/config.json"
        )
    files = [path.name for path in folder.glob("*.safetensors")]
    if not files:
        raise errors.SetupError(
            f"{str(folder)!r} has no .safetensors file (pickled weights are never loaded)"
        )
    variant = "fp16" if all(".fp16" in name for name in files) else None
    try:
        model, report = network.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            variant=variant,
            output_loading_info=True,
        )
    except _LOADING_ERRORS as error:
        raise errors.SetupError(f"{str(folder)!r} cannot be loaded: {_brief(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise errors.SetupError(
            f"{str(folder)!r} lacks {len(missing)} of its weights, for example {missing[0]}"
        )
    return model


def _config_folder(model: Path, config: Path | None) -> Path:
    """Where a single file's configuration is, if anywhere: without one it is SD1.5's."""
    candidates = [config] if config else [model.with_suffix(""), model.parent]
    for folder in candidates:
        if any((folder / name).exists() for name in _CONFIGURATION):
            return folder
    if config:
        raise errors.SetupError(
            f"--config {str(config)!r} has no configuration: neither a tokenizer folder nor, say,"
            " unet/config.json; SD1.5's checkpoints need no --config"
        )
    return candidates[0]


def _read_file(path: Path, config: Path) -> _Networks:
    try:
        weights = {
            key: weight
            for key, weight in load_file(path).items()
            if not key.startswith(_AVERAGE_PREFIX)
        }
    except (OSError, SafetensorError) as error:
        raise errors.SetupError(
            f"{str(path)!r} is not a readable .safetensors file (pickled checkpoints are never"
            f" loaded): {_brief(error)}"
        ) from error
    text_weights = {
        # Some files lack this level.
        key.removeprefix(_TEXT_PREFIX).removeprefix("text_model."): weight
        for key, weight in weights.items()
        if key.startswith(_TEXT_PREFIX) and not key.endswith("position_ids")
    }
    if not text_weights:
        raise errors.SetupError(f"{str(path)!r} is not a Stable Diffusion 1.x checkpoint")
    try:
        with torch.device("meta"):
            unet = UNet2DConditionModel.from_config(network_config(config / "unet", UNET_CONFIG))
            vae = AutoencoderKL.from_config(network_config(config / "vae", VAE_CONFIG))
            text_config = network_config(config / "text_encoder", TEXT_CONFIG)
            text_encoder = CLIPTextModel(CLIPTextConfig(**text_config))
        _number_positions(text_encoder)
        if hasattr(text_encoder, "text_model"):
            text_weights = {f"text_model.{key}": weight for key, weight in text_weights.items()}
        _fill(unet, convert_ldm_unet_checkpoint(weights, unet.config))
        _fill(vae, convert_ldm_vae_checkpoint(weights, vae.config))
        _fill(text_encoder, text_weights)
    except _LOADING_ERRORS as error:
        raise errors.SetupError(
            f"{str(path)!r} does not fit Stable Diffusion 1.x: {_brief(error)}"
        ) from error
    return unet, vae, text_encoder


def _number_positions(text_encoder: CLIPTextModel) -> None:
    """Fills the only buffer, which checkpoints need not contain."""
    numbers = torch.arange(text_encoder.config.max_position_embeddings).unsqueeze(0)
    for module in text_encoder.modules():
        if hasattr(module, "position_ids"):
            module.register_buffer("position_ids", numbers, persistent=False)


def _fill(network: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    missing = network.load_state_dict(weights, strict=False, assign=True).missing_keys
    if missing:
        raise ValueError(f"{len(missing)} weights are missing, for example {missing[0]}")


def _find_tokenizer(checkpoint: Path, vocabulary_size: int) -> CLIPTokenizer:
    folder = clip.tokenizer_of(checkpoint, vocabulary_size)
    if not folder.is_dir():
        raise errors.SetupError(
            f"the model's tokenizer is missing: {str(folder)!r}; its text encoder has"
            f" {vocabulary_size:,} tokens, and CLIP's tokenizer {clip.VOCABULARY_SIZE:,}"
        )
    try:
        return CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    except _LOADING_ERRORS as error:
        raise errors.SetupError(
            f"the tokenizer {str(folder)!r} cannot be loaded: {_brief(error)}"
        ) from error


def _check_architecture(
    model: Path, unet: UNet2DConditionModel, text_encoder: CLIPTextModel, tokenizer: CLIPTokenizer
) -> None:
    width = text_encoder.config.hidden_size
    if unet.config.cross_attention_dim != width or unet.config.addition_embed_type is not None:
        raise errors.SetupError(f"{str(model)!r} does not have Stable Diffusion 1.x's architecture")
    if unet.config.in_channels != unet.config.out_channels:
        raise errors.SetupError(f"{str(model)!r} is an inpainting checkpoint; text-to-image only")
    if not isinstance(unet.config.sample_size, int):
        raise errors.SetupError(
            f"{str(model)!r} has no native size: sample_size in unet/config.json must be a number"
        )
    # On a GPU, a token id out of range is a device-side assert, which ends the process.
    if len(tokenizer) > text_encoder.config.vocab_size:
        raise errors.SetupError(f"the tokenizer of {str(model)!r} belongs to another text encoder")


def _prediction_type(model: Path, noise: Mapping[str, Any]) -> str:
    found = noise["prediction_type"]
    if found not in _PREDICTION_TYPES:
        raise errors.SetupError(
            f"{str(model)!r} predicts {str(found)[:40]!r}; imagefleet generates with checkpoints"
            " that predict epsilon or v_prediction"
        )
    return str(found)


def _alphas_cumprod(model: Path, noise: Mapping[str, Any]) -> torch.Tensor:
    """SD's 'scaled_linear' schedule: betas with evenly spaced square roots."""
    if noise.get("beta_schedule", "scaled_linear") != "scaled_linear":
        raise errors.SetupError(f"{str(model)!r} does not have Stable Diffusion's noise schedule")
    start, end = noise.get("beta_start", 0.00085), noise.get("beta_end", 0.012)
    count = noise.get("num_train_timesteps", 1000)
    betas = torch.linspace(start**0.5, end**0.5, count, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, dim=0)


def network_config(folder: Path, default: Mapping[str, object]) -> dict[str, Any]:
    """A network's configuration from its folder, else *default*."""
    return _read_json(folder / "config.json") or dict(default)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise errors.SetupError(f"{str(path)!r} is not JSON: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    """The first line that says something: libraries append pages of weight names and links."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # torch's first line is only a heading: "Error(s) in loading state_dict for ...:".
    said = next((line for line in lines if not line.endswith(":")), type(error).__name__)
    return said[:200]
