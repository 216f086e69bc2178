"""The parts of an infotext: lines of prompts, and facts (`Word: value`), in A1111's own words.

What Draw Things, SD.Next, Civitai and A1111 of 2022 write otherwise is put into these words.
"""

import contextlib
import json
import math
import re

from imagefleet.errors import JobError
from imagefleet.validation import JSONDict

_NEGATIVE = "Negative prompt:"

SEVERAL_NEGATIVE = (
    f"it has several lines {_NEGATIVE!r}: all after the first one are taken for its own"
)

#: sd-dynamic-prompts adds its lines behind the parameters.
_TEMPLATES = re.compile(r"\n(?:Negative )?Template:")

#: A word and its value up to the next comma; one in quotes or brackets may have commas.
_FACT = re.compile(
    r"\s*(?:([^\W_][\w /-]*):\s*)?"
    r'("(?:\\.|[^\\"])*"|\{[^}]{0,2000}\}|\[[^]]{0,2000}\]|[^,]*)\s*(?:,|$)'
)

#: Words whose values are JSON, with brackets of any depth.
_OF_JSON = re.compile(r"(Civitai (?:resources|metadata)): (?=[\[{])")

#: SD.Next's separator, and its word before a prompt.
_BARS = " | "
_PROMPT = "prompt: "

#: A1111 cuts the first pass of 2022 to so many pixels, in sides that are multiples of the cell.
_FIRST_PASS_PIXELS = 512**2
_CELL = 64


#: The size of a first pass that A1111 had chosen.
_UNKNOWN = "0x0"


#: Lines of an infotext, or sentences about what is drawn otherwise.
Texts = list[str]

#: Values by the words of A1111.
Facts = dict[str, str]


def parts_of(text: str) -> tuple[dict[str, str], Facts, Texts]:
    """An infotext's prompts and facts, whichever program wrote it, and what is drawn otherwise."""
    *lines, last = text.strip().split("\n")
    if not last.startswith("Steps:"):
        *lines, last = _TEMPLATES.split(text.strip())[0].split("\n")
    if _BARS in last:
        lines, last = _without_bars(lines, last)
    facts = facts_of(last)
    said: Texts = []
    if "Distilled CFG Scale" in facts:
        model = facts.get("Model", "no name")
        raise JobError(f"it was drawn with FLUX ({model}), which is not drawn here")
    if "Guidance Scale" in facts:
        lines = _from_draw_things(lines, facts, said)
    if first_pass := facts.pop("First pass size", None):
        _from_2022(first_pass, facts, said)
    if "App" in facts or "Pipeline" in facts:
        said.append("drawn by SD.Next, with schedulers of its own: alike and not equal")
    if facts.get("Version") == "ComfyUI" or "Civitai resources" in facts:
        facts.setdefault("RNG", "CPU")
        said.append("drawn by ComfyUI, which its text does not tell all of: alike")
    said += _resources(facts.pop("Civitai resources", "[]"))
    if sum(line.strip().startswith(_NEGATIVE) for line in lines) > 1:
        said.append(SEVERAL_NEGATIVE)
    return _prompts(lines), facts, said


def facts_of(line: str) -> Facts:
    """`Word: value, Word: value`; a value that has one of these signs is a JSON string."""
    found = {}
    for match in [*_OF_JSON.finditer(line)][::-1]:
        with contextlib.suppress(ValueError, RecursionError):
            _, end = json.JSONDecoder().raw_decode(line, match.end())
            found[match[1]] = line[match.end() : end]
            line = line[: match.start()] + line[end:].lstrip(", ")
    for word, value in _FACT.findall(line):
        text = value.strip()
        if value.startswith('"'):
            with contextlib.suppress(ValueError):
                text = json.loads(value)  # with its blanks
        if word:
            found[word] = text
    return found


def _prompts(lines: Texts) -> dict[str, str]:
    found: dict[str, Texts] = {"prompt": [], "negative_prompt": []}
    into = "prompt"
    for line in lines:
        words = line.strip()
        if words.startswith(_NEGATIVE):
            into = "negative_prompt"
            words = words.removeprefix(_NEGATIVE).strip()
        found[into].append(words)
    return {name: "\n".join(each).strip() for name, each in found.items()}


def _without_bars(lines: Texts, last: str) -> tuple[Texts, str]:
    """Texts of SD.Next's first releases, which part facts by bars, in two lines."""
    facts = last.replace(_BARS, ", ")
    if lines and lines[-1].startswith("Version:"):
        *lines, version = lines
        facts = f"{facts}, {version.strip().rstrip(',')}"
    if lines:
        lines = [lines[0].removeprefix(_PROMPT), *lines[1:]]
    return lines, facts


def _from_draw_things(lines: Texts, facts: Facts, said: Texts) -> Texts:
    """Puts Draw Things' words into A1111's; its negative prompt begins with a hyphen."""
    said.append("drawn by Draw Things, whose noise is its own: alike and not equal")
    facts["CFG scale"] = facts.pop("Guidance Scale")
    first, strength = (
        facts.pop(word, None) for word in ("First Stage Size", "Second Stage Strength")
    )
    if facts.pop("Hires Fix", "") == "true" and first and strength:
        facts["Hires resize"] = facts.get("Size", first)
        facts["Size"] = first
        facts["Denoising strength"] = strength
        facts.pop("Strength", None)
    elif (whole := facts.pop("Strength", "1")) not in ("1", "1.0"):
        facts["Denoising strength"] = whole
    begins = [at for at, line in enumerate(lines) if line.startswith("-")]
    if not begins:
        return lines
    at = begins[-1]
    return [*lines[:at], f"{_NEGATIVE} {lines[at][1:]}", *lines[at + 1 :]]


def _from_2022(first_pass: str, facts: Facts, said: Texts) -> None:
    """Puts the second pass of 2022 into today's words, as `restore_old_hires_fix_params` does."""
    size = facts.get("Size", "512x512")
    sides = [int(side) for side in re.findall(r"\d{1,5}", size)[:2]]
    if len(sides) < len("xy") or not all(sides):
        return
    if first_pass == _UNKNOWN:
        scale = math.sqrt(_FIRST_PASS_PIXELS / math.prod(sides))
        sides = [math.ceil(scale * side / _CELL) * _CELL for side in sides]
        first_pass = "x".join(map(str, sides))
    facts["Size"] = first_pass
    facts["Hires resize"] = size
    said.append(
        "A1111's second pass of 2022 had an upscaler that its text does not tell: drawn with Latent"
    )


def _resources(text: str) -> Texts:
    """Sentences about files that Civitai names by the ids of their versions."""
    try:
        return [_resource(each) for each in json.loads(text)]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return ["Civitai resources are damaged: its files are not known"]


def _resource(found: JSONDict) -> str:
    kind = str(found.get("type", "file")).lower()
    names = [str(found.get(key, "")) for key in ("modelName", "modelVersionName")]
    title = (
        f"{' '.join(filter(None, names))} (model version {found.get('modelVersionId')})"
    )
    if kind == "checkpoint":
        return f"its checkpoint is Civitai's {title}: give the file in `model`"
    weight = found.get("weight", 1)
    where = f"<lora:FILE:{weight}>" if kind in ("lora", "lycoris", "dora") else "FILE"
    return f"its {kind} {title} of Civitai is not drawn: add {where} to the prompt"
