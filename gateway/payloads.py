"""A1111's payloads as its API reads them: what it ignores, and styles by name.

Its models ignore keys that they do not have: those of other programs and of the other endpoint. A
job in the queue stays strict.
"""

from imagefleet.files.styles import Styles, apply
from imagefleet.job import settings_table
from imagefleet.job.message import Job
from imagefleet.job.passes import extras, hires, img2img
from imagefleet.validation import JSONDict, JSONObject

_KNOWN = (
    settings_table.FIELDS.keys()
    | Job.model_fields.keys()
    | {"override_settings", "sampler_index"}
)

#: Fields that txt2img does not have, and img2img.
_OF_IMG2IMG = (img2img.FIELDS - {"denoising_strength"}) | {"latent_mask", "mask_round"}
_OF_TXT2IMG = hires.FIELDS | {
    "firstphase_height",
    "firstphase_width",
    "firstpass_image",
    "hr_checkpoint_name",
}

#: Fields of Forge's that A1111 does not know, and that change nothing of its models.
_OF_FORGE = {"distilled_cfg_scale", "hr_additional_modules", "hr_distilled_cfg"}

#: What the endpoints ignore, by whether it is img2img.
IGNORED = {
    False: extras.FIELDS | _OF_FORGE | _OF_IMG2IMG,
    True: extras.FIELDS | _OF_FORGE | _OF_TXT2IMG,
}


def fields_of(
    payload: JSONObject,
    options: JSONObject,
    styles: Styles,
) -> JSONDict:
    """The fields of a job that a payload stands for, without those ignored; raises Refused."""
    fields = {
        name: value
        for name, value in payload.items()
        if name in _KNOWN and value is not None
    }
    sampler = fields.get("sampler_name") or fields.pop("sampler_index", None)
    if sampler:
        fields["sampler_name"] = sampler
    fields |= apply(styles, fields.pop("styles", ()), fields)
    scripts = fields.get("alwayson_scripts")
    if isinstance(scripts, dict):
        fields["alwayson_scripts"] = {
            title: script for title, script in scripts.items() if not _is_off(script)
        }
    fields["override_settings"] = {**options, **(fields.get("override_settings") or {})}
    return {"prompt": "", **fields}


def _is_off(script: object) -> bool:
    """True if an extension's arguments switch it off, or are none."""
    args = script.get("args") if isinstance(script, dict) else None
    first = args[0] if isinstance(args, list) and args else args
    if isinstance(first, dict):
        switches = [value for name, value in first.items() if "enable" in name]
        return bool(switches) and not any(switches)
    return not first
