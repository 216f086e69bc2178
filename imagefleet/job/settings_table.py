"""AUTOMATIC1111's fields and settings: what each does, by the pass of a job that it is for.

Sources: the API's models and `shared_options` of its release 1.10 with its own extensions, names of
older releases, and Forge's fields of the second pass. What no row names is refused, but for a job's
own fields; `docs/write_a1111.py` writes the tables of docs/a1111.md from these.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from imagefleet.job.passes import extras, hires, img2img

#: `hires` is the second pass of a job of txt2img; `extras` enlarges an image and draws none.
TXT2IMG, IMG2IMG, HIRES, EXTRAS = PASSES = ("txt2img", "img2img", "hires", "extras")


@dataclass(frozen=True, slots=True)
class Effect:
    """A field or a setting of AUTOMATIC1111: its effect in *passes*; in the others it has none."""

    passes: frozenset[str] = frozenset()
    #: The job's field that it sets; null stands for its default.
    field: str = ""
    #: Values beside null that switch it off, if it sets no field; all others are refused.
    neutral: tuple[object, ...] = ()
    #: The passes whose jobs refuse it, whatever its value: the job says why.
    refused: frozenset[str] = frozenset()


_ALL = frozenset(PASSES)
_DRAWINGS = frozenset({TXT2IMG, IMG2IMG})
_IMG2IMG = frozenset({IMG2IMG})
_HIRES = frozenset({HIRES})
_EXTRAS = frozenset({EXTRAS})
_FROM_PIXELS = frozenset({IMG2IMG, HIRES})
_ENLARGING = frozenset({HIRES, EXTRAS})

_EMPTY: tuple[object, ...] = ("", [], {})

#: The job's field of the same name.
_SAME = "="

#: Effects by the names that have them.
_Effects = Mapping[tuple[str, ...], Effect]


def _by_name(effects: _Effects) -> Mapping[str, Effect]:
    return {
        name: replace(effect, field=name) if effect.field == _SAME else effect
        for names, effect in effects.items()
        for name in names
    }


_FIELDS: _Effects = {
    (
        "comments",
        "do_not_save_grid",
        "do_not_save_samples",
        "force_task_id",
        "save_images",
        "send_images",
        "override_settings_restore_afterwards",
        "include_init_images",
        "seed_enable_extras",  # false leaves out SEED_EXTRAS
        "image_cfg_scale",  # of checkpoints that edit pictures
        "codeformer_weight",
        "show_extras_results",
        "upscale_first",
    ): Effect(),
    ("init_images",): Effect(_IMG2IMG | _EXTRAS, _SAME),
    ("denoising_strength",): Effect(_FROM_PIXELS, _SAME, refused=_EXTRAS),
    (*(hires.FIELDS - {"enable_hr"}),): Effect(_HIRES, _SAME),
    ("enable_hr",): Effect(_HIRES, _SAME, refused=_FROM_PIXELS - _HIRES | _EXTRAS),
    ("resize_mode",): Effect(_IMG2IMG | _EXTRAS, _SAME, refused=frozenset({TXT2IMG})),
    (*(img2img.OWN_FIELDS - {"resize_mode"}),): Effect(
        _IMG2IMG, _SAME, refused=_ALL - _IMG2IMG
    ),
    (*extras.FIELDS,): Effect(_EXTRAS, _SAME, refused=_DRAWINGS),
    (
        "s_churn",
        "s_min_uncond",
        "s_noise",
        "s_tmax",
        "s_tmin",
        "eta_noise_seed_delta",
        "img2img_extra_noise",
        "seed",
        "subseed",
        "subseed_strength",
        "seed_resize_from_h",
        "seed_resize_from_w",
        "steps",
        "cfg_scale",
        "batch_size",
        "n_iter",
    ): Effect(_ALL, _SAME),
    ("disable_extra_networks", "restore_faces"): Effect(_ALL, neutral=(False,)),
    ("tiling",): Effect(_DRAWINGS, _SAME),
    ("infotext", "script_args", "script_name", "styles"): Effect(_ALL, neutral=_EMPTY),
    ("distilled_cfg_scale",): Effect(_ALL, neutral=(3.5,)),
    ("refiner_checkpoint", "refiner_switch_at"): Effect(_DRAWINGS, _SAME),
    # The image's size, even without `enable_hr`.
    ("firstphase_height", "firstphase_width"): Effect(_ALL, neutral=(0,)),
    ("firstpass_image",): Effect(_HIRES, neutral=("",)),
    ("hr_checkpoint_name",): Effect(_HIRES, _SAME),
    ("hr_additional_modules", "hr_cfg", "hr_distilled_cfg"): Effect(_HIRES),
    ("initial_noise_multiplier",): Effect(_ALL, neutral=(1,)),
    ("latent_mask",): Effect(_ALL, neutral=("",)),
    ("mask_round",): Effect(_ALL, neutral=(True,)),
    ("codeformer_visibility", "gfpgan_visibility"): Effect(_ALL, neutral=(0,)),
}

#: How names of settings begin that are all of saving, of its page, or of training.
FAMILIES = (
    "add_",
    "api_",
    "canvas_",
    "dataset_",
    "deepbooru_",
    "directories_",
    "extra_networks_",
    "extra_options_",
    "gradio_",
    "grid_",
    "hide_",
    "hires_fix_show_",
    "img2img_inpaint_",
    "img2img_sketch_",
    "img_",
    "infotext_",
    "interrogate_",
    "js_",
    "keyedit_",
    "ldsr_",
    "live_preview",
    "lora_not_",
    "notification_",
    "outdir_",
    "profiling_",
    "realesrgan_",
    "save_",
    "sd_checkpoint_",
    "sd_checkpoints_",
    "sd_webui_",
    "send_",
    "show_",
    "textual_inversion_",
    "training_",
    "ui_",
)

#: What AUTOMATIC1111 leaves out where `seed_enable_extras` is false.
SEED_EXTRAS = frozenset(
    {"subseed", "subseed_strength", "seed_resize_from_h", "seed_resize_from_w"}
)

_SETTINGS: _Effects = {
    ("sd_model_checkpoint",): Effect(_DRAWINGS, "model"),
    ("CLIP_stop_at_last_layers",): Effect(_DRAWINGS, "clip_skip"),
    (
        "eta_ancestral",
        "eta_ddim",
        "enable_prompt_comments",
        "eta_noise_seed_delta",
        "randn_source",
        "sd_vae",
        "sd_vae_decode_method",
        "tiling",
        "s_churn",
        "s_min_uncond",
        "s_noise",
        "s_tmax",
        "s_tmin",
        "refiner_switch_by_sample_steps",
        "use_downcasted_alpha_bar",
    ): Effect(_DRAWINGS, _SAME),
    ("img2img_extra_noise",): Effect(_FROM_PIXELS, _SAME),
    ("samples_format",): Effect(_ALL, "output"),
    ("webp_lossless",): Effect(_ALL, neutral=(False,)),
    (
        "always_discard_next_to_last_sigma",
        "enable_quantization",
        "face_restoration",
        "lora_functional",
        "no_dpmpp_sde_batch_determinism",
        "pad_cond_uncond",
        "pad_cond_uncond_v0",
        "s_min_uncond_all",
        "sdxl_clip_l_skip",
        "sgm_noise_multiplier",
        "use_old_emphasis_implementation",
        "use_old_hires_fix_width_height",
        "use_old_karras_scheduler_sigmas",
        "use_old_scheduling",
    ): Effect(_DRAWINGS, neutral=(False,)),
    (
        "enable_batch_seeds",
        "enable_emphasis",
        "sd_vae_overrides_per_model_preferences",
        "uni_pc_lower_order_final",
    ): Effect(_DRAWINGS, neutral=(True,)),
    (
        "rho",
        "sdxl_crop_left",
        "sdxl_crop_top",
        "sigma_max",
        "sigma_min",
        "skip_early_cond",
        "token_merging_ratio",
    ): Effect(_DRAWINGS, neutral=(0,)),
    ("sdxl_refiner_high_aesthetic_score",): Effect(_DRAWINGS, neutral=(6,)),
    ("sdxl_refiner_low_aesthetic_score",): Effect(_DRAWINGS, neutral=(2.5,)),
    ("sd_hypernetwork", "sd_lora"): Effect(_DRAWINGS, neutral=("", "None")),
    ("forge_additional_modules",): Effect(_DRAWINGS, neutral=([], "")),
    ("sd_unet",): Effect(_DRAWINGS, neutral=("", "Automatic", "None")),
    ("beta_dist_alpha", "beta_dist_beta"): Effect(_DRAWINGS, neutral=(0.6,)),
    ("comma_padding_backtrack",): Effect(_DRAWINGS, neutral=(20,)),
    ("ddim_discretize",): Effect(_DRAWINGS, neutral=("uniform",)),
    ("emphasis",): Effect(_DRAWINGS, neutral=("Original",)),
    ("fp8_storage",): Effect(_DRAWINGS, neutral=("Disable",)),
    ("k_sched_type",): Effect(_DRAWINGS, neutral=("Automatic", "default")),
    ("postprocessing_enable_in_main_ui",): Effect(_DRAWINGS, neutral=([],)),
    ("sd_noise_schedule",): Effect(_DRAWINGS, neutral=("Default",)),
    ("uni_pc_order",): Effect(_DRAWINGS, neutral=(3,)),
    ("uni_pc_skip_type",): Effect(_DRAWINGS, neutral=("time_uniform",)),
    ("uni_pc_variant",): Effect(_DRAWINGS, neutral=("bh1",)),
    ("img2img_background_color",): Effect(_IMG2IMG, neutral=("#ffffff",)),
    # The last two are further images.
    (
        "img2img_color_correction",
        "img2img_fix_steps",
        "return_mask",
        "return_mask_composite",
    ): Effect(_IMG2IMG, neutral=(False,)),
    ("initial_noise_multiplier",): Effect(_IMG2IMG, neutral=(1,)),
    ("overlay_inpaint",): Effect(_IMG2IMG, neutral=(True,)),
    ("token_merging_ratio_img2img",): Effect(_IMG2IMG, neutral=(0,)),
    ("upscaler_for_img2img",): Effect(_IMG2IMG, neutral=("", "None")),
    ("inpainting_mask_weight",): Effect(_FROM_PIXELS, neutral=(1,)),
    ("sd_vae_encode_method",): Effect(_FROM_PIXELS, neutral=("Full",)),
    ("hires_fix_refiner_pass",): Effect(_HIRES, neutral=("second pass",)),
    ("hires_fix_use_firstpass_conds",): Effect(_HIRES, neutral=(False,)),
    ("token_merging_ratio_hr",): Effect(_HIRES, neutral=(0,)),
    ("DAT_tile", "ESRGAN_tile", "SWIN_tile"): Effect(_ENLARGING, neutral=(192,)),
    ("SCUNET_tile",): Effect(_ENLARGING, neutral=(256,)),
    (
        "DAT_tile_overlap",
        "ESRGAN_tile_overlap",
        "SCUNET_tile_overlap",
        "SWIN_tile_overlap",
    ): Effect(_ENLARGING, neutral=(8,)),
    ("postprocessing_disable_in_extras",): Effect(_EXTRAS, neutral=([],)),
    # Of saving, the picture's text, memory (at most the rounding) and the page; and details of what
    # is refused by another name.
    (
        "clean_temp_dir_at_start",
        "enable_pnginfo",
        "export_for_4chan",
        "font",
        "jpeg_quality",
        "n_rows",
        "samples_filename_pattern",
        "samples_log_stdout",
        "samples_save",
        "target_side_length",
        "temp_dir",
        "use_original_name_batch",
        "use_save_to_dirs_for_ui",
        "use_upscaler_name_as_suffix",
        "auto_backcompat",
        "disable_weights_auto_swap",
        "lora_add_hashes_to_infotext",
        "lora_bundled_ti_to_infotext",
        "auto_vae_precision",
        "auto_vae_precision_bfloat16",
        "batch_cond_uncond",
        "cache_fp16_weight",
        "cross_attention_optimization",
        "disable_mmap_load_safetensors",
        "lora_in_memory_limit",
        "persistent_cond_cache",
        "sd_vae_checkpoint_cache",
        "SWIN_torch_compile",
        "upcast_attn",
        "upscaling_max_images_in_cache",
        "auto_launch_browser",
        "compact_prompt_box",
        "dat_enabled_models",
        "dimensions_and_batch_together",
        "disable_all_extensions",
        "disable_token_counters",
        "disabled_extensions",
        "do_not_show_images",
        "dump_stacks_on_signal",
        "enable_console_prompts",
        "enable_reloading_ui_scripts",
        "enable_upscale_progressbar",
        "gallery_height",
        "hidden_tabs",
        "img2img_batch_show_results_limit",
        "img2img_editor_height",
        "img2img_settings_accordion",
        "include_styles_into_token_counters",
        "interrupt_after_current",
        "list_hidden_files",
        "localization",
        "lora_hide_unknown_for_versions",
        "lora_preferred_name",
        "lora_show_all",
        "memmon_poll_rate",
        "multiple_tqdm",
        "open_dir_button_choice",
        "pin_memory",
        "postprocessing_existing_caption_action",
        "postprocessing_operation_order",
        "prevent_screen_sleep_during_generation",
        "print_hypernet_extra",
        "quicksettings_list",
        "restore_config_state_file",
        "return_grid",
        "samplers_in_dropdown",
        "sd_vae_explanation",
        "set_scale_by_when_changing_upscaler",
        "settings_in_ui",
        "txt2img_settings_accordion",
        "unload_models_when_training",
        "code_former_weight",
        "face_restoration_model",
        "face_restoration_unload",
        "sd3_enable_t5",
    ): Effect(),
}

#: The API of its release 1.10 as installed.
A1111 = "a1111-1.10"

#: The values of fields that a job with these `defaults` leaves out, where they are not a job's own.
DEFAULTS: Mapping[str, Mapping[str, object]] = {
    A1111: {
        "sampler_name": "Euler",
        "scheduler": "Automatic",
        "steps": 50,
        "width": 512,
        "height": 512,
        "randn_source": "GPU",
        "sd_vae_decode_method": "Full",
    }
}

#: Fields of payloads, beside those that simply are fields of a job, and `override_settings`' names.
FIELDS, SETTINGS = _by_name(_FIELDS), _by_name(_SETTINGS)
