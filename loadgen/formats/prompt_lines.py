"""A prompt per line, with the options that AUTOMATIC1111's script and kohya's write into it."""

import json
import re
import shlex
from collections.abc import Mapping

from imagefleet import validation
from imagefleet.job import differences
from loadgen.formats.lines import Entry, JsonLines

#: An option's beginning: Midjourney's look the same, and are no words either.
_OPTION = re.compile(r"(?:^|\s)--(?=[A-Za-z])")

#: Options of "Prompts from file or textbox" (`scripts/prompts_from_file.py`), which begin the line.
_OF_A1111 = {
    name: name
    for name in (
        "prompt",
        "negative_prompt",
        "seed",
        "subseed",
        "subseed_strength",
        "seed_resize_from_h",
        "seed_resize_from_w",
        "sampler_name",
        "scheduler",
        "batch_size",
        "n_iter",
        "steps",
        "cfg_scale",
        "width",
        "height",
        "restore_faces",
        "tiling",
    )
} | {"sd_model": "model"}

#: Options of its pages and folders.
_WITHOUT_EFFECT = {
    "outpath_samples",
    "outpath_grids",
    "prompt_for_display",
    "do_not_save_samples",
    "do_not_save_grid",
}

#: Options of kohya's `gen_img.py` and of its sample prompts, which follow on the prompt.
_OF_KOHYA = {
    "n": "negative_prompt",
    "w": "width",
    "h": "height",
    "d": "seed",
    "l": "cfg_scale",
    "s": "steps",
    "ss": "sampler_name",
}


_Fields = dict[str, str]


class PromptLines(JsonLines):
    """One prompt per line; empty lines and comments are skipped.

    A line with options is a job of them. One with an option that is none of a job, or with the
    alternatives of dynamic prompts, is refused: it was never meant as words.
    """

    name = "txt"
    suffixes = (".txt",)

    def _entry(self, place: str, line: int, text: str) -> Entry:
        if text.startswith("#"):
            return Entry(place, line=line, is_comment=True)
        if not text:
            return Entry(place, line=line)
        try:
            fields = _fields(text)
        except ValueError as error:
            return Entry(place, problem=str(error), line=line, source=text)
        return Entry(place, json.dumps(fields, ensure_ascii=False), line=line)


def _fields(text: str) -> _Fields:
    if text.startswith("--"):
        fields = _from_a1111(text)
    elif _OPTION.search(text):
        fields = _from_kohya(text)
    else:
        fields = {"prompt": text}
    if found := differences.DYNAMIC.search(fields["prompt"]):
        raise ValueError(
            f"{found[0][:40]!r} is of dynamic prompts: make it a template's list (.yaml), whose"
            " words `{colour}` draws"
        )
    return fields


def _from_a1111(text: str) -> _Fields:
    """The fields of a line as `cmdargs` reads it: values in quotes as a shell has them."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"its options cannot be read: {error}") from None
    fields = {}
    while words:
        option = words.pop(0).removeprefix("--")
        values = []
        # A prompt may be several words without quotes.
        while words and not words[0].startswith("--"):
            values.append(words.pop(0))
        if not values:
            raise ValueError(f"the option --{option[:40]} has no value")
        if option not in _WITHOUT_EFFECT:
            fields[_field(option, _OF_A1111)] = " ".join(values)
    if "prompt" not in fields:
        raise ValueError("it has options, but no --prompt")
    return fields


def _from_kohya(text: str) -> _Fields:
    prompt, *options = _OPTION.split(text)
    fields = {"prompt": prompt.strip()}
    for each in options:
        option, _, value = each.partition(" ")
        fields[_field(option, _OF_KOHYA)] = value.strip()
    return fields


def _field(option: str, known: Mapping[str, str]) -> str:
    if option not in known:
        hint = validation.suggestion(option, known)
        names = ", ".join(f"--{name}" for name in known)
        raise ValueError(f"unknown option --{option[:40]}{hint}; known: {names}")
    return known[option]
