"""Fields of AUTOMATIC1111's `POST /sdapi/v1/txt2img` that a job has no use for.

A field that does not change the image is ignored; one that would is refused, unless its value is
neutral.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Fields about saving, sending and the web page's settings.
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
        "subseed",  # matters only with subseed_strength, which is refused below
    }
)

#: The second pass's fields matter only with `enable_hr`, which is refused below.
SECOND_PASS_PREFIXES = ("hr_", "firstphase_", "firstpass_")

_EMPTY: tuple[object, ...] = (None, "", [], {})

#: Fields that change the image -> their neutral values.
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
    """The payload without fields that do not change the image.

    Raises:
        ValueError: an unsupported field would change the image; names it.
    """
    remaining = {}
    for name, value in payload.items():
        if name in WITHOUT_EFFECT or name.startswith(SECOND_PASS_PREFIXES):
            continue
        if name not in NEUTRAL_VALUES:
            remaining[name] = value
        elif value not in NEUTRAL_VALUES[name]:
            raise ValueError(
                f"{name} is not supported: it would change the image; remove it or switch it off"
            )
    return remaining
