"""Identifies a safetensors file by the names and shapes of tensors in its header."""

import re
from pathlib import Path
from typing import NamedTuple

from imagefleet.files.safetensors import Header, read_header

#: The key in a file's metadata under which diffusers writes peft's configuration of each network.
ADAPTER_METADATA = "lora_adapter_metadata"

_ONLY_THESE = (
    "imagefleet generates with checkpoints of Stable Diffusion 1.x, 2.x and SDXL, and with"
    " FLUX.2-klein-4B"
)
_WHOLE = "use the version of the checkpoint that has everything in one file"
_FROM_TEXT = "imagefleet generates from text"

#: The format that a file of text states names in its metadata.
TEXT_STATES_FORMAT = "imagefleet text states 1"


class Content(NamedTuple):
    """A type of file content: its name for messages, with the article, and its use."""

    name: str
    #: Advice for a file that has no use here.
    advice: str = _ONLY_THESE
    #: The name of the kind of file (`imagefleet.files.kinds`) that it can be stored as.
    use: str | None = None
    family: str = ""


SD1 = Content("a Stable Diffusion 1.x checkpoint", use="model", family="SD 1.x")
SD2 = Content("a Stable Diffusion 2.x checkpoint", use="model", family="SD 2.x")
SDXL = Content("an SDXL checkpoint", use="model", family="SDXL")
X4_UPSCALER = Content("an x4 upscaler checkpoint", use="model", family="SD x4 upscaler")
KLEIN = Content("a FLUX.2-klein-4B checkpoint", use="model", family="FLUX.2-klein")
KLEIN_BASE = Content(
    "a FLUX.2-klein-base-4B checkpoint", use="model", family="FLUX.2-klein base"
)
SD1_LORA = Content("a LoRA for Stable Diffusion 1.x", use="lora", family="SD 1.x")
SD2_LORA = Content("a LoRA for Stable Diffusion 2.x", use="lora", family="SD 2.x")
SDXL_LORA = Content("a LoRA for SDXL", use="lora", family="SDXL")

KLEIN_LORA = Content("a LoRA for FLUX.2-klein-4B", use="lora", family="FLUX.2-klein")

#: Its licence, the FLUX Non-Commercial License, has no room for a fleet that serves a product.
KLEIN_9B = Content(
    "FLUX.2-klein-9B",
    "its weights are for non-commercial use alone (FLUX Non-Commercial License): use"
    " FLUX.2-klein-4B, which is Apache-2.0",
)

_OTHER_LORA = Content(
    "a LoRA for another architecture (Flux, SD3 or similar)",
    "imagefleet uses LoRAs for Stable Diffusion 1.x, 2.x, SDXL and FLUX.2-klein-4B",
)

REFINER = Content("an SDXL refiner checkpoint", family="SDXL refiner")
VAE = Content("a VAE", use="vae")
_TEXT_ENCODER = Content("a text encoder alone", _WHOLE)
EMBEDDING = Content("a textual inversion embedding", use="embedding")
UPSCALER = Content("an upscaler", use="upscaler")
CONTROLNET = Content("a ControlNet", use="controlnet")
TEXT_STATES = Content("the text states of a prompt", use="text")

