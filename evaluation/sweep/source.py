"""A sweep's jobs: each caption of a file in each group; those of one caption are neighbours."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from evaluation.sweep import manifest
from evaluation.sweep.manifest import Group, Sweep
from imagefleet import validation
from imagefleet.caption import CAPTION
from imagefleet.errors import SetupError
from imagefleet.job import samplers, sizes
from imagefleet.job.message import Job
from imagefleet.job.prompt import read_words
from imagefleet.signing import JobSigner
from imagefleet.validation import JSONDict
from loadgen import file_source
from loadgen.file_source import UnchangedFile
from loadgen.formats.json_array import JsonArray
from loadgen.formats.lines import Entry, FormatError


class CocoCaptions(JsonArray):
    """The elements of the array `annotations` of an object, as COCO has its captions."""

    name = "coco"
    unit = "annotation"
    _otherwise = "it is no object with the array 'annotations'"

    def _elements(self, whole: Any) -> Any:
        return whole.get("annotations") if isinstance(whole, dict) else None


FORMATS = {
    "coco": CocoCaptions(),
    **{name: file_source.FORMATS[name] for name in ("jsonl", "txt")},
}

#: The keys that may hold the caption of a JSON line; the first of them that is there.
KEYS = ("caption", "prompt", "text")

_SURROGATE = re.compile("[\ud800-\udfff]")

#: Words that AUTOMATIC1111 takes for operators in capitals only; to CLIP both are the same.
_OPERATORS = re.compile(r"\b(AND|BREAK)\b")

#: What would be emphasis, a tag, and what would be the weight of the prompt as a whole.
_SIGN = re.compile(r"[()\[\]\\]")
_TAG = re.compile(r"<(?=\w+:)")
_OWN_WEIGHT = re.compile(r":\s*[+-]?[\d.]+\s*$")


class CaptionFile:
    """A file of captions, the first *count* of them; it is read once to count and hash them.

    Raises SetupError if one is missing, or all.
    """

    def __init__(
        self,
        path: Path,
        *,
        form: str | None = None,
        count: int | None = None,
    ) -> None:
        self.path = path
        self._form = file_source.find_format(path, form, FORMATS)
        self._count = count
        self._file = UnchangedFile(path, self._form)
        self.facts = manifest.digest(self.read())
        if not self.facts.count:
            raise SetupError(f"{path} holds no captions")

    def read(self) -> Iterator[str]:
        with self._file.opened() as stream:
            captions = self._captions(self._form.entries(stream))
            yield from itertools.islice(captions, self._count)

    def _captions(self, entries: Iterable[Entry]) -> Iterator[str]:
        for entry in entries:
            if not (entry.text or entry.problem):
                continue
            try:
                yield self._caption(entry.text, entry.problem)
            except ValueError as error:
                raise FormatError(f"{entry.place}: {error}") from None

    def _caption(self, text: str, problem: str) -> str:
        """The caption of an entry; a ValueError says what is wrong with it."""
        if problem:
            raise ValueError(problem)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("it is not valid JSON") from None
        fields = value if isinstance(value, dict) else {KEYS[0]: value}
        keys = KEYS[:1] if self._form is FORMATS["coco"] else KEYS
        given = next((fields[key] for key in keys if key in fields), None)
        # Without the line breaks that the captions' hash is by.
        caption = " ".join(given.split()) if isinstance(given, str) else ""
        if not caption:
            raise ValueError(f"there is no caption, a text under {KEYS[0]!r}")
        if _SURROGATE.search(caption):
            raise ValueError("the caption has half of a surrogate pair")
        return caption


def prompt_of(caption: str) -> str:
    """The prompt that draws a caption's words as they are: its signs are words, not syntax."""
    prompt = _SIGN.sub(r"\\\g<0>", caption)
    prompt = _TAG.sub(r"<\\", prompt)  # a lone backslash is no letter
    prompt = _OPERATORS.sub(lambda found: found[0].lower(), prompt)
    return prompt + "\\" if _OWN_WEIGHT.search(prompt) else prompt


#: The most characters that the name of a model or a LoRA takes in a group's name.
_NAME_CHARACTERS = 40


