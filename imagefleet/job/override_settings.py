"""AUTOMATIC1111's `override_settings`: its server's settings, changed for one job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from imagefleet import validation
from imagefleet.job import samplers
from imagefleet.redaction import printable

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
    "sd_vae_decode_method": "sd_vae_decode_method",
}

#: The setting that a sampler takes its eta from; a payload's own `eta` goes before it.
_ETA = {"ddim": "eta_ddim", "ddim_cfgpp": "eta_ddim"}
_USUAL_ETA = "eta_ancestral"

#: Settings about saving, sending and showing images, or about features that are refused elsewhere.
WITHOUT_EFFECT = frozenset(
    (
        *("add_model_hash_to_info", "add_model_name_to_info", "add_user_name_to_info"),
        *("add_version_to_infotext", "enable_pnginfo", "lora_add_hashes_to_infotext"),
        *("do_not_show_images", "export_for_4chan", "jpeg_quality", "webp_lossless"),
        *("return_grid", "target_side_length", "use_original_name_batch"),
        *("code_former_weight", "face_restoration_model", "face_restoration_unload"),
        *("disable_mmap_load_safetensors", "lora_in_memory_limit", "lora_preferred_name"),
        *("memmon_poll_rate", "multiple_tqdm", "persistent_cond_cache"),
        *("sd_checkpoint_cache", "sd_checkpoints_limit", "sd_checkpoints_keep_in_cpu"),
        # These change at most the rounding.
        *("batch_cond_uncond", "cross_attention_optimization", "upcast_attn"),
        # These are of img2img.
        *("initial_noise_multiplier", "inpainting_mask_weight", "overlay_inpaint"),
        "upscaler_for_img2img",
    )
)
WITHOUT_EFFECT_PREFIXES = (
    *("directories_", "grid_", "hires_fix_", "img2img_", "live_preview", "outdir_"),
    *("samples_", "save_", "show_progress", "uni_pc_"),
)

_SWITCHED_OFF = (
    *("always_discard_next_to_last_sigma", "enable_quantization", "face_restoration"),
    *("lora_functional", "pad_cond_uncond", "pad_cond_uncond_v0", "s_min_uncond_all"),
    *("sgm_noise_multiplier", "tiling", "use_old_emphasis_implementation"),
    *("use_downcasted_alpha_bar", "use_old_hires_fix_width_height"),
    *("use_old_karras_scheduler_sigmas", "use_old_scheduling"),
)

#: Settings that change the image -> their neutral values.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(_SWITCHED_OFF, (None, False)),
    **dict.fromkeys(("enable_batch_seeds", "enable_emphasis"), (None, True)),
    **dict.fromkeys(
        ("rho", "sigma_max", "sigma_min", "skip_early_cond", "token_merging_ratio"), (None, 0)
    ),
    **dict.fromkeys(("sd_hypernetwork", "sd_lora"), (None, "", "None")),
    **dict.fromkeys(("sd_unet", "sd_vae"), (None, "", "Automatic", "None")),
    "comma_padding_backtrack": (None, 20),
    "emphasis": (None, "Original"),
    "k_sched_type": (None, "Automatic", "default"),
    "sd_noise_schedule": (None, "Default"),
}

_UNSET: tuple[object, ...] = (None, "")

#: A file as AUTOMATIC1111 lists it: `folder/name.safetensors [short hash]`, or a part of that.
_TITLE = re.compile(
    r"(?:.*[/\\])?(?P<name>[^/\\]+?)(?:\.(?:safetensors|ckpt|pth?))?(?: *\[[0-9a-f]{8,64}\])?"
)


def fields(
    settings: object,
    payload: Mapping[str, Any],
    neutral: Mapping[str, tuple[object, ...]],
) -> dict[str, Any]:
    """The fields that *settings* set; raises ValueError where they conflict with *payload*, say."""
    if not isinstance(settings, dict):
        raise ValueError("override_settings: must be an object")  # noqa: TRY004 - for pydantic
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if field := FIELDS.get(name):
            if value not in _UNSET and not _is_others_eta(name, payload):
                found[field] = name_of_title(value) if field == "model" else value
                if payload.get(field) not in (None, found[field]):
                    raise ValueError(
                        f"override_settings.{name} contradicts the field {field}: keep one of the"
                        " two"
                    )
        elif name in neutral:
            _check_neutral(name, value, neutral)
        elif name not in WITHOUT_EFFECT and not name.startswith(WITHOUT_EFFECT_PREFIXES):
            _check_neutral(name, value, NEUTRAL_VALUES)
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


def _check_neutral(name: str, value: object, neutral: Mapping[str, tuple[object, ...]]) -> None:
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
