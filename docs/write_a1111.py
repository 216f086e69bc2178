"""Writes the tables of a1111.md from those that the program reads payloads by.

python docs/write_a1111.py
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagefleet.job import differences, settings_table
from imagefleet.job.message import Job
from imagefleet.job.settings_table import IMG2IMG, PASSES, TXT2IMG, Effect

PAGE = Path(__file__).with_name("a1111.md")

_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)

_NO_EFFECT = "no effect"

#: The notes on names of one verdict, in the order of the rows; names without a note come after.
_FIELDS = {
    "prompt negative_prompt": "see [prompts](#prompts)",
    "sampler_name scheduler sampler_index": (
        "[all of its samplers and schedules](jobs.md#samplers), and TCD and Turbo"
    ),
    "steps": (
        "DDIM, DDIM CFG++ and PLMS take 2 at least; UniPC takes fewer than 3, which there is an"
        " error"
    ),
    "cfg_scale width height batch_size n_iter": "within the [limits of a job](jobs.md#fields)",
    "seed": "-1 or none: derived from the job's id, so that a retry draws the same",
    "subseed subseed_strength seed_resize_from_w seed_resize_from_h": (
        "left out where `seed_enable_extras` is false"
    ),
    "eta s_churn s_tmin s_tmax s_noise s_min_uncond": "by the samplers that have them there",
    "override_settings": "see [its settings](#its-settings)",
    "alwayson_scripts": (
        "[ControlNet](#controlnet), [ADetailer](#adetailer); `Refiner` and `Seed` switched off;"
        " others are rejected by name"
    ),
    "enable_hr": "the [second pass](#the-second-pass)",
    "hr_scale hr_resize_x hr_resize_y hr_upscaler hr_second_pass_steps hr_sampler_name"
    " hr_scheduler hr_prompt hr_negative_prompt": "",
    "hr_checkpoint_name": "see [another checkpoint](#another-checkpoint)",
    "refiner_checkpoint refiner_switch_at": "see [another checkpoint](#another-checkpoint)",
    "denoising_strength": "0 to 1; 0.75 by default",
    "init_images": "one image: its [name or base64](jobs.md#images-for-a-job); `image` of extras",
    "resize_mode": (
        "`0`, `1` or `2`, but not `3`, the upscaling of the latent; of extras `0`: by"
        " `upscaling_resize`, `1`: to `upscaling_resize_w` x `upscaling_resize_h`"
    ),
    "mask": "as `init_images`: white is drawn anew",
    "mask_blur mask_blur_x mask_blur_y": "0 to 64 pixels; 4 by default",
    "inpainting_fill": "0 (fill) to 3; 0 by default, its page's is 1 (original)",
    "inpaint_full_res inpaint_full_res_padding": (
        "true by default: the masked part alone is drawn"
    ),
    "inpainting_mask_invert": "",
    "upscaler_1 upscaler_2": (
        "`Lanczos`, `Nearest`, or a file of [upscalers/](jobs.md#images-for-a-job); `None`, the"
        " default, for none"
    ),
    "extras_upscaler_2_visibility": "0 to 1: the share of the second in the image",
    "upscaling_resize": "above 0, up to 8; 2 by default",
    "upscaling_resize_w upscaling_resize_h": "64 to 8192; 512 by default",
    "upscaling_crop": "true by default: what is beyond the size is cut off at both sides",
}

#: What a field is that is left out, where that is no value.
_OWN_DEFAULTS = {
    "scheduler": "the one that the sampler's name meant before 1.9",
    "width": "the checkpoint's",
    "height": "the checkpoint's",
    "sd_vae_decode_method": "the worker's",
}

_SETTINGS = {
    "sd_model_checkpoint": "the field `model`",
    "CLIP_stop_at_last_layers": "the field `clip_skip`",
    "eta_ancestral eta_ddim": (
        "also fields: `eta` of all others and of DDIM's kinds, in each pass its sampler's; the"
        " payload's `eta` goes before them"
    ),
    "enable_prompt_comments eta_noise_seed_delta randn_source s_churn s_tmin s_tmax s_noise"
    " s_min_uncond": "the fields of these names; see [noise](#noise)",
    "img2img_extra_noise": "also a field",
    "refiner_switch_by_sample_steps": "also a field",
    "samples_format": "`output`'s format, with `jpeg_quality`, there 80",
    "tiling": "also a field; as there, not in ControlNets, upscalers and TAESD",
    "use_downcasted_alpha_bar": "also a field; not by DDIM, PLMS, UniPC, TCD and LCM",
    "sd_vae": (
        "also a field: a file of [vaes/](jobs.md#images-for-a-job); else the worker's, or the"
        " checkpoint's own"
    ),
    "sd_vae_decode_method": (
        "also a field: `Full`, or `TAESD` on [workers that have one](models.md#a-vae-of-its-own)"
    ),
}


def table(name: str) -> str:
    """The table of `fields`, `settings` or `defaults` as Markdown, or the list of `differences`."""
    if name == "differences":
        return "".join(
            f"- {text[0].upper()}{text[1:]}.\n" for text in differences.KNOWN.values()
        )
    if name == "defaults":
        return _defaults()
    is_fields = name == "fields"
    notes, rows = (
        (_FIELDS, settings_table.FIELDS)
        if is_fields
        else (_SETTINGS, settings_table.SETTINGS)
    )
    # Of settings, extras have hardly any.
    usual = frozenset(PASSES) if is_fields else frozenset({TXT2IMG, IMG2IMG})
    lines = [f"| {name.removesuffix('s')} | here | notes |", "| --- | --- | --- |"]
    left = dict(rows)
    for names, note in notes.items():
        given = names.split()
        (verdict,) = {
            _verdict(left.pop(each, Effect(usual, field=each)), usual) for each in given
        }
        lines.append(f"| {_shown(given)} | {verdict} | {note} |")
    groups: dict[str, dict[str, list[str]]] = {}
    for each, row in left.items():
        values = (
            ""
            if row.field
            else ", ".join(f"`{json.dumps(value)}`" for value in row.neutral)
        )
        groups.setdefault(_verdict(row, usual), {}).setdefault(values, []).append(each)
    for verdict, by_values in groups.items():
        cells = []
        for values, given in by_values.items():
            names, others = set(given), rows.keys() - set(given)
            shown = {_family(each, names, others) for each in given}
            if verdict == _NO_EFFECT and not is_fields:
                shown |= {f"{beginning}..." for beginning in settings_table.FAMILIES}
            cells.append(
                f"{_shown(sorted(shown))}: {values}"
                if values
                else _shown(sorted(shown))
            )
        lines.append(f"| {'; '.join(cells)} | {verdict} | |")
    return "".join(f"{line}\n" for line in lines)


def _defaults() -> str:
    lines = ["| field | its API's | here, without |", "| --- | --- | --- |"]
    for name, value in settings_table.DEFAULTS[settings_table.A1111].items():
        own = Job.model_fields[name].default
        lines.append(
            f"| `{name}` | `{value}` | {_OWN_DEFAULTS.get(name, f'`{own}`')} |"
        )
    return "".join(f"{line}\n" for line in lines)


def _verdict(row: Effect, usual: frozenset[str]) -> str:
    """A row in words, which name no passes where they are the usual ones."""
    if not row.passes:
        return _NO_EFFECT
    by = "" if row.passes >= usual else f" by {_listed(row.passes)}"
    if not row.field:
        return f"rejected{by} but for these values" if row.neutral else f"rejected{by}"
    if not row.refused:
        return f"drawn{by}"
    if row.passes | row.refused >= usual:
        return f"drawn{by} alone"
    return f"drawn{by}; rejected by {_listed(row.refused)}"


def _listed(passes: frozenset[str]) -> str:
    return ", ".join(name for name in PASSES if name in passes)


def _family(name: str, names: set[str], others: set[str]) -> str:
    """`outdir_...` for the names of *names* that begin so, if none of *others* does."""
    words = name.split("_")
    for count in range(1, len(words)):
        beginning = "_".join(words[:count]) + "_"
        if not any(other.startswith(beginning) for other in others):
            alike = sum(each.startswith(beginning) for each in names)
            return f"{beginning}..." if alike > 1 else name
    return name


def _shown(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def current(page: str) -> str:
    """The page with the tables that the program has now."""
    return _TABLE.sub(lambda match: match[1] + table(match[2]) + match[3], page)


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
