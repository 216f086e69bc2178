"""Loads a transformer of flows: a folder in diffusers' format, or one file of its weights.

A single file has the transformer alone, in its makers' names, and may be ComfyUI's in float8; VAE,
text encoder and tokenizer are in the folder beside it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2
from safetensors.torch import load_file
from torch import Tensor

from imagefleet.errors import SetupError
from imagefleet.telemetry.logs import log
from imagefleet.validation import JSONDict
from worker.engine import checkpoint
from worker.engine.families import prompts, reading
from worker.engine.families.table import Model
from worker.engine.files.safetensors import Tensors
from worker.engine.flow import families, schedules, text
from worker.engine.flow.families import FlowFamily
from worker.engine.networks import int8
from worker.engine.slots import memory

#: How ComfyUI's files begin the names of a transformer.
_PREFIX = "model.diffusion_model."

#: A scale of float8 weights, by its names beside the layer's, and tensors that have no use here.
_SCALES = ("weight_scale", "scale_weight")
_UNUSED = (".input_scale", ".scale_input", ".comfy_quant", "scaled_fp8")

_TYPES = {torch.float32, torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class FlowCheckpoint(Model):
    """A transformer and its VAE on their device, and the schedule's configuration."""

    family: FlowFamily
    #: The folder with the text encoder and its tokenizer.
    folder: Path
    vae: AutoencoderKLFlux2
    scheduler: JSONDict
    text_width: int

    @property
    def channels(self) -> int:
        return int(self.unet.config.in_channels)

    @property
    def conditioning_channels(self) -> int:
        return 0

    @property
    def networks(self) -> JSONDict:
        return {self.family.backbone: self.unet, "vae": self.vae}


def family_of(model: Path) -> FlowFamily | None:
    """The family of a folder or a file; None if it is no transformer of flows."""
    if model.is_dir():
        return families.of_folder(reading.read_json(model / "model_index.json"))
    return families.of_file(model)


def load_checkpoint(
    model: Path,
    family: FlowFamily,
    device: torch.device,
    dtype: torch.dtype,
    config: Path | None = None,
    *,
    is_int8: bool | None = False,
) -> FlowCheckpoint:
    """Loads a checkpoint; raises SetupError if it lacks something, is damaged or built otherwise.

    *is_int8*: most weights are held in int8; None: where a GPU has no room for them as they are.
    *config*: the folder with what a single file has not; by default that of its name beside it.
    """
    if dtype not in _TYPES:
        raise SetupError(
            f"{family.name} was trained in bfloat16, and float16 may overflow: use --precision"
            " bfloat16 or float32"
        )
    folder = model if model.is_dir() else config or model.with_suffix("")
    for part in ("vae", "text_encoder"):
        if not (folder / part / "config.json").is_file():
            raise SetupError(
                f"{str(folder)!r} has no {part}/config.json: a model has the parts vae,"
                " text_encoder and tokenizer in its folder; for a single file of the transformer,"
                " give one that has them with --config"
            )
    transformer = _read_transformer(model, folder, family)
    scheduler = reading.read_json(folder / "scheduler" / "scheduler_config.json")
    scheduler = scheduler or dict(schedules.USUAL_CONFIG)
    schedules.check_config(scheduler, folder.name)
    vae = reading.read_network(family.vae, folder / "vae")
    width = text.states_width(folder, family.text)
    if not family.fits(transformer.config, vae.config, width):
        raise SetupError(
            f"the parts of {str(model)!r} do not fit each other, or it is not {family.name}"
        )
    networks = {family.backbone: transformer, "vae": vae}
    if is_int8 is None:
        whole_bytes = checkpoint.weight_bytes(networks.values(), dtype)
        is_int8 = memory.has_no_room_for_weights(device, whole_bytes)
        if is_int8:
            log.info(
                "most weights are held in int8: whole, the model would take"
                f" {whole_bytes / 2**30:.1f} GiB, and leave this GPU too little to draw with",
                action="weights_in_int8",
            )
    if is_int8:
        int8.quantise(transformer, family.in_int8)
    advice = "" if is_int8 else "; try --precision int8"
    weight_sums = checkpoint.place(
        model, networks, dict.fromkeys(networks, (device, dtype)), advice
    )
    # FLUX.2's latents are patches of 2x2 of its VAE's.
    patch = 2 if isinstance(vae, AutoencoderKLFlux2) else 1
    factor = patch * checkpoint.vae_factor(vae)
    side = int(vae.config.sample_size)
    has_encoder = prompts.has_encoder(folder, text.KIND)
    return FlowCheckpoint(
        name=model.resolve().name if model.is_dir() else model.stem,
        family=family,
        folder=folder,
        unet=transformer,
        vae=vae,
        scheduler=scheduler,
        default_size=(side, side),
        factor=factor,
        text_width=width,
        states_encoder=None if has_encoder else text.encoder_name(folder, family.text),
        weight_sums=weight_sums,
        is_int8=is_int8,
    )


def _read_transformer(model: Path, folder: Path, family: FlowFamily) -> Any:
    found = reading.network_config(folder / family.backbone, family.unet_config)
    family.refuse(found)
    if model.is_dir():
        return reading.read_network(family.network, model / family.backbone)
    with reading.named(model):
        weights = {
            key.removeprefix(_PREFIX): each for key, each in load_file(model).items()
        }
        transformer = reading.build(family.network, found)
        reading.assign(transformer, family.convert(_in_plain_types(weights)))
    return transformer


def _in_plain_types(weights: Tensors) -> dict[str, Tensor]:
    """Weights in float8 times their scales, in bfloat16; raises ValueError for other quantised."""
    plain = {}
    for key, weight in weights.items():
        name, _, part = key.rpartition(".")
        if part in _SCALES or key.endswith(_UNUSED):
            continue
        if not weight.is_floating_point():
            raise ValueError(f"{key} is quantised to {weight.dtype}")
        if weight.element_size() == 1:
            scales = (weights.get(f"{name}.{each}") for each in _SCALES)
            scale = next((each for each in scales if each is not None), None)
            exact = weight.float()
            if scale is not None:
                exact *= scale.float().view(-1, *[1] * (weight.dim() - 1))
            weight = exact.bfloat16()  # noqa: PLW2901 - the same in a type that computes
        plain[key] = weight
    return plain
