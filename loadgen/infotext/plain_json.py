"""Settings as plain JSON, one key a setting: Fooocus, SwarmUI and Easy Diffusion."""

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import PureWindowsPath
from typing import Any, NamedTuple

from imagefleet.errors import JobError
from imagefleet.job import samplers
from imagefleet.job.message import fields_if_any
from imagefleet.validation import JSONDict, JSONObject
from loadgen.infotext import comfyui
from loadgen.infotext.reading import WORDS, Named, Reading, damaged, sampler_fields


class _Program(NamedTuple):
    """A program: the fields of a job by its keys, and the sentence about its pictures."""

    name: str
    fields: Mapping[str, str]
    #: Keys that decide nothing of one picture, or are told by another.
    ignored: Collection[str]
    said: str
    #: True if its samplers are ComfyUI's, else diffusers'.
    is_comfyui: bool


_PROGRAMS = {name: _Program(name, **row) for name, row in WORDS["programs"].items()}

#: Values of a setting that is off.
_OFF: tuple[object, ...] = (None, "", [], {}, False, 0, "[]", "{}")
_OFF_WORDS = {"default (model)", "none", "automatic", "false"}

_NUMBERS = {"seed": int, "steps": int, "width": int, "height": int, "cfg_scale": float}


def is_settings(text: str) -> bool:
    """True if a text is one of these programs', and no infotext."""
    return text.lstrip().startswith("{") and bool(fields_if_any(text))


def is_easy_diffusion(fields: JSONObject) -> bool:
    """True if texts of a picture, or a row's fields, are Easy Diffusion's, one key a setting."""
    return "num_inference_steps" in fields and "prompt" in fields


def read(text: str) -> Reading:
    """The job of a picture's JSON; raises JobError, which says why there is none."""
    found = fields_if_any(text)
    if not found:
        raise JobError("its JSON is damaged")
    graph = inside if isinstance(inside := found.get("prompt"), dict) else found
    nodes = {name: node for name, node in graph.items() if "class_type" in str(node)}
    if nodes:
        return comfyui.read(json.dumps(nodes))
    if isinstance(inside := found.get("sui_image_params"), dict):
        return read_settings(inside, _PROGRAMS["SwarmUI"])
    return read_settings(found, _PROGRAMS["Fooocus"])


def read_easy_diffusion(found: JSONObject) -> Reading:
    """The job of Easy Diffusion's settings; raises JobError, which says why there is none."""
    return read_settings(found, _PROGRAMS["Easy Diffusion"])


def read_settings(found: JSONObject, program: _Program) -> Reading:
    """The job of a program's settings by its keys; raises JobError for those of none."""
    known = {}
    others = []
    for key, value in found.items():
        field = program.fields.get(key)
        is_off = value in _OFF or str(value).lower() in _OFF_WORDS
        if is_off and field not in _NUMBERS:
            continue
        if field is not None:
            known[field] = value
        elif key not in program.ignored:
            others.append(f"{key} ({str(value)[:80]}) is not drawn")
    if not {"prompt", "seed", "steps"} <= known.keys():
        raise JobError(f"its JSON is none of {program.name}'s settings")
    with damaged(f"its settings of {program.name} are damaged"):
        reading = _job(known, program)
    reading.cannot += filter(None, [program.said, *others])
    return reading


def _job(known: JSONDict, program: _Program) -> Reading:
    if "size" in known:
        known["width"], known["height"] = re.findall(r"\d+", str(known["size"]))[:2]
    settings: JSONDict = {"randn_source": "CPU"}
    job: JSONDict = {
        "prompt": _words(known["prompt"]),
        "negative_prompt": _words(known.get("negative_prompt", "")),
        "override_settings": settings,
        **{
            name: read_one(known[name])
            for name, read_one in _NUMBERS.items()
            if name in known
        },
    }
    reading = Reading(job, cuts_prompts_elsewhere=True)
    if "clip_skip" in known:
        settings["CLIP_stop_at_last_layers"] = int(known["clip_skip"])
    if known.get("tiling"):
        job["tiling"] = True
    sampler = str(known.get("sampler", "euler"))
    if program.is_comfyui:
        schedule = str(known.get("scheduler", "normal"))
        fields, said = comfyui.fields_of_sampler(sampler, schedule)
        job |= fields
        reading.cannot += said
    else:
        job |= _of_diffusers(sampler, known.get("scheduler"))
    for name, setting in (("model", "sd_model_checkpoint"), ("vae", "sd_vae")):
        if name in known:
            settings[setting] = PureWindowsPath(str(known[name])).name
            digits = known.get(f"{name}_hash")
            reading.models.append(Named(name, settings[setting], digits))
    for lora, weight in _loras(known):
        job["prompt"] += f" <lora:{lora}:{weight:g}>"
        reading.models.append(Named("lora", lora))
    return reading


def _words(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _of_diffusers(name: str, scheduler: Any) -> dict[str, str]:
    """The fields of one of Easy Diffusion's samplers, such as `dpmpp_2m` or `dpm2_a`."""
    spelling = re.sub(r"^dpm2", "dpm_2", name.lower())
    for each in (spelling, f"k_{spelling}"):
        if each in samplers.NAMES:
            schedule = str(scheduler).capitalize() if scheduler else None
            return sampler_fields(samplers.NAMES[each].title, schedule, is_old=True)
    raise JobError(f"the sampler {name[:40]!r} has no counterpart")


def _loras(known: JSONObject) -> Iterator[tuple[str, float]]:
    """The names of LoRAs and their weights, which may be in a list of their own."""
    loras, weights = (_list(known.get(name)) for name in ("loras", "weights"))
    for at, lora in enumerate(loras):
        name = lora
        weight = weights[at] if at < len(weights) else 1
        if isinstance(lora, list | tuple):
            name, weight, *_ = lora
        yield (
            PureWindowsPath(str(name)).name.removesuffix(".safetensors"),
            float(weight),
        )


def _list(value: Any) -> list[Any]:
    if isinstance(value, str) and value.startswith("["):
        value = ast.literal_eval(value)
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
