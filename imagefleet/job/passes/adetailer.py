"""ADetailer by its payload: what a detector finds in a picture is drawn again, part by part.

Its names and defaults are those of the extension's release 25.3 (`adetailer/args.py`).
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from imagefleet.job.passes.first import Guidance, PromptText, Share, Side
from imagefleet.job.passes.img2img import MAX_PADDING, Blur
from imagefleet.job.prompt import SAFE_NAME
from imagefleet.validation import Strict

#: The most detectors of a job, as many as the extension's page shows at first.
MAX_UNITS = 4

MAX_DILATION = 128

#: What is refused unless it has a value that switches it off.
_UNSUPPORTED = (
    "ad_model_classes",
    "ad_mask_merge_invert",
    "ad_use_checkpoint",
    "ad_use_vae",
    "ad_use_sampler",
    "ad_use_noise_multiplier",
    "ad_use_clip_skip",
    "ad_restore_face",
    "ad_controlnet_model",
)
_OFF = (None, "", "None", False)

#: Details of what is switched off.
_WITHOUT_EFFECT = {
    "ad_tab_enable",
    "ad_checkpoint",
    "ad_vae",
    "ad_sampler",
    "ad_scheduler",
    "ad_noise_multiplier",
    "ad_clip_skip",
    "ad_controlnet_module",
    "ad_controlnet_weight",
    "ad_controlnet_guidance_start",
    "ad_controlnet_guidance_end",
    "is_api",
}

#: Fields whose values count only where another one says so.
_GUARDED = {
    "ad_steps": "ad_use_steps",
    "ad_cfg_scale": "ad_use_cfg_scale",
    "ad_inpaint_width": "ad_use_inpaint_width_height",
    "ad_inpaint_height": "ad_use_inpaint_width_height",
}

#: Its words for fields in infotexts, in its order (`ALL_ARGS`), and those of further units.
WORDS = {
    "ad_model": "model",
    "ad_prompt": "prompt",
    "ad_negative_prompt": "negative prompt",
    "ad_confidence": "confidence",
    "ad_mask_filter_method": "method to decide top k masks",
    "ad_mask_k": "mask only top k",
    "ad_mask_min_ratio": "mask min ratio",
    "ad_mask_max_ratio": "mask max ratio",
    "ad_x_offset": "x offset",
    "ad_y_offset": "y offset",
    "ad_dilate_erode": "dilate erode",
    "ad_mask_blur": "mask blur",
    "ad_denoising_strength": "denoising strength",
    "ad_inpaint_only_masked": "inpaint only masked",
    "ad_inpaint_only_masked_padding": "inpaint padding",
    "ad_use_inpaint_width_height": "use inpaint width height",
    "ad_inpaint_width": "inpaint width",
    "ad_inpaint_height": "inpaint height",
    "ad_use_steps": "use separate steps",
    "ad_steps": "steps",
    "ad_use_cfg_scale": "use separate CFG scale",
    "ad_cfg_scale": "CFG scale",
}
ALWAYS_TOLD = {
    "ad_model",
    "ad_confidence",
    "ad_dilate_erode",
    "ad_mask_blur",
    "ad_denoising_strength",
    "ad_inpaint_only_masked",
    "ad_inpaint_only_masked_padding",
}
ORDINALS = ("", " 2nd", " 3rd", " 4th")


def _model_name(title: str) -> str:
    stem = title.removesuffix(".pt").removesuffix(".onnx")
    if not SAFE_NAME.fullmatch(stem):
        raise ValueError(
            "should be the name of a file in detectors/ of the container of files: letters,"
            " digits, spaces and _ . + ( ) - only, without a path"
        )
    if stem.startswith("mediapipe"):
        raise ValueError(f"{stem} is no YOLO: its detectors alone are supported")
    return stem


def _without_tags(text: str) -> str:
    if any(sign in text for sign in ("<lora:", "[SEP]", "[SKIP]", "[PROMPT]")):
        raise ValueError(
            "LoRAs and the words [SEP], [SKIP], [PROMPT] are not supported"
        )
    return text


_Words = Annotated[PromptText, AfterValidator(_without_tags)]


class Detail(Strict, allow_inf_nan=False):
    """One detector, and how what it finds is drawn again."""

    ad_model: Annotated[str, AfterValidator(_model_name)]
    #: Empty: the picture's.
    ad_prompt: _Words = ""
    ad_negative_prompt: _Words = ""
    ad_confidence: Share = 0.3
    ad_mask_filter_method: Literal["Area", "Confidence"] = "Area"
    #: So many of the largest or surest parts; 0: all.
    ad_mask_k: int = Field(default=0, ge=0, le=100)
    ad_mask_min_ratio: Share = 0.0
    #: The least and the largest share of the picture's area that a part has.
    ad_mask_max_ratio: Share = 1.0
    ad_dilate_erode: int = Field(default=4, ge=-MAX_DILATION, le=MAX_DILATION)
    ad_x_offset: int = Field(default=0, ge=-2048, le=2048)
    ad_y_offset: int = Field(default=0, ge=-2048, le=2048)
    ad_mask_blur: Blur = 4
    ad_denoising_strength: Share = 0.4
    ad_inpaint_only_masked: bool = True
    ad_inpaint_only_masked_padding: int = Field(default=32, ge=0, le=MAX_PADDING)
    ad_use_steps: bool = False
    ad_steps: int = Field(default=28, ge=1, le=150)
    ad_use_cfg_scale: bool = False
    ad_cfg_scale: Guidance = 7.0
    ad_use_inpaint_width_height: bool = False
    ad_inpaint_width: Side = 512
    ad_inpaint_height: Side = 512

    def own(self, field: str, usual: Any) -> Any:
        """The value of one of the last fields where it counts, else the picture's."""
        return getattr(self, field) if getattr(self, _GUARDED[field]) else usual

    @model_validator(mode="before")
    @classmethod
    def _read(cls, unit: object) -> object:
        if not isinstance(unit, dict):
            return unit
        fields = {
            name: value for name, value in unit.items() if name not in _WITHOUT_EFFECT
        }
        for name, guard in _GUARDED.items():
            if not unit.get(guard):
                fields.pop(name, None)
        for name in _UNSUPPORTED:
            if fields.pop(name, None) not in _OFF:
                raise ValueError(f"{name} is not supported: switch it off")
        return fields


class Details(Strict):
    """The extension's part of `alwayson_scripts`; its two switches are left out."""

    args: tuple[Detail, ...] = Field(default=(), max_length=MAX_UNITS)

    @model_validator(mode="before")
    @classmethod
    def _enabled(cls, script: object) -> object:
        if not isinstance(script, dict) or not isinstance(script.get("args"), list):
            return script
        switches = [each for each in script["args"] if isinstance(each, bool)]
        if switches[1:2] == [True]:
            raise ValueError("skip_img2img is not supported: set it to false")
        is_on = switches[:1] != [False]
        units = [each for each in script["args"] if is_on and _is_used(each)]
        return {**script, "args": units}


def _is_used(unit: Any) -> bool:
    if not isinstance(unit, dict):
        return not isinstance(unit, bool)  # a switch; all else is refused
    return unit.get("ad_tab_enable", True) and unit.get("ad_model") not in _OFF
