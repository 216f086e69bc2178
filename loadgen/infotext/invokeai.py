"""InvokeAI's metadata: `invokeai_metadata` from 3.0 on, and `sd-metadata` before (`args.py`)."""

import json
import re

from imagefleet.errors import JobError
from imagefleet.job import samplers
from imagefleet.validation import JSONDict, JSONObject
from loadgen.infotext.reading import WORDS, Named, Reading, damaged, sampler_fields

#: Words whose weights compel reads, in all releases.
_WEIGHTED = re.compile(r"[\w)\"][+-]+(?=[\s,.)]|$)|\)[\d.]")


def read(text: str) -> Reading:
    """The job of a picture's metadata; raises JobError for one with what no job draws."""
    with damaged("its metadata is damaged"):
        found = json.loads(text)
        return _read(_in_todays_words(found) if "image" in found else found)


def _in_todays_words(found: JSONObject) -> JSONDict:
    """The text of a release up to 2.3, whose prompt has the negative one in square brackets."""
    image = found["image"]
    (prompt,) = image["prompt"]
    words = re.sub(r"\[[^][]*\]", "", prompt["prompt"]).split()
    return {
        **image,
        "generation_mode": image.get("type", "txt2img"),
        "positive_prompt": " ".join(words),
        "negative_prompt": " ".join(re.findall(r"\[([^][]*)\]", prompt["prompt"])),
        "scheduler": image["sampler"],
        "model": {"name": found.get("model_id"), "hash": found.get("model_hash")},
    }


def _read(found: JSONObject) -> Reading:
    mode = found.get("generation_mode", "txt2img").removeprefix("sdxl_")
    sampler = found["scheduler"]
    other = sorted(
        name
        for name, value in found.items()
        if value and name not in WORDS["invokeai"]["known"]
    )
    known = samplers.NAMES.get(sampler.removesuffix("_k").replace("kdpm_", "dpm_"))
    if (
        mode != "txt2img"
        or other
        or known is None
        or known.key not in samplers.SAMPLERS
    ):
        what = ", ".join([f"mode {mode}, sampler {sampler}", *other])[:200]
        raise JobError(f"it has what has no counterpart: {what}")
    settings = {"randn_source": "CPU" if found.get("rand_device") == "cpu" else "GPU"}
    schedule = "Karras" if sampler.endswith("_k") else None
    copied = ("seed", "steps", "cfg_scale", "width", "height")
    job = {
        **{name: found[name] for name in copied},
        "prompt": found.get("positive_prompt") or "",
        "negative_prompt": found.get("negative_prompt") or "",
        **sampler_fields(known.title, schedule, is_old=True),
        "override_settings": settings,
    }
    reading = Reading(job)
    reading.cannot.append("drawn with diffusers' scheduler: alike and not equal")
    if _WEIGHTED.search(f"{job['prompt']} {job['negative_prompt']}"):
        reading.cannot.append(
            "its prompt has weights of InvokeAI's: they are read as words"
        )
    if found.get("clip_skip"):
        settings["CLIP_stop_at_last_layers"] = found["clip_skip"] + 1
    for kind, setting in (("model", "sd_model_checkpoint"), ("vae", "sd_vae")):
        if found.get(kind):
            settings[setting] = _add_file(reading, kind, found[kind])
    for each in found.get("loras") or ():
        name = _add_file(reading, "lora", each.get("model") or each["lora"])
        reading.job["prompt"] += f" <lora:{name}:{each['weight']}>"
    return reading


def _add_file(reading: Reading, kind: str, found: JSONObject) -> str:
    """Notes a file and returns its name."""
    named = Named(kind, found.get("name") or found["model_name"], found.get("hash"))
    reading.models.append(named)
    return str(named.name)