#: Patterns for the names of tensors, by the content that they tell; the first that occurs decides.
_TELLING_NAMES = {
    CONTROLNET: (
        r"^(control_model\.|(module\.)?controlnet_|lora_controlnet$|(.+\.)?input_hint_block\.)"
    ),
    Content("an IP-Adapter", "imagefleet does not use adapters"): (
        r"^(ip_adapter\.|image_proj(_model)?\.)"
    ),
    Content("a T2I-Adapter", "imagefleet does not use adapters"): (
        r"^adapter\.|^body\.\d+\.(resnets|block1|in_conv)\b"
    ),
    Content("a motion module (AnimateDiff)", "imagefleet generates single images"): (
        r"\bmotion_modules\."
    ),
    EMBEDDING: r"^(emb_params|clip_[gl]|text_encoders_[01])$",
    SD1_LORA: (
        r"^(lora|lycoris|oft)_|[._]lora_([AB]|down|up)\b|[._]lora(_linear_layer)?\.(down|up)\."
        r"|\.(hada_w1_a|lokr_w[12](_a)?|oft_blocks|dora_scale)$"
    ),  # or for another architecture
    Content(
        "a whole pipeline in diffusers' key names",
        "save it as a folder in diffusers format",
    ): r"^unet\.(conv_in|down_blocks)\.",
    Content("a Stable Diffusion 3 checkpoint"): (
        r"^(model\.diffusion_model\.)?joint_blocks\."
    ),
    Content("a HunyuanVideo checkpoint"): r"(^|\.)txt_in\.individual_token_refiner\.",
    KLEIN: r"^(model\.diffusion_model\.)?double_stream_modulation_img\.lin",
    Content("a Flux checkpoint"): (
        r"^(model\.diffusion_model\.)?(double_blocks\.|single_transformer_blocks\.)"
    ),
    Content("a Stable Cascade checkpoint"): (
        r"^(model\.diffusion_model\.)?(clip_txt_mapper|clip_mapper|clf\.1)\b"
    ),
    Content("a diffusion transformer (SD3, Z-Image, Wan, Qwen-Image or similar)"): (
        r"^(model\.diffusion_model\.|net\.)?(double_layers|double_stream_blocks"
        r"|transformer_blocks|patchify_proj|patch_embedding|cap_embedder|x_embedder|adaln_single"
        r"|pos_embed|txt_in|blocks\.\d+\.|layers\.\d+\.)"
    ),
    REFINER: r"^conditioner\.embedders\.0\.model\.",
    SDXL: r"^conditioner\.embedders\.",
    SD1: r"^model\.diffusion_model\.input_blocks\.",  # or another with a UNet
    Content("the averaged weights (EMA) of a checkpoint alone", _WHOLE): (
        r"^model_ema\."
    ),
    Content("the UNet of a checkpoint alone", _WHOLE): (
        r"^(diffusion_model\.)?(input_blocks|time_embed|time_embedding)\."
    ),
    VAE: r"^(first_stage_model\.|vae\.)?decoder\.conv_in\.",
    Content(
        "a tiny VAE (TAESD) or a part of a VAE", "give workers a folder with --taesd"
    ): (r"^(first_stage_model\.|vae\.)?encoder\.conv_in\.|^taesd_|^post_quant_conv\."),
    _TEXT_ENCODER: (
        r"^(cond_stage_model\.)?(transformer\.)?(text_model\.|resblocks\.|text_projection)"
        r"|^(embeddings\.token_embedding|encoder\.block\.|shared\.weight|model\.layers\.)"
    ),
    Content("an image encoder alone"): r"^(vision_model|visual)\.",
    UPSCALER: (
        r"^(conv_first\.|(params|params_ema|model)\.\d|body\.\d+\.rdb|RRDB_trunk\.|model\.1\.sub)"
    ),
}

#: The width of the prompt's encoding, which the UNet's cross-attention takes in.
_BY_CONTEXT = {1024: SD2, 1280: REFINER, 2048: SDXL}
_LORA_BY_CONTEXT = {1024: SD2_LORA, 1280: SDXL_LORA, 2048: SDXL_LORA}

#: The tensors of the text encoders; SDXL's second one is the refiner's first.
_TEXT_ENCODERS = {
    SDXL: r"^conditioner\.embedders\.1\.",
    REFINER: r"^conditioner\.embedders\.0\.model\.",
    SD2: r"^cond_stage_model\.model\.",
    SD1: r"^cond_stage_model\.transformer\.",
}

#: Names of tensors that others have beside all that one of these has.
_ALIKE = {
    Content(
        "a checkpoint of another noise than Stable Diffusion's (Playground v2.5, CosXL)"
    ): r"^edm_(mean|std|vpred\.)",
    Content(
        "a checkpoint of quantised weights with scales of their own",
        "use the version in float16, bfloat16 or plain float8",
    ): r"^(scaled_fp8|.+\.(scale_weight|weight_scale|comfy_quant))$",
}

#: Inputs of the UNet: the latents that are drawn, and those of another image, or the three colours
#: of one that is enlarged. Inpainting checkpoints have nine, for a mask and a masked image: they
#: are of their family's kind.
_EDITING_INPUTS = 8
_UPSCALER_INPUTS = 7

