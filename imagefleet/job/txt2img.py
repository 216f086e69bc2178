"""AUTOMATIC1111's txt2img payload: its fields that are no fields of a job.

Every other field either does not change the image, or is refused by name. The document on jobs has
a table of all of them, which a test compares with this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from imagefleet.job import override_settings
from imagefleet.job.passes import fields as passes

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
        *passes.NULL_IS_DEFAULT,
    }
)


def fields_of_job(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a job that a payload sets.

    Raises:
        ValueError: an unsupported field would change the image; names it.
    """
    fields = without_neutral_fields(passes.used(payload))
    fields = {
        name: value
        for name, value in fields.items()
        if value is not None or name not in _NULL_IS_DEFAULT
    }
    legacy_name = fields.pop("sampler_index", None)
    if legacy_name and not fields.get("sampler_name"):
        fields["sampler_name"] = legacy_name
    if (settings := fields.pop("override_settings", None)) not in _EMPTY:
        neutral = passes.neutral_settings(payload)
        fields |= override_settings.fields(settings, fields, neutral)
    return fields


def without_neutral_fields(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The payload without fields that do not change the image.

    Raises:
        ValueError: an unsupported field would change the image; names it.
    """
    remaining = {}
    for name, value in payload.items():
        if has_no_effect(name):
            continue
        if name not in NEUTRAL_VALUES:
            remaining[name] = value
        elif value not in NEUTRAL_VALUES[name]:
            raise ValueError(
                f"{name} is not supported: it would change the image; remove it or switch it off"
            )
    return remaining


def has_no_effect(name: str) -> bool:
    """Whether a field does not change the image, whatever its value."""
    return name in WITHOUT_EFFECT


def is_foreign(name: str) -> bool:
    """Whether a field of a payload is none of a job's."""
    return name in NEUTRAL_VALUES or has_no_effect(name) or passes.is_foreign(name)
