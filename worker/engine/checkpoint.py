"""Loads a checkpoint from local files: a diffusers folder or one `.safetensors` file.

Single files are read here, not by diffusers' `from_single_file`: that needs the Hub or a folder for
the configuration, does not name missing weights, and does not read the text encoder. Their kind was
found before, from the header alone (`worker.files.check`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.loaders.single_file_utils import (
    convert_ldm_clip_checkpoint,
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
    convert_open_clip_checkpoint,
)
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Module
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedModel,
)

from imagefleet.errors import SetupError
from imagefleet.files import contents
from imagefleet.files.safetensors import UnusableError
from imagefleet.job import clip
from imagefleet.telemetry.logs import log
from imagefleet.validation import JSONDict, JSONObject
from worker.engine import checksums, phases
from worker.engine.families import reading, table
from worker.engine.families.table import Config, Family, Model
from worker.engine.files import safetensors
from worker.engine.files.safetensors import Tensors
from worker.engine.kernels.layers import Upsampler
from worker.engine.lora.file import Network
from worker.engine.slots import memory

#: An average of the UNet's weights during training, which some files have beside the weights.
_AVERAGE_PREFIX = "model_ema."

#: A single file's first layer of the UNet: inpainting checkpoints' have more inputs.
_INPUTS = "model.diffusion_model.input_blocks.0.0.weight"

#: Any of them makes a folder a single file's configuration.
_CONFIGURATION = (
    *("tokenizer", "unet/config.json", "vae/config.json", "text_encoder/config.json"),
    *("text_encoder_2/config.json", "scheduler/scheduler_config.json"),
)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Model):
    """The networks of a model of latents on their device, and their noise schedule."""

    tokenizer: CLIPTokenizer
    #: The text encoders, in the order of their vectors.
    text_encoders: Mapping[Network, Any]
    vae: AutoencoderKL
    alphas_cumprod: Tensor
    prediction_type: str

    @property
    def text_encoder(self) -> Any:
        """The first, and of SDXL's refiner the only one."""
        return next(iter(self.text_encoders.values()))

    @property
    def has_text_on_cpu(self) -> bool:
        """True where the GPU's memory is too short for the text encoders."""
        return bool(self.text_encoder.device != self.unet.device)

    @property
    def networks(self) -> JSONDict:
        return {
            self.family.backbone: self.unet,
            "vae": self.vae,
            **{str(name): each for name, each in self.text_encoders.items()},
        }

    @torch.no_grad()
    def exchange(self, other: Checkpoint) -> Checkpoint:
        new = checksums.named_parameters(other.networks)
        for name, tensor in checksums.named_parameters(self.networks).items():
            tensor.copy_(new[name])
        for name, network in self.text_encoders.items():
            buffers = other.text_encoders[name].buffers()
            for own, numbers in zip(network.buffers(), buffers, strict=True):
                own.copy_(numbers)
        for module in self.vae.modules():
            if isinstance(module, Upsampler):
                module.fold()
        return replace(
            other, unet=self.unet, vae=self.vae, text_encoders=self.text_encoders
        )