#: The first layer of a VAE's decoder, and the channels of the latents that it takes.
_VAE_INPUT = re.compile(r"decoder\.conv_in\.weight$")
_LATENTS = 4

#: FLUX.2's layer that takes the text in, and the width of that of klein-9B.
_TEXT_INPUT = re.compile(r"(^|\.)txt_in\.weight$")
KLEIN_9B_TEXT_WIDTH = 12288

_INPUTS = "model.diffusion_model.input_blocks.0.0.weight"
_CROSS_ATTENTION = re.compile(r"\.attn2\.to_k\.weight$")
_LORA_CROSS_ATTENTION = re.compile(
    r"attn2[._]to_k[._].*(lora_down|lora_A|lora\.down|lora_linear_layer\.down|hada_w1_b)\b"
)
_SDXL_LORA_NAME = re.compile(
    r"^(lora_te2_|text_encoder_2\.|lora_unet_(input_blocks|output_blocks|middle_block)_)"
    r"|transformer_blocks[._][1-9]",
    re.MULTILINE,
)
_OTHER_LORA_NAME = re.compile(
    r"(double|single|joint)_blocks[._]|^(lora_)?transformer[._]|single_transformer_blocks[._]"
    r"|^(diffusion_model|lora_unet)[._](blocks|layers|transformer_blocks)[._]",
    re.MULTILINE,
)

#: Layers of FLUX.2 by diffusers' names; and by its makers' those whose rows are more than FLUX.1's.
_KLEIN_NAME = re.compile(
    r"to_qkv_mlp_proj|ff(_context)?[._]linear_(in|out)"
    r"|(double|single)_stream_modulation|(lora_unet|lycoris)_single_transformer_blocks"
)
_KLEIN_UP = re.compile(
    r"(linear1|_mlp[._]0)[._].*(lora_up|lora_B|hada_w1_a)\b", re.MULTILINE
)
_KLEIN_ROWS = {18432, 27648}

#: How training tools name the base model of a LoRA (ss_base_model_version).
_LORA_BY_BASE = {"sdxl": SDXL_LORA, "sd_v2": SD2_LORA}

_ARCHITECTURE = "modelspec.architecture"
_PREDICTION = "modelspec.prediction_type"
_MOST_EMBEDDING_TENSORS = 3

#: The widths of embeddings' vectors.
_EMBEDDING_WIDTHS = {768, 1024, 1280}


def identify(header: Header) -> Content:
    """Identifies the content of a file by its header, tensors' names before author's words."""
    if header.metadata.get("format") == TEXT_STATES_FORMAT:
        return TEXT_STATES
    names = "\n".join(header.shapes)
    if ADAPTER_METADATA in header.metadata:
        return _lora(header, names)
    for content, pattern in _TELLING_NAMES.items():
        if _has(names, pattern):
            tell_apart = _BY_SHAPES.get(content)
            return content if tell_apart is None else tell_apart(header, names)
    if 0 < len(header.shapes) <= _MOST_EMBEDDING_TENSORS and all(
        len(shape) in {1, 2} and shape[-1] in _EMBEDDING_WIDTHS
        for shape in header.shapes.values()
    ):
        return EMBEDDING
    if architecture := header.metadata.get(_ARCHITECTURE):
        return Content(f"a model of the architecture {architecture[:60]!r}")
    first = next(iter(header.shapes), None)
    return Content(
        "an empty safetensors file"
        if first is None
        else f"no known kind of model (its first tensor is {first[:60]!r})"
    )


def of_file(path: Path) -> Content:
    """Identifies a file by its header and its name; raises as `safetensors.read_header`."""
    with path.open("rb") as file:
        return named(identify(read_header(file)), path.stem)


def named(content: Content, name: str) -> Content:
    """What a file of a *name* holds: klein's base has the tensors of the distilled model."""
    is_base = content is KLEIN and "base" in name.lower()
    return KLEIN_BASE if is_base else content


def prediction_type(header: Header) -> str | None:
    """Prediction type of a checkpoint that states it: 'epsilon' or 'v_prediction'."""
    if "v_pred" in header.shapes:  # an empty tensor that marks such files
        return "v_prediction"
    stated = header.metadata.get(_PREDICTION, "").lower()
    return {
        "epsilon": "epsilon",
        "v": "v_prediction",
        "v_prediction": "v_prediction",
    }.get(stated)


