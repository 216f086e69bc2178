"""AUTOMATIC1111's `override_settings`: its server's settings, changed for one job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from imagefleet import validation
from imagefleet.job import samplers
from imagefleet.redaction import printable

#: Settings that are fields of a job.
FIELDS: Mapping[str, str] = {
    "CLIP_stop_at_last_layers": "clip_skip",
    "enable_prompt_comments": "enable_prompt_comments",
    "eta_ancestral": "eta",
    "eta_ddim": "eta",
    "eta_noise_seed_delta": "eta_noise_seed_delta",
    "randn_source": "randn_source",
    "s_churn": "s_churn",
    "s_min_uncond": "s_min_uncond",
    "s_noise": "s_noise",
    "s_tmax": "s_tmax",
    "s_tmin": "s_tmin",
    "sd_model_checkpoint": "model",
}

#: The setting that a sampler takes its eta from; a payload's own `eta` goes before it.
_ETA = {"ddim": "eta_ddim"}
_USUAL_ETA = "eta_ancestral"

#: Settings about saving, sending and showing images, or about features that are refused elsewhere.
WITHOUT_EFFECT = frozenset(
    {
        "add_model_hash_to_info",
        "add_model_name_to_info",
        "add_user_name_to_info",
        "add_version_to_infotext",
        "code_former_weight",
        "batch_cond_uncond",  # these change at most the rounding
        "cross_attention_optimization",
        "upcast_attn",
        "disable_mmap_load_safetensors",
        "do_not_show_images",
        "enable_pnginfo",
        "initial_noise_multiplier",  # this and the next ones are of img2img
        "inpainting_mask_weight",
        "overlay_inpaint",
        "upscaler_for_img2img",
        "export_for_4chan",
        "face_restoration_model",
        "face_restoration_unload",
        "jpeg_quality",
        "lora_add_hashes_to_infotext",
        "lora_in_memory_limit",
        "lora_preferred_name",
        "memmon_poll_rate",
        "multiple_tqdm",
        "persistent_cond_cache",
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
    "hires_fix_",
    "img2img_",
    "live_preview",
    "outdir_",
    "samples_",
    "save_",
    "show_progress",
    "uni_pc_",
)

#: Settings that change the image -> their neutral values.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "always_discard_next_to_last_sigma": (None, False),
    "comma_padding_backtrack": (None, 20),
    "enable_batch_seeds": (None, True),
    "emphasis": (None, "Original"),
    "enable_emphasis": (None, True),
    "enable_quantization": (None, False),
    "face_restoration": (None, False),
    "k_sched_type": (None, "Automatic", "default"),
    "lora_functional": (None, False),
    "pad_cond_uncond": (None, False),
    "pad_cond_uncond_v0": (None, False),
    "rho": (None, 0),
    "s_min_uncond_all": (None, False),
    "sd_hypernetwork": (None, "", "None"),
    "sd_lora": (None, "", "None"),
    "sd_noise_schedule": (None, "Default"),
    "sd_unet": (None, "", "Automatic", "None"),
    "sd_vae": (None, "", "Automatic", "None"),
    "sd_vae_decode_method": (None, "Full"),
    "sgm_noise_multiplier": (None, False),
    "sigma_max": (None, 0),
    "sigma_min": (None, 0),
    "skip_early_cond": (None, 0),
    "tiling": (None, False),
    "token_merging_ratio": (None, 0),
    "use_old_emphasis_implementation": (None, False),
    "use_downcasted_alpha_bar": (None, False),
    "use_old_hires_fix_width_height": (None, False),
    "use_old_karras_scheduler_sigmas": (None, False),
    "use_old_scheduling": (None, False),
}

_UNSET: tuple[object, ...] = (None, "")

#: A file as AUTOMATIC1111 lists it: `folder/name.safetensors [short hash]`, or a part of that.
_TITLE = re.compile(
    r"(?:.*[/\\])?(?P<name>[^/\\]+?)(?:\.(?:safetensors|ckpt|pth?))?(?: *\[[0-9a-f]{8,64}\])?"
)


def fields(
    settings: object,
    payload: Mapping[str, Any],
    neutral: Mapping[str, tuple[object, ...]] = MappingProxyType({}),
) -> dict[str, Any]:
    """The fields of a job that *settings* set; *payload* has those that are given as well.

    *neutral* has neutral values of further settings that change the job's image. Raises ValueError
    if a setting is not supported, or contradicts a field; names it.
    """
    if not isinstance(settings, dict):
        raise ValueError("override_settings: must be an object")  # noqa: TRY004 - for pydantic
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if field := FIELDS.get(name):
            if value not in _UNSET and not _is_others_eta(name, payload):
                found[field] = name_of_title(value) if field == "model" else value
                _refuse_conflict(name, field, found[field], payload)
        elif name in neutral:
            _refuse_change(name, value, neutral)
        elif name not in WITHOUT_EFFECT and not name.startswith(WITHOUT_EFFECT_PREFIXES):
            _refuse_change(name, value, NEUTRAL_VALUES)
    return found


def _is_others_eta(name: str, payload: Mapping[str, Any]) -> bool:
    """Whether a setting is eta, but another sampler's, or the payload has its own."""
    if FIELDS[name] != "eta":
        return False
    sampler = samplers.NAMES.get(str(payload.get("sampler_name")).lower())
    key = sampler.key if sampler else ""
    return payload.get("eta") is not None or name != _ETA.get(key, _USUAL_ETA)


def name_of_title(title: object) -> object:
    """The name of a checkpoint's file or folder, by which workers know it."""
    match = _TITLE.fullmatch(title) if isinstance(title, str) else None
    return match["name"] if match else title


def _refuse_conflict(name: str, field: str, value: object, payload: Mapping[str, Any]) -> None:
    given = payload.get(field)
    if given not in (None, value):
        raise ValueError(
            f"override_settings.{name} contradicts the field {field}: keep one of the two"
        )


def _refuse_change(name: str, value: object, neutral: Mapping[str, tuple[object, ...]]) -> None:
    if name not in neutral:
        hint = validation.suggestion(name, [*FIELDS, *NEUTRAL_VALUES])
        raise ValueError(
            f"override_settings.{printable(name[:80])} is not supported: it may change the image;"
            f" remove it{hint}"
        )
    if value not in neutral[name]:
        raise ValueError(
            f"override_settings.{name} is not supported: it would change the image; remove it or"
            " switch it off"
        )