def load_checkpoint(
    model: Path,
    device: torch.device,
    dtype: torch.dtype,
    config: Path | None = None,
    prediction_type: str | None = None,
    *,
    like: Checkpoint | None = None,
    change: Callable[[Family, JSONObject], None] = lambda *_: None,
) -> Checkpoint:
    """Loads a checkpoint, and calls *change* with its networks before they are summed.

    *config* is a folder with a single file's configuration; *prediction_type* holds where there is
    no configuration of the scheduler.
    Each network has the precision of *like*'s, if given. Raises SetupError if something is missing,
    damaged or of another architecture; names the file.
    """
    if model.is_dir():
        name = model.resolve().name
        folder = model
        found = _read_folder(model)
    else:
        folder = _config_folder(model, config)
        name = model.stem
        found = _read_file(model, folder)
    family = found.family
    networks = found.networks
    if family is table.REFINER and like is None:
        raise SetupError(
            f"{str(model)!r} is {contents.REFINER.name}; {contents.REFINER.advice}"
        )
    unet = networks[family.backbone]
    vae = networks["vae"]
    text_encoders = {name: networks[name] for name in family.networks}
    tokenizer = _find_tokenizer(folder, networks[family.networks[0]].config.vocab_size)
    scheduler = _read_scheduler(folder, "scheduler", family)
    _check_architecture(model, family, networks, tokenizer)
    image_noise = None
    if family.enlarges_image:
        image_noise = reading.image_noise(
            reading.read_json(folder / "model_index.json"),
            _read_scheduler(folder, "low_res_scheduler", family),
            unet.config.num_class_embeds,
        )
    predicted = reading.prediction_type(model, scheduler, prediction_type, found.keys)
    predicted = predicted or family.find_prediction(unet)
    factor = vae_factor(vae)
    if found.has_own_size and predicted in family.native_sides:
        side = family.native_sides[predicted]
        unet.register_to_config(sample_size=side // factor)
    if family.overflows_in_float16:
        # A file's float16 has too few digits to scale.
        Module.to(vae, dtype=torch.float32)
        scale_down(vae)
    change(family, networks)
    placed = _placements(family, networks, device, dtype)
    if like is not None:
        placed |= {name: (device, each.dtype) for name, each in like.networks.items()}
    weight_sums = place(model, networks, placed)
    side = unet.config.sample_size * factor
    return Checkpoint(
        name=name,
        tokenizer=tokenizer,
        text_encoders=text_encoders,
        unet=unet,
        vae=vae,
        alphas_cumprod=reading.alphas_cumprod(model, scheduler, found.keys),
        prediction_type=predicted,
        factor=factor,
        default_size=(side, side),
        weight_sums=weight_sums,
        family=family,
        image_noise=image_noise,
    )


_Placement = tuple[torch.device, torch.dtype]


def _placements(
    family: Family, networks: _Networks, device: torch.device, dtype: torch.dtype
) -> dict[str, _Placement]:
    """Places each network on a device: text encoders on the CPU if the GPU's memory is short."""
    placed = dict.fromkeys(networks, (device, dtype))
    if family.has_large_layers:
        text_bytes = weight_bytes([networks[each] for each in family.networks], dtype)
        others_bytes = weight_bytes(networks.values(), dtype) - text_bytes
        if memory.has_no_room_for_text(device, text_bytes, others_bytes):
            log.info("the text encoders stay on the CPU", action="text_on_cpu")
            placed |= dict.fromkeys(
                family.networks, (torch.device("cpu"), torch.float32)
            )
    return placed


def weight_bytes(networks: Iterable[Module], dtype: torch.dtype) -> int:
    """Bytes that the weights of *networks* take in a type."""
    parameters = itertools.chain.from_iterable(each.parameters() for each in networks)
    return dtype.itemsize * sum(each.numel() for each in parameters)


def place(
    model: Path,
    networks: _Networks,
    placed: Mapping[str, _Placement],
    advice: str = "",
) -> checksums.Sums:
    """Moves a model's networks to their devices; returns the sums of their weights before.

    Raises SetupError if a device has too little memory, with *advice*, or a weight is NaN.
    """
    for name, network in networks.items():
        # diffusers' own to() warns about modules to keep in float32, even if there are none.
        Module.to(network, dtype=placed[name][1])
    # On the CPU, before any of them is on the device.
    weight_sums = checksums.sum_bits(checksums.named_parameters(networks))
    try:
        for name, network in networks.items():
            device, _ = placed[name]
            with phases.timed("move"):
                Module.to(network, device=device)
            if device.type == "cpu":
                # Not mapped from the file: truncating it would kill the process.
                for parameter in network.parameters():
                    parameter.data = parameter.data.clone()
            elif not isinstance(network, PreTrainedModel):  # of transformers: text
                network.to(memory_format=torch.channels_last)
    except torch.cuda.OutOfMemoryError as error:
        raise SetupError(
            f"the GPU's memory is too short for the model: {reading.brief(error)}{advice}"
        ) from error
    try:
        safetensors.refuse_damaged(checksums.named_parameters(networks))
    except UnusableError as error:
        # Else all images would be NaN, and each node would blame itself.
        raise SetupError(f"{str(model)!r} is damaged: it {error}") from error
    return weight_sums


#: float16 then holds what would be 2.1 million, and has all its digits down to what would be 0.002.
VAE_FACTOR = 1 / 32


@torch.no_grad()
def scale_down(vae: Any, factor: float = VAE_FACTOR) -> None:
    """Makes SDXL's VAE fit float16, by powers of two; in place, before its weights are rounded.

    Between its first and its last layer, the decoder reaches values beyond float16's 65,504, and
    the image is NaN. But each of these values is only added to others, convolved, or normalised in
    groups, and a group norm does not care about a factor. So all of them are computed at a 32nd of
    their size: what writes them has its weights divided, and the norms that read them their
    epsilon. In float32 the images stay the same to the bit: only exponents change.
    """
    decoder = vae.decoder
    resnets = [
        resnet
        for block in (decoder.mid_block, *decoder.up_blocks)
        for resnet in block.resnets
    ]
    attentions = [each for each in decoder.mid_block.attentions if each is not None]
    samplers = [
        each.conv for block in decoder.up_blocks for each in block.upsamplers or ()
    ]
    # What a first convolution writes is read by the second norm alone.
    norms = [decoder.conv_norm_out, *(each.group_norm for each in attentions)]
    norms += [norm for resnet in resnets for norm in (resnet.norm1, resnet.norm2)]
    # Their input keeps its size, and that of the others is scaled already.
    writers = [decoder.conv_in, *(each.to_out[0] for each in attentions)]
    writers += [conv for resnet in resnets for conv in (resnet.conv1, resnet.conv2)]
    others = [each.conv_shortcut for each in resnets if each.conv_shortcut is not None]
    for layer in writers:
        layer.weight.mul_(factor)
    for layer in (*writers, *others, *samplers):
        if layer.bias is not None:
            layer.bias.mul_(factor)
    for norm in norms:
        norm.eps *= factor**2


def vae_factor(vae: AutoencoderKL) -> int:
    """Pixels per latent, in each direction."""
    return int(2 ** (len(vae.config.block_out_channels) - 1))


#: The UNet, the VAE and the text encoders, by the names of their folders.
_Networks = JSONDict


class _Read(NamedTuple):
    family: Family
    networks: _Networks
    #: The names of a single file's tensors; empty for a folder.
    keys: Collection[str] = ()
    #: True if the family knows the native size, not a configuration.
    has_own_size: bool = False


_Parts = dict[str, tuple[type[Any], Config]]


def parts_of(family: Family) -> _Parts:
    """The networks' classes, and their configurations where a single file has none."""
    parts: _Parts = {
        family.backbone: (UNet2DConditionModel, family.unet_config),
        "vae": (AutoencoderKL, family.vae_config),
    }
    for encoder in family.text_encoders:
        model = (
            CLIPTextModelWithProjection if encoder.rules.has_pooled else CLIPTextModel
        )
        parts[encoder.network] = (model, encoder.config)
    return parts


def _read_folder(folder: Path) -> _Read:
    unet, text_encoder = (
        reading.read_json(folder / part / "config.json")
        for part in ("unet", "text_encoder")
    )
    family = table.of_folder(unet, text_encoder)
    return _Read(
        family,
        {
            name: reading.read_network(network, folder / name)
            for name, (network, _) in parts_of(family).items()
        },
    )


def _config_folder(model: Path, config: Path | None) -> Path:
    """The folder of a single file's configuration, if anywhere: without one it is SD1.5's."""
    candidates = [config] if config else [model.with_suffix(""), model.parent]
    for folder in candidates:
        if any((folder / name).exists() for name in _CONFIGURATION):
            return folder
    if config:
        raise SetupError(
            f"--config {str(config)!r} has no configuration: neither a tokenizer folder nor, say,"
            " unet/config.json; SD1.5's checkpoints need no --config"
        )
    return candidates[0]


def _read_file(path: Path, config: Path) -> _Read:
    with reading.named(path):
        weights = {
            key: weight
            for key, weight in load_file(path).items()
            if not key.startswith(_AVERAGE_PREFIX)
        }
        if (family := table.of_file(weights)) is None:
            raise SetupError(f"{str(path)!r} is no checkpoint of Stable Diffusion")
        parts = parts_of(family)
        channels = weights[_INPUTS].shape[1]
        parts[family.backbone] = (
            UNet2DConditionModel,
            {**family.unet_config, "in_channels": channels},
        )
        networks = {
            name: reading.build(network, reading.network_config(config / name, default))
            for name, (network, default) in parts.items()
        }
        unet = networks[family.backbone]
        vae = networks["vae"]
        reading.assign(unet, convert_ldm_unet_checkpoint(weights, unet.config))
        reading.assign(vae, convert_ldm_vae_checkpoint(weights, vae.config))
        for encoder in family.text_encoders:
            text_encoder = networks[encoder.network]
            own = (
                convert_open_clip_checkpoint(text_encoder, weights, encoder.open_clip)
                if encoder.open_clip
                else convert_ldm_clip_checkpoint(weights)
            )
            reading.assign(text_encoder, own)
            _number_positions(path, own, text_encoder)
    has_own_size = not (config / family.backbone / "config.json").is_file()
    return _Read(family, networks, weights.keys(), has_own_size)


def _number_positions(path: Path, weights: Tensors, network: Any) -> None:
    """Takes positions as they are in the file, as AUTOMATIC1111 1.10, and warns of wrong ones.

    Merging in float16 leaves them in many files: whole numbers below what they were.
    """
    found = next(
        (weights[key] for key in weights if key.endswith("position_ids")), None
    )
    module = next(
        (each for each in network.modules() if hasattr(each, "position_ids")), None
    )
    if found is None or module is None or found.numel() != module.position_ids.numel():
        return
    right = module.position_ids
    numbers = found.to(torch.int64).clamp(0, right.numel() - 1).view_as(right)
    if wrong := int((numbers != right).sum()):
        module.position_ids = numbers
        log.warning(
            f"{wrong} of the position_ids of {path.name!r} are damaged: it draws with them, as"
            " AUTOMATIC1111 does",
            action="positions_damaged",
        )


def _find_tokenizer(checkpoint: Path, vocabulary_size: int) -> CLIPTokenizer:
    folder = clip.tokenizer_of(checkpoint, vocabulary_size)
    if not folder.is_dir():
        raise SetupError(
            f"the model's tokenizer is missing: {str(folder)!r}; its text encoder has"
            f" {vocabulary_size:,} tokens, and CLIP's tokenizer {clip.VOCABULARY_SIZE:,}"
        )
    with reading.named(folder, "the tokenizer "):
        return CLIPTokenizer.from_pretrained(folder, local_files_only=True)


def _check_architecture(
    model: Path, family: Family, networks: _Networks, tokenizer: CLIPTokenizer
) -> None:
    unet = networks[family.backbone].config
    encoders = [networks[each].config for each in family.networks]
    width = sum(encoder.hidden_size for encoder in encoders)
    added_type = "text_time" if family.has_size_ids else None
    added = None
    if family.has_size_ids:
        numbers = len(family.size_ids(0, 0)) * (unet.addition_time_embed_dim or 0)
        added = numbers + encoders[-1].projection_dim
    # Beside the latents, inpainting takes as many and a mask.
    latents = unet.out_channels
    beside = {table.IMAGE_CHANNELS} if family.enlarges_image else {0, latents + 1}
    if (
        unet.cross_attention_dim != width
        or unet.addition_embed_type != added_type
        or (added and unet.projection_class_embeddings_input_dim != added)
        or unet.class_embed_type is not None
        or (unet.num_class_embeds is not None) != family.enlarges_image
        or unet.in_channels - latents not in beside
    ):
        raise SetupError(f"{str(model)!r} does not have {family.name}'s architecture")
    if not isinstance(unet.sample_size, int):
        raise SetupError(
            f"{str(model)!r} has no native size: sample_size in unet/config.json must be a number"
        )
    # On a GPU, a token id out of range is a device-side assert, which ends the process.
    if any(len(tokenizer) > encoder.vocab_size for encoder in encoders):
        raise SetupError(
            f"the tokenizer of {str(model)!r} belongs to another text encoder"
        )


def _read_scheduler(folder: Path, part: str, family: Family) -> JSONObject:
    return (
        reading.read_json(folder / part / "scheduler_config.json")
        or family.scheduler_config
    )
