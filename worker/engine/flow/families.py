"""The families of flow-matching transformers: a row each, with its network and its text rule."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from diffusers.loaders.single_file_utils import (
    convert_flux2_transformer_checkpoint_to_diffusers,
)
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor

from imagefleet.errors import SetupError
from imagefleet.files import contents
from imagefleet.files.safetensors import MalformedError
from worker.engine.families.table import Config, Family
from worker.engine.files.safetensors import Tensors
from worker.engine.flow.text import TextRule
from worker.engine.lora.original_names import klein_names
from worker.engine.networks.klein import SlotKlein
from worker.engine.networks.thin import ThinNetwork


@dataclass(frozen=True, kw_only=True)
class FlowFamily(Family):
    """One row of the table of transformers; see `Family` for what all families have."""

    #: The class of its pipeline in a folder's model_index.json.
    pipeline: str
    #: The transformer's class in diffusers.
    network: type[Any]
    slot_network: Callable[[Any], ThinNetwork]
    text: TextRule
    #: Gives a single file's tensors the names that diffusers has.
    convert: Callable[[dict[str, Tensor]], Tensors]
    #: True if a transformer's configuration fits that of its VAE, and the width of the text.
    fits: Callable[[Any, Any, int], bool]
    #: The VAE's class in diffusers.
    vae: type[Any]
    #: The shift of the schedule of an image of so many of the latents' places, in so many steps.
    mu: Callable[[int, int], float]
    #: A regular expression that finds the layers that may be held in int8, by their paths.
    in_int8: str = "$^"
    #: Raises SetupError for a configuration of a model that is alike and not supported.
    refuse: Callable[[Config], None] = field(default=lambda _: None)
    backbone: Any = "transformer"
    must_fit: bool = True
    has_large_layers: bool = True
    has_slot_weights: bool = False
    long_tokens: tuple[int, ...] = ()


def _refuse_others_of_flux2(config: Config) -> None:
    if config.get("joint_attention_dim") == contents.KLEIN_9B_TEXT_WIDTH:
        raise SetupError(f"{contents.KLEIN_9B.name}: {contents.KLEIN_9B.advice}")
    if config.get("guidance_embeds", True):
        raise SetupError(
            "the model is FLUX.2-dev or one like it, which takes its guidance as an input:"
            " imagefleet draws with FLUX.2-klein-4B"
        )


def _fits_klein(transformer: Any, vae: Any, text_width: int) -> bool:
    channels = 4 * vae.latent_channels
    own = transformer.in_channels, transformer.out_channels or channels
    return (*own, transformer.joint_attention_dim) == (channels, channels, text_width)


KLEIN = FlowFamily(
    name="FLUX.2-klein-4B",
    slug="klein",
    pipeline="Flux2KleinPipeline",
    network=Flux2Transformer2DModel,
    slot_network=SlotKlein,
    text=TextRule(layers=(9, 18, 27)),
    convert=convert_flux2_transformer_checkpoint_to_diffusers,
    fits=_fits_klein,
    vae=AutoencoderKLFlux2,
    mu=compute_empirical_mu,
    # Not what goes back to the stream of tokens, of a feed-forward's wide activations.
    in_int8=r"attn\.(to_[qkv]|add_[qkv]_proj|to_out\.0|to_add_out|to_qkv_mlp_proj)$|linear_in$",
    refuse=_refuse_others_of_flux2,
    original_names=klein_names,
    unet_config={
        "patch_size": 1,
        "in_channels": 128,
        "num_layers": 5,
        "num_single_layers": 20,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 7680,
        "axes_dims_rope": [32, 32, 32, 32],
        "rope_theta": 2000,
        "guidance_embeds": False,
    },
    cell=16,
    plain_tokens=512,
    most_slots=4,
    is_distilled=True,
)

#: The model that klein was distilled from, which is guided.
KLEIN_BASE = replace(
    KLEIN, name="FLUX.2-klein-base-4B", slug="klein_base", is_distilled=False
)

#: The distilled family and the guided one, by the class of their pipeline.
FAMILIES: Mapping[str, tuple[FlowFamily, FlowFamily]] = {
    KLEIN.pipeline: (KLEIN, KLEIN_BASE)
}

_OF_FILES = {contents.KLEIN: KLEIN, contents.KLEIN_BASE: KLEIN_BASE}


def of_folder(index: Config) -> FlowFamily | None:
    """The family of a folder in diffusers' format, by its model_index.json."""
    found = FAMILIES.get(str(index.get("_class_name")))
    if found is None:
        return None
    distilled, guided = found
    return distilled if index.get("is_distilled", False) else guided


def of_file(path: Path) -> FlowFamily | None:
    """The family of a single file, which the base's name alone tells from the distilled one's."""
    try:
        content = contents.of_file(path)
    except (OSError, MalformedError):  # whoever loads it says what it is
        return None
    return _OF_FILES.get(content)
