"""ControlNets, as the payload of AUTOMATIC1111's extension sd-webui-controlnet has them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    field_validator,
    model_validator,
)

from imagefleet.job.override_settings import name_of_title
from imagefleet.job.passes.adetailer import Details
from imagefleet.job.passes.first import Share
from imagefleet.job.passes.img2img import ImageSource
from imagefleet.job.prompt import SAFE_NAME
from imagefleet.redaction import printable
from imagefleet.validation import JSONDict, Strict

#: The most ControlNet units of a job, which is as many as the extension's page shows at most.
MAX_UNITS = 10

#: The most ControlNets of one pass, as many as sd-webui-controlnet shows at first.
MOST_CONTROLS = 3

#: Numbers and titles of its modes of resizing, as its versions have written them.
_RESIZE_MODES = {
    0: 0,
    1: 1,
    2: 2,
    "Just Resize": 0,
    "Crop and Resize": 1,
    "Resize and Fill": 2,
    "Scale to Fit (Inner Fit)": 1,
    "Inner Fit (Scale to Fit)": 1,
    "Envelope (Outer Fit)": 2,
    "Outer Fit (Shrink to Fit)": 2,
}

#: Fields of preprocessors, of saving and of memory.
WITHOUT_EFFECT = {
    "processor_res",
    "threshold_a",
    "threshold_b",
    "pixel_perfect",
    "guess_mode",
    "batch_images",
    "is_ui",
    "loopback",
    "output_dir",
    "save_detected_map",
    "low_vram",
    "lowvram",
    "hr_option",
    "inpaint_crop_input_image",
    "pulid_mode",
    "union_control_type",
}

#: The values that switch off what is refused.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "module": ("none", "None", None),
    "control_mode": ("Balanced", 0, None),
    **dict.fromkeys(
        ("advanced_weighting", "effective_region_mask", "mask", "mask_image"),
        (None, "", []),
    ),
}


def _resize_mode(value: object) -> object:
    if isinstance(value, str | int) and value in _RESIZE_MODES:
        return _RESIZE_MODES[value]
    raise ValueError("should be 'Just Resize', 'Crop and Resize' or 'Resize and Fill'")


def _model_name(title: str) -> str:
    name = str(name_of_title(title))
    if name == "None" or not SAFE_NAME.fullmatch(name):
        raise ValueError(
            "should be the name of a file in controlnets/ of the container of files: letters,"
            " digits, spaces and _ . + ( ) - only, without a path"
        )
    return name


class Unit(Strict, allow_inf_nan=False):
    """One ControlNet; where it begins and ends is a share of the steps."""

    image: ImageSource
    model: Annotated[str, AfterValidator(_model_name)]
    weight: float = Field(default=1.0, ge=0, le=2)
    guidance_start: Share = 0.0
    guidance_end: Share = 1.0
    resize_mode: Annotated[Literal[0, 1, 2], BeforeValidator(_resize_mode)] = 1

    @model_validator(mode="before")
    @classmethod
    def _read(cls, unit: object) -> object:
        if not isinstance(unit, dict):
            return unit
        ignored = {"enabled", *WITHOUT_EFFECT}
        fields = {name: value for name, value in unit.items() if name not in ignored}
        for name, neutral in UNSUPPORTED.items():
            if fields.pop(name, None) not in neutral:
                but = f", but for {neutral[0]!r}" if neutral[0] else ""
                raise ValueError(f"{name} is not supported{but}: remove it")
        for old, name in (("input_image", "image"), ("guidance", "guidance_end")):
            if old in fields:
                fields.setdefault(name, fields.pop(old))
        image = fields.get("image")
        if isinstance(image, dict) and image.get("mask") in (None, ""):
            fields["image"] = image.get("image")
        return fields

    @model_validator(mode="after")
    def _begins_before_it_ends(self) -> Self:
        if self.guidance_start > self.guidance_end:
            raise ValueError("guidance_start is greater than guidance_end")
        return self


class Script(Strict):
    """The extension's part of `alwayson_scripts`; units that are not enabled are left out."""

    args: tuple[Unit, ...] = Field(default=(), max_length=MAX_UNITS)

    @field_validator("args", mode="before")
    @classmethod
    def _enabled(cls, units: object) -> object:
        if not isinstance(units, list):
            return units
        # Without `enabled`, a unit that is given is meant, as its API once took it.
        return [
            unit
            for unit in units
            if not isinstance(unit, dict)
            or unit.get("enabled", True) not in (False, None)
        ]


class Scripts(Strict):
    """The scripts that run with every image, of which these two are supported."""

    controlnet: Script = Script()
    adetailer: Details = Details()


def check(units: Sequence[Unit]) -> None:
    """Raises ValueError if more units work in all steps than may at once."""
    whole = sum(
        (unit.guidance_start, unit.guidance_end) == (0, 1)
        for unit in units
        if unit.weight
    )
    if whole > MOST_CONTROLS:
        raise ValueError(
            f"alwayson_scripts: the job has {whole} ControlNets; at most {MOST_CONTROLS}"
            " work at once"
        )


def fields_of_scripts(scripts: object, seed: object) -> JSONDict:
    """`alwayson_scripts`, if all is supported; raises ValueError, which names what is not."""
    if not isinstance(scripts, dict):
        raise ValueError(  # noqa: TRY004
            "alwayson_scripts is not supported, but for an object with controlnet or ADetailer"
        )
    found = {}
    for title, script in scripts.items():
        name = str(title).lower()
        if name in ("controlnet", "adetailer"):
            found[name] = script
        elif not _is_neutral(name, script, seed):
            raise ValueError(
                f"alwayson_scripts is not supported with {printable(str(title)[:80])!r}: it may"
                " change the image; remove it"
            )
    return found


def _is_neutral(name: str, script: object, seed: object) -> bool:
    """True if a script of AUTOMATIC1111's own changes nothing beside the payload with this seed."""
    args = (script.get("args") if isinstance(script, dict) else None) or [None]
    if name == "seed":
        return args[0] in {None, -1, seed} and not any(args[1:2])
    return name == "api payload" or (name == "refiner" and not args[0])
