"""AUTOMATIC1111's txt2img payload: which of its fields a job may carry without being one of ours.

The list is that of `POST /sdapi/v1/txt2img`. A field that would change the picture is refused by
name unless it carries the value that leaves the picture alone; one that would not is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Fields about saving, sending and settings of the web page: no picture depends on them.
WITHOUT_EFFECT = frozenset(
    {
        "comments",
        "do_not_save_grid",
        "do_not_save_samples",
        "force_task_id",
        "infotext",
        "override_settings_restore_afterwards",
        "save_images",
        "send_images",
        "subseed",  # counts only with subseed_strength, which is refused below
    }
)

#: The second pass's own fields count only with `enable_hr`, which is refused below.
SECOND_PASS_PREFIXES = ("hr_", "firstphase_", "firstpass_")

_EMPTY: tuple[object, ...] = (None, "", [], {})

#: Fields that change the picture -> the values with which they do not.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "alwayson_scripts": _EMPTY,
    "denoising_strength": (None, 0, 0.7, 0.75),
    "disable_extra_networks": (None, False),
    "distilled_cfg_scale": (None, 3.5),
    "enable_hr": (None, False),
    "eta": (None, 1),
    "override_settings": _EMPTY,
    "refiner_checkpoint": _EMPTY,
    "refiner_switch_at": (None, 0, 0.8, 1),
    "restore_faces": (None, False),
    "s_churn": (None, 0),
    "s_min_uncond": (None, 0),
    "s_noise": (None, 1),
    "s_tmax": (None, 0),
    "s_tmin": (None, 0),
    "script_args": _EMPTY,
    "script_name": _EMPTY,
    "seed_resize_from_h": (None, -1, 0),
    "seed_resize_from_w": (None, -1, 0),
    "styles": _EMPTY,
    "subseed_strength": (None, 0),
    "tiling": (None, False),
}


def without_neutral_fields(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The payload without those fields of AUTOMATIC1111's that leave the picture alone.

    Raises:
        ValueError: a field that would change the picture, by name.
    """
    remaining = {}
    for name, value in payload.items():
        if name in WITHOUT_EFFECT or name.startswith(SECOND_PASS_PREFIXES):
            continue
        if name not in NEUTRAL_VALUES:
            remaining[name] = value
        elif value not in NEUTRAL_VALUES[name]:
            raise ValueError(
                f"{name} is not supported: it would change the picture; leave it out"
                " or give it the value that switches it off"
            )
    return remaining
