"""AUTOMATIC1111's infotext, which Forge and `worker.stages.encode` write as well.

By its release 1.10: the lines and words of `infotext_utils.py` and `shared_options.py`, what older
releases drew otherwise by `infotext_versions.py`, and what is written when by `processing.py`.
"""

import contextlib
import json
import re

from imagefleet.errors import JobError
from imagefleet.files.picture import OWN_FIELDS, OWN_WORD
from imagefleet.job.passes import adetailer
from imagefleet.validation import JSONDict, JSONObject
from loadgen.infotext.facts import SEVERAL_NEGATIVE, Facts, facts_of, parts_of
from loadgen.infotext.reading import WORDS, Named, Reading, damaged, sampler_fields

NO_PARAMETERS = "the file holds no parameters"

_VERSION = re.compile(r"v(\d+)\.(\d+)\.(\d+)(?:-(\d+))?")
_TITLE = re.compile(r"(.+?)(?: \[([0-9a-f]+)\])?")
LORA = re.compile(r"<lora:([^:>]+)", re.IGNORECASE)

#: Digits of the hash that A1111 wrote before 2023, of 64 KiB of a checkpoint.
_OLD_DIGITS = 8

#: Fields of payloads, and names of settings, by the words of the text.
_FIELDS, _SETTINGS, _OTHERS = (
    WORDS["a1111"][name] for name in ("fields", "settings", "others")
)

#: Words that stay text where they look like a number.
_TEXTS = {"hr_prompt", "hr_negative_prompt", "hr_upscaler", "sd_vae"}
_TEXTS |= {"hr_checkpoint_name", "refiner_checkpoint"}

#: The number of a unit of ADetailer, and the field of it, by the words of the text.
_OF_ADETAILER = {
    f"ADetailer {word}{ordinal}": (number, field)
    for number, ordinal in enumerate(adetailer.ORDINALS)
    for field, word in adetailer.WORDS.items()
}

_MASK = (
    "Mask mode",
    "Mask blur",
    "Inpaint area",
    "Masked area padding",
    "Masked content",
)
_MASKED_CONTENT = {"fill": 0, "original": 1, "latent noise": 2, "latent nothing": 3}

#: What is read or not by other rules.
_KNOWN = {*_FIELDS, *_SETTINGS, *_OTHERS, OWN_WORD, *_MASK}


def read(text: str) -> Reading:
    """The job of an infotext; raises JobError if it holds no parameters."""
    prompts, facts, said = parts_of(text)
    if not {"Steps", "Sampler", "Seed"} <= facts.keys():
        raise JobError(NO_PARAMETERS)
    version = facts.get("Version", "")
    match = _VERSION.match(version)
    release = tuple(map(int, match.groups("0"))) if match else None
    is_old = not version or (release is not None and release < (1, 9))
    settings: JSONDict = {"randn_source": "GPU"}
    job: JSONDict = {**prompts, "override_settings": settings}
    reading = Reading(job, cannot=said)
    for word, value in facts.items():
        for names, target in ((_FIELDS, job), (_SETTINGS, settings)):
            if name := names.get(word):
                values = value.split("x") if " " in name else [value]
                read_one = str if name in _TEXTS else _value
                target.update(zip(name.split(), map(read_one, values), strict=False))
    job |= sampler_fields(
        facts.get("Sampler", ""), facts.get("Schedule type"), is_old=is_old
    )
    if "Face restoration" in facts:
        job["restore_faces"] = True
    _read_passes(facts, reading, is_old=is_old)
    _read_models(facts, reading)
    _read_extensions(facts, reading)
    if release is not None:
        _add_compatibility(release, job, settings)
    if own := facts.get(OWN_WORD):
        with damaged(f"the JSON behind {OWN_WORD!r} is damaged"):
            fields = json.loads(own)
            reading.give({name: fields[name] for name in OWN_FIELDS if name in fields})
            if "prompt" in fields and SEVERAL_NEGATIVE in reading.cannot:
                reading.cannot.remove(SEVERAL_NEGATIVE)
    return reading


def _value(text: str) -> object:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text.lower() if text in {"True", "False"} else text)
    return text