def _with_unet(header: Header, names: str) -> Content:
    content = _BY_CONTEXT.get(_size(header, _CROSS_ATTENTION, axis=-1))
    texts = [each for each, pattern in _TEXT_ENCODERS.items() if _has(names, pattern)]
    content = content or next(iter(texts), SD1)
    shape = header.shapes.get(_INPUTS, ())
    inputs = shape[1] if len(shape) > 1 else 0
    if (other := _alike(content, inputs, names)) is not None:
        return other
    if set(texts) - {content}:
        return Content(
            "a mixed checkpoint, with parts of several families of models", _WHOLE
        )
    if not _has(names, r"^model\.diffusion_model\.input_blocks\."):
        return _TEXT_ENCODER
    if content not in texts:
        return Content(f"{content.name} without its text encoder", _WHOLE)
    if not _has(names, r"^(first_stage_model|vae)\."):
        advice = f"{_WHOLE}, or add a VAE (see 'Incomplete files' in docs/models.md)"
        return Content(f"{content.name} without its VAE", advice)
    return X4_UPSCALER if content is SD2 and inputs == _UPSCALER_INPUTS else content


def _alike(content: Content, inputs: int, names: str) -> Content | None:
    """A checkpoint of another sort that has all the tensors of this one."""
    if inputs == _EDITING_INPUTS:
        return Content("a checkpoint that edits pictures (InstructPix2Pix)", _FROM_TEXT)
    if content in {SD1, SD2} and _has(
        names, r"^model\.diffusion_model\.label_emb\.0\."
    ):
        return Content(
            "a checkpoint that draws variations of a picture (unCLIP)", _FROM_TEXT
        )
    return next(
        (each for each, pattern in _ALIKE.items() if _has(names, pattern)), None
    )


def _has(names: str, pattern: str) -> bool:
    return re.search(pattern, names, re.MULTILINE) is not None


def _lora(header: Header, names: str) -> Content:
    if _OTHER_LORA_NAME.search(names):
        # Klein's, by the layers that FLUX.1 has not or not so wide.
        is_wide = _size(header, _KLEIN_UP, axis=0) in _KLEIN_ROWS
        return KLEIN_LORA if is_wide or _KLEIN_NAME.search(names) else _OTHER_LORA
    width = _size(header, _LORA_CROSS_ATTENTION, axis=1)
    if width in _LORA_BY_CONTEXT:
        return _LORA_BY_CONTEXT[width]
    if _SDXL_LORA_NAME.search(names):
        return SDXL_LORA
    base = header.metadata.get("ss_base_model_version", "")
    architecture = header.metadata.get(_ARCHITECTURE, "")
    stated = base or architecture.replace("stable-diffusion-", "sd_").replace(
        "sd_xl", "sdxl"
    )
    return next(
        (
            content
            for start, content in _LORA_BY_BASE.items()
            if stated.startswith(start)
        ),
        SD1_LORA,
    )


def _flux2(header: Header, _names: str) -> Content:
    """FLUX.2's models, by the width of the text that they take."""
    width = _size(header, _TEXT_INPUT, axis=1)
    if width == KLEIN_9B_TEXT_WIDTH:
        return KLEIN_9B
    if width > KLEIN_9B_TEXT_WIDTH:
        advice = "imagefleet draws with FLUX.2-klein-4B"
        return Content("FLUX.2-dev or another large FLUX.2", advice)
    return KLEIN


def _vae(header: Header, _names: str) -> Content:
    is_usable = _size(header, _VAE_INPUT, axis=1) == _LATENTS
    return (
        VAE if is_usable else Content("a VAE of another model (Flux, SD3 or similar)")
    )


#: What tells those apart whose tensors have the same names.
_BY_SHAPES = {
    SD1_LORA: _lora,
    **dict.fromkeys((SD1, SDXL, REFINER), _with_unet),
    VAE: _vae,
    KLEIN: _flux2,
}


def _size(header: Header, pattern: re.Pattern[str], axis: int) -> int:
    """The size along *axis* of the first tensor whose name has *pattern*; 0 without one."""
    for name, shape in header.shapes.items():
        if pattern.search(name) and len(shape) > 1:
            return shape[axis]
    return 0