def all_groups(
    guidance: Sequence[float | str],
    names_of_samplers: Sequence[str],
    steps: Sequence[int | str],
    models: Sequence[str | None] = (None,),
    lora: str | None = None,
    strengths: Sequence[float | str | None] = (None,),
) -> tuple[Group, ...]:
    """All combinations, named by the guidance and what differs; raises SetupError for others."""
    try:
        keys = [samplers.find(name).key for name in names_of_samplers]
    except ValueError as error:
        raise SetupError(f"--set sampler_name: {error}") from None
    axes = {
        "model": models,
        "sampler": keys,
        "steps": steps,
        "lora_strength": strengths,
        "guidance": guidance,
    }
    if (total := math.prod(map(len, axes.values()))) > manifest.MAX_GROUPS:
        raise SetupError(f"these are {total:,} groups; {manifest.MAX_GROUPS:,} at most")
    found = {}
    for values in itertools.product(*axes.values()):
        fields = {
            "name": "unnamed",
            "lora": lora,
            **dict(zip(axes, values, strict=True)),
        }
        with validation.as_error(SetupError):
            group = Group.model_validate(fields)
            name = "-".join(
                told(getattr(group, axis))
                for axis, told in _IN_NAMES.items()
                if len(axes[axis]) > 1 or axis == "guidance"
            )
            if name in found:
                raise SetupError(f"two groups would have the name {name}")
            found[name] = Group.model_validate({**dict(group), "name": name})
    return tuple(found.values())


class SweepSource:
    """The jobs of a sweep, a source of `Load`; raises SetupError for an invalid field."""

    def __init__(
        self,
        captions: CaptionFile,
        of_groups: Sequence[Group],
        campaign: str,
        *,
        seed: int = 0,
        job: Mapping[str, JsonValue] | None = None,
        signer: JobSigner | None = None,
    ) -> None:
        """*job*: what all jobs share besides."""
        self.sweep = Sweep(
            campaign=campaign,
            captions=captions.facts,
            groups=tuple(of_groups),
            seed=seed,
            job=dict(job or {}),
        )
        self.campaign = campaign
        self.path = captions.path
        self.count = self.sweep.images
        self._captions = captions
        self._signer = signer
        for _ in self.first_jobs():
            pass

    def check(self) -> None:
        """Checks each caption in the first group: groups were checked."""
        for number, caption in enumerate(self._captions.read()):
            self._body(self.sweep.groups[0], number, caption)

    def bodies(self) -> Iterator[str]:
        for number, caption in enumerate(self._captions.read()):
            for group in self.sweep.groups:
                yield self._body(group, number, caption)

    def first_jobs(self) -> Iterator[Job]:
        """A job of each group, which stands for all of them: only the captions differ."""
        return (self._job(group, 0, "a caption") for group in self.sweep.groups)

    def describe(self) -> str:
        """`30,000 captions x 8 groups: 240,000 jobs`."""
        groups_of = len(self.sweep.groups)
        return (
            f"{self.sweep.captions.count:,} caption{'s' * (self.sweep.captions.count != 1)} x"
            f" {groups_of:,} group{'s' * (groups_of != 1)}: {self.count:,} jobs"
        )

    def _job(self, group: Group, number: int, caption: str) -> Job:
        prompt = prompt_of(caption)
        fields: JSONDict = {
            **self.sweep.job,
            "id": manifest.job_id(group.name, number),
            "campaign": self.campaign,
            "prompt": prompt,
            "enable_prompt_comments": False,  # a caption's '#' is a letter
            "seed": manifest.seed_of(number, caption, self.sweep.seed),
            "cfg_scale": group.guidance,
            "sampler_name": group.sampler,
            "steps": group.steps,
            "model": group.model,
        }
        if group.lora and group.lora_strength:
            fields["prompt"] += f" <lora:{group.lora}:{group.lora_strength:g}>"
        # Who reads the prompt alone would lose what follows a '#', say.
        if {caption} != {fields["prompt"], read_words(fields["prompt"])[0]}:
            fields["metadata"] = {CAPTION: caption}
        before = f"group {group.name}, caption {number} ({caption[:60]!r}): "
        with validation.as_error(SetupError, before, Job.model_fields):
            return Job.model_validate(fields)

    def _body(self, group: Group, number: int, caption: str) -> str:
        job = self._job(group, number, caption)
        with validation.as_error(SetupError, f"caption {number}: "):
            (body,) = sizes.checked_messages([job.to_message(self._signer)])
        return body


def _slug(name: str | None) -> str:
    """Writes a name in the characters of a group's name."""
    text = re.sub(r"[^A-Za-z0-9.]+", "-", name or "own-model").strip("-.")
    return text[:_NAME_CHARACTERS].rstrip("-.") or "x"


#: What differs between groups, as their names have it.
_IN_NAMES = {
    "model": _slug,
    "sampler": _slug,
    "steps": "steps-{}".format,
    "lora_strength": "lora-{}".format,
    "guidance": "cfg-{}".format,  # of a float: cfg-3.0
}