def _read_passes(facts: Facts, reading: Reading, *, is_old: bool) -> None:
    """The second pass, or the image to begin with, of which a strength alone tells."""
    job = reading.job
    strength = _value(facts.get("Denoising strength", ""))
    if any(name.startswith("hr_") for name in job):
        job |= {"enable_hr": True} | (
            {"denoising_strength": strength} if strength != "" else {}
        )
        sampler = facts.get("Hires sampler")
        schedule = facts.get("Hires schedule type")
        if sampler or schedule:
            usual = None if is_old else job["scheduler"]
            name = sampler or facts.get("Sampler", "")
            second = sampler_fields(name, schedule or usual, is_old=is_old)
            job |= {f"hr_{name}": value for name, value in second.items()}
        guidance = facts.get("Hires CFG Scale", "")
        if guidance and _value(guidance) != job.get("cfg_scale"):
            reading.cannot.append(f"the second pass had a CFG of its own ({guidance})")
    elif strength or (strength == 0 and not is_old):  # the API wrote 0 up to 1.6
        job |= {"denoising_strength": strength, "init_images": []}
        reading.needs.append("init_images")
        missing = "the initial image is"
        if not facts.keys().isdisjoint(_MASK):
            content = facts.get("Masked content", "original")
            job |= {
                "mask_blur": _value(facts.get("Mask blur", "0")),
                "inpainting_mask_invert": int(
                    facts.get("Mask mode") == "Inpaint not masked"
                ),
                "inpaint_full_res": facts.get("Inpaint area") == "Only masked",
                "inpaint_full_res_padding": _value(
                    facts.get("Masked area padding", "32")
                ),
                "inpainting_fill": _MASKED_CONTENT.get(content, content),
            }
            reading.needs.append("mask")
            missing = "the initial image and the mask are"
        reading.cannot.append(f"{missing} not in the file, nor is the resize mode")


def _read_models(facts: Facts, reading: Reading) -> None:
    name, digits = map(facts.get, ("Model", "Model hash"))
    settings = reading.job["override_settings"]
    if name or digits:
        title = f"{name} [{digits}]" if name and digits else name or digits
        settings["sd_model_checkpoint"] = title
        reading.models.append(Named("model", name, digits))
    if not name and len(digits or "") == _OLD_DIGITS:
        reading.cannot.append(f"the checkpoint's old hash {digits} matches no SHA-256")
    for each in ("hr_checkpoint_name", "refiner_checkpoint"):
        reading.models += _titled("model", reading.job.get(each))
    if vae := settings.get("sd_vae"):
        reading.models.append(Named("vae", vae, facts.get("VAE hash")))
    digits_of = _hashes(facts.get("Lora hashes", ""))
    prompts = f"{reading.job['prompt']} {reading.job.get('hr_prompt', '')}"
    for lora in dict.fromkeys(LORA.findall(prompts)):
        reading.models.append(
            Named("lora", lora, digits_of.get(re.sub("[:,]", "", lora)))
        )
    of_embeddings = _hashes(facts.get("TI hashes", "")).items()
    reading.models += [Named("embedding", *each) for each in of_embeddings]


def _titled(kind: str, title: str | None) -> list[Named]:
    match = _TITLE.fullmatch(title or "")
    return [Named(kind, *match.groups())] if match else []


def _hashes(text: str) -> dict[str, str]:
    pairs = (each.rpartition(": ") for each in text.split(", "))
    return {name: digits for name, _, digits in pairs if name}


def _read_extensions(facts: Facts, reading: Reading) -> None:
    """The units of ControlNet, and what of others is not drawn."""
    units = []
    details: dict[int, JSONDict] = {}
    for word, value in facts.items():
        extension, _, rest = word.partition(" ")
        if extension == "ControlNet" and rest.isdecimal():
            unit = facts_of(value)
            units.append(
                {name.lower().replace(" ", "_"): _value(unit[name]) for name in unit}
            )
            reading.models += _titled("controlnet", unit.get("Model"))
            reading.needs.append(f"controlnet {rest} image")
            reading.cannot.append(f"{word}'s control image is not in the file")
        elif word in _OF_ADETAILER:
            ordinal, field = _OF_ADETAILER[word]
            is_text = field in ("ad_model", "ad_prompt", "ad_negative_prompt")
            details.setdefault(ordinal, {})[field] = value if is_text else _value(value)
        elif word not in _KNOWN and value != "Use same choices":
            reading.cannot.append(f"{word} ({value[:80]}) is not drawn")
    scripts = {"controlnet": {"args": units}} if units else {}
    if details:
        scripts["ADetailer"] = {"args": [details[each] for each in sorted(details)]}
    if scripts:
        reading.job["alwayson_scripts"] = scripts


def _add_compatibility(
    release: tuple[int, ...], job: JSONObject, settings: JSONDict
) -> None:
    """Adds the settings with which A1111 draws an infotext as the release that it names did."""
    older = {
        "use_old_scheduling": release < (1, 6) and "[" in job["prompt"],
        "pad_cond_uncond_v0": release < (1, 6)
        and job["sampler_name"] in {"DDIM", "PLMS"},
        "use_downcasted_alpha_bar": release < (1, 7, 0, 225),
        "refiner_switch_by_sample_steps": release < (1, 8)
        and "refiner_checkpoint" in job,
    }
    for name, applies in older.items():
        if applies:
            settings.setdefault(name, True)
