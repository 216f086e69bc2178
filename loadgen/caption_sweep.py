"""Jobs of a sweep: each caption in each group. The jobs of one caption are neighbours.

So a sweep that is half drawn has about the same captions in all groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic import JsonValue, ValidationError

from imagefleet import errors, validation
from imagefleet.job import samplers, sizes
from imagefleet.job.message import Job
from imagefleet.records import sweep
from imagefleet.records.sweep import Group, Sweep
from imagefleet.signing import SigningKey
from loadgen.captions import CaptionFile, prompt_of
from loadgen.file_source import OnRead, digest, ignore
from loadgen.sweep import slug

#: The most characters that the name of a model or a LoRA takes in a group's name.
_NAME_CHARACTERS = 40


def groups(
    guidance: Sequence[float],
    names_of_samplers: Sequence[str],
    steps: Sequence[int],
    models: Sequence[str | None] = (None,),
    lora: str | None = None,
    strengths: Sequence[float | None] = (None,),
) -> tuple[Group, ...]:
    """All combinations; a group's name says the guidance, and what else differs between groups.

    Raises:
        SetupError: a value is not valid, comes twice, or there are too many groups.
    """
    axes: Mapping[str, Sequence[Any]] = {
        "--models": models,
        "--set sampler_name": [_sampler(name) for name in names_of_samplers],
        "--set steps": steps,
        "--set lora_strength": strengths,
        "--set cfg_scale": guidance,
    }
    for flag, values in axes.items():
        if not values:
            raise errors.SetupError(f"{flag}: give one value at least")
        if len(set(values)) < len(values):
            raise errors.SetupError(f"{flag}: a value is there twice")
    if (total := math.prod(map(len, axes.values()))) > sweep.MAX_GROUPS:
        raise errors.SetupError(f"these are {total:,} groups; {sweep.MAX_GROUPS:,} at most")
    found: dict[str, Group] = {}
    for model, sampler, count, strength, scale in itertools.product(*axes.values()):
        parts = [
            _slug(model or "own-model") if len(models) > 1 else "",
            _slug(sampler) if len(names_of_samplers) > 1 else "",
            f"steps-{count}" if len(steps) > 1 else "",
            f"lora-{_decimal(strength)}" if len(strengths) > 1 else "",
            f"cfg-{_decimal(scale)}",
        ]
        try:
            group = Group(
                name="-".join(filter(None, parts)),
                guidance=scale,
                sampler=sampler,
                steps=count,
                model=model,
                lora=lora,
                lora_strength=strength,
            )
        except ValidationError as error:
            raise errors.SetupError(validation.sentence(error)) from None
        if group.name in found:
            raise errors.SetupError(f"two groups would have the name {group.name}")
        found[group.name] = group
    return tuple(found.values())


class SweepSource:
    """The jobs of a sweep, a source for `loadgen.load.Load`.

    Raises:
        SetupError: a field of its jobs is not valid.
    """

    #: `check` reports bytes, not jobs.
    jobs_to_make = None

    def __init__(
        self,
        captions: CaptionFile,
        of_groups: Sequence[Group],
        campaign: str,
        *,
        seed: int = 0,
        job: Mapping[str, JsonValue] | None = None,
        key: SigningKey | None = None,
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
        self.identity = digest(self.sweep.model_dump_json().encode())
        self.sent_before: Collection[str] = frozenset()
        """Ids of jobs to leave out, since they are in the queue or drawn already."""
        self._captions = captions
        self._key = key
        for _ in self.first_jobs():
            pass

    def check(self, start: int, on_read: OnRead = ignore, _on_job: object = None) -> None:
        """Checks each caption that is still to be sent, in the first group: groups were checked."""
        first = start // len(self.sweep.groups)
        for number, caption in enumerate(self._captions.read(first, on_read), first):
            self._body(self.sweep.groups[0], number, caption)

    def bodies(self, start: int) -> Iterator[str | None]:
        for group, number, caption in self._images(start):
            if sweep.job_id(group.name, number) in self.sent_before:
                yield None
            else:
                yield self._body(group, number, caption)

    def jobs(self, start: int = 0) -> Iterator[Job]:
        """The jobs from position *start* on."""
        return itertools.starmap(self._job, self._images(start))

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

    def _images(self, start: int) -> Iterator[tuple[Group, int, str]]:
        first, skipped = divmod(start, len(self.sweep.groups))
        numbered = enumerate(self._captions.read(first), first)
        images = (
            (group, number, caption) for number, caption in numbered for group in self.sweep.groups
        )
        return itertools.islice(images, skipped, None)

    def _job(self, group: Group, number: int, caption: str) -> Job:
        prompt = prompt_of(caption)
        fields: dict[str, Any] = {
            **self.sweep.job,
            "id": sweep.job_id(group.name, number),
            "campaign": self.campaign,
            "prompt": prompt,
            "enable_prompt_comments": False,  # a caption's '#' is a letter
            "seed": sweep.seed_of(number, caption, self.sweep.seed),
            "cfg_scale": group.guidance,
            "sampler_name": group.sampler,
            "steps": group.steps,
            "model": group.model,
        }
        if group.lora and group.lora_strength:
            fields["prompt"] += f" <lora:{group.lora}:{group.lora_strength:g}>"
        if fields["prompt"] != caption:
            fields["metadata"] = {sweep.CAPTION: caption}
        try:
            return Job.model_validate(fields)
        except ValidationError as error:
            reason = validation.sentence(error, Job.model_fields)
            raise errors.SetupError(
                f"group {group.name}, caption {number} ({caption[:60]!r}): {reason}"
            ) from None

    def _body(self, group: Group, number: int, caption: str) -> str:
        body = self._job(group, number, caption).to_message(self._key)
        try:
            sizes.checked_messages([body])
        except errors.JobError as error:
            raise errors.SetupError(f"caption {number}: {error.message}") from None
        return body


def _sampler(name: str) -> str:
    try:
        return samplers.find(name).key
    except ValueError as error:
        raise errors.SetupError(f"--set sampler_name: {error}") from None


def _slug(name: str) -> str:
    """Writes a name in the characters of a group's name."""
    return slug(name).replace("_", "-")[:_NAME_CHARACTERS].rstrip("-.") or "x"


def _decimal(value: float) -> str:
    """`3.0`, `7.25`."""
    text = f"{value:.9g}"
    return text if "." in text or "e" in text else f"{text}.0"
