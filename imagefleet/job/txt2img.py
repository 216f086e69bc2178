"""AUTOMATIC1111's payloads of txt2img, img2img and extras: the fields of a job that they set.

Every other field either does not change the image, or is refused by name. The document on jobs has
tables of all of them, which a test compares with these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from imagefleet.job import override_settings
from imagefleet.job.passes import controlnet, extras, hires, img2img

#: Fields about saving, sending and the web page's settings.
WITHOUT_EFFECT = frozenset(
    {
        "comments",
        "do_not_save_grid",
        "do_not_save_samples",
        "force_task_id",
        "override_settings_restore_afterwards",
        "save_images",
        "send_images",
    }
)

_EMPTY: tuple[object, ...] = (None, "", [], {})

#: Fields that change the image -> their neutral values.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "disable_extra_networks": (None, False),
    "distilled_cfg_scale": (None, 3.5),
    "firstphase_height": (None, 0),  # the image's size, even without `enable_hr`
    "firstphase_width": (None, 0),
    "infotext": _EMPTY,  # sets the fields that the payload leaves out
    "refiner_checkpoint": (*_EMPTY, "None", "none"),
    "refiner_switch_at": (None, 0, 0.8, 1),
    "restore_faces": (None, False),
    "script_args": _EMPTY,
    "script_name": _EMPTY,
    "styles": _EMPTY,
    "tiling": (None, False),
}

#: The same with those of all passes.
_WITHOUT_EFFECT = WITHOUT_EFFECT | img2img.WITHOUT_EFFECT | extras.WITHOUT_EFFECT
_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL_VALUES,
    **img2img.NEUTRAL_VALUES,
    **hires.NEUTRAL_VALUES,
    **extras.NEUTRAL_VALUES,
}

#: Fields that matter with a second pass alone, beside those that begin with `hr_`.
_OF_SECOND_PASS = frozenset({"enable_hr", *hires.NEUTRAL_VALUES})

#: Fields of a job for which AUTOMATIC1111 takes null as not given.
_NULL_IS_DEFAULT = frozenset(
    {
        "eta_noise_seed_delta",
        "s_churn",
        "s_min_uncond",
        "s_noise",
        "s_tmax",
        "s_tmin",
        "seed_resize_from_h",
        "seed_resize_from_w",
        "subseed",
        "subseed_strength",
        *(img2img.FIELDS | hires.FIELDS | extras.FIELDS),
    }
)


def fields_of_job(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a job that a payload sets.

    Raises:
        ValueError: an unsupported field would change the image; names it.
    """
    if only_upscales(payload) and extras.IMAGE in payload:
        payload = _with_input(payload)
    begins_with_image, has_second_pass = _begins_with_image(payload), _has_second_pass(payload)
    fields = {}
    for name, value in payload.items():
        is_hires = name.startswith(hires.PREFIX)
        if (
            name in _WITHOUT_EFFECT
            or (not has_second_pass and (is_hires or name in _OF_SECOND_PASS))
            or (not begins_with_image and name == "init_images")
            or (not (begins_with_image or has_second_pass) and name == "denoising_strength")
        ):
            continue
        is_unknown = is_hires and name not in hires.FIELDS
        allowed = _NEUTRAL_VALUES.get(name, (None,) if is_unknown else ())
        if allowed and value not in allowed:
            raise ValueError(
                f"{name} is not supported: it would change the image; remove it or switch it off"
            )
        if not allowed and (value is not None or name not in _NULL_IS_DEFAULT):
            fields[name] = value
    if scripts := fields.pop("alwayson_scripts", None):
        fields["alwayson_scripts"] = controlnet.fields_of_scripts(scripts)
    legacy_name = fields.pop("sampler_index", None)
    if legacy_name and not fields.get("sampler_name"):
        fields["sampler_name"] = legacy_name
    if (settings := fields.pop("override_settings", None)) not in _EMPTY:
        neutral = dict(img2img.NEUTRAL_SETTINGS) if begins_with_image else {}
        neutral |= hires.NEUTRAL_SETTINGS if has_second_pass else {}
        fields |= override_settings.fields(settings, fields, neutral)
    return fields


def only_upscales(payload: Mapping[str, Any]) -> bool:
    """Whether a payload is one of extras, which enlarges an image and draws none."""
    return payload.get("upscaler_1") not in (None, "", "None")


def is_foreign(name: str) -> bool:
    """Whether a field of a payload is none of a job's."""
    return (
        name in _WITHOUT_EFFECT
        or name in _NEUTRAL_VALUES
        or name == extras.IMAGE
        or name.startswith(hires.PREFIX)
    )


def _with_input(payload: Mapping[str, Any]) -> dict[str, Any]:
    """A payload of extras with its image, which has a name of its own, in `init_images`."""
    fields = dict(payload)
    if (image := fields.pop(extras.IMAGE)) not in (None, ""):
        if _begins_with_image(fields):
            raise ValueError(
                f"{extras.IMAGE} and init_images are the same field: keep one of the two"
            )
        fields["init_images"] = [image]
    return fields


def _begins_with_image(payload: Mapping[str, Any]) -> bool:
    return payload.get("init_images") not in (None, "", [])


def _has_second_pass(payload: Mapping[str, Any]) -> bool:
    value = payload.get("enable_hr")
    if isinstance(value, str):  # as tables have it
        value = value.strip().lower()
    return value not in (None, False, 0, "", "0", "false", "f", "no", "n", "off")
