"""AUTOMATIC1111's `override_settings`: its server's settings, changed for one job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from imagefleet import validation
from imagefleet.redaction import printable

#: Settings that are fields of a job.
FIELDS: Mapping[str, str] = {
    "CLIP_stop_at_last_layers": "clip_skip",
    "sd_model_checkpoint": "model",
}

#: Settings about saving, sending and showing images, or about features that are refused elsewhere.
WITHOUT_EFFECT = frozenset(
    {
        "add_model_hash_to_info",
        "add_model_name_to_info",
        "add_user_name_to_info",
        "add_version_to_infotext",
        "code_former_weight",
        "do_not_show_images",
        "export_for_4chan",
        "face_restoration_model",
        "face_restoration_unload",
        "jpeg_quality",
        "return_grid",
        "sd_checkpoint_cache",
        "sd_checkpoints_limit",
        "sd_checkpoints_keep_in_cpu",
        "target_side_length",
        "use_original_name_batch",
        "webp_lossless",
    }
)
WITHOUT_EFFECT_PREFIXES = (
    "directories_",
    "grid_",
    "img2img_",
    "live_preview",
    "outdir_",
    "samples_",
    "save_",
    "show_progress",
)

#: Settings that change the image -> their neutral values.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "always_discard_next_to_last_sigma": (None, False),
    "comma_padding_backtrack": (None, 20),
    "emphasis": (None, "Original"),
    "enable_emphasis": (None, True),
    "eta_ancestral": (None, 1),
    "eta_ddim": (None, 0),
    "eta_noise_seed_delta": (None, 0),
    "s_churn": (None, 0),
    "s_min_uncond": (None, 0),
    "s_noise": (None, 1),
    "s_tmin": (None, 0),
    "sd_hypernetwork": (None, "", "None"),
    "sd_unet": (None, "", "Automatic", "None"),
    "sd_vae": (None, "", "Automatic", "None"),
    "tiling": (None, False),
    "token_merging_ratio": (None, 0),
    "use_old_emphasis_implementation": (None, False),
    "use_old_karras_scheduler_sigmas": (None, False),
}

_UNSET: tuple[object, ...] = (None, "")

#: As AUTOMATIC1111 lists checkpoints: `folder/name.safetensors [short hash]`, or a part of that.
_CHECKPOINT_TITLE = re.compile(
    r"(?:.*[/\\])?(?P<name>[^/\\]+?)(?:\.(?:safetensors|ckpt|pt))?(?: *\[[0-9a-f]{8,64}\])?"
)


def fields(settings: object, payload: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a job that *settings* set; *payload* has those that are given as well.

    Raises:
        ValueError: a setting is not supported, or contradicts a field; names it.
    """
    if not isinstance(settings, dict):
        raise ValueError("override_settings: must be an object")  # noqa: TRY004 - for pydantic
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if field := FIELDS.get(name):
            if value not in _UNSET:
                found[field] = _checkpoint_name(value) if field == "model" else value
                _refuse_conflict(name, field, found[field], payload)
        elif name not in WITHOUT_EFFECT and not name.startswith(WITHOUT_EFFECT_PREFIXES):
            _refuse_change(name, value)
    return found


def _checkpoint_name(title: object) -> object:
    """The name of a checkpoint's file or folder, by which workers know it."""
    match = _CHECKPOINT_TITLE.fullmatch(title) if isinstance(title, str) else None
    return match["name"] if match else title


def _refuse_conflict(name: str, field: str, value: object, payload: Mapping[str, Any]) -> None:
    given = payload.get(field)
    if given not in (None, value):
        raise ValueError(
            f"override_settings.{name} contradicts the field {field}: keep one of the two"
        )


def _refuse_change(name: str, value: object) -> None:
    if name not in NEUTRAL_VALUES:
        hint = validation.suggestion(name, [*FIELDS, *NEUTRAL_VALUES])
        raise ValueError(
            f"override_settings.{printable(name[:80])} is not supported: it may change the image;"
            f" remove it{hint}"
        )
    if value not in NEUTRAL_VALUES[name]:
        raise ValueError(
            f"override_settings.{name} is not supported: it would change the image; remove it or"
            " switch it off"
        )
