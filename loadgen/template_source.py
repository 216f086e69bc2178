"""Jobs from a template: job n is a function of the file's content, the seed and n.

A template with lists of fields is a sweep: job n has combination n modulo their number, and the
words and the seed of n divided by it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Unpack

from pydantic import ValidationError

from imagefleet import errors, validation
from imagefleet.job import sizes
from imagefleet.job.message import DEFAULT_CAMPAIGN, Job
from loadgen import sweep, template
from loadgen.file_source import ID_BYTES, OnJob, Terms, digest
from loadgen.sweep import Sweep
from loadgen.template import Draw, Patterns

#: First jobs of a template that are checked before sending, besides each entry of each list.
_SAMPLE_JOBS = 200

_MAX_ID_CHARACTERS = 128
_WORD_CHARACTERS = 24


class TemplateSource:
    def __init__(self, path: Path, *, seed: int | None = None, **terms: Unpack[Terms]) -> None:
        campaign, count = terms.get("campaign"), terms.get("count")
        self._path = path
        self._signer = terms.get("signer")
        read, content = template.read_template(path)
        self._seed = read.seed if seed is None else seed
        self._fixed, fields = sweep.read(read.job)
        content += f" seed={self._seed}"
        if campaign is not None and not self._fixed.get("campaign"):
            self._fixed["campaign"] = campaign
            content += f" campaign={campaign}"
        self.campaign = str(self._fixed.get("campaign") or DEFAULT_CAMPAIGN)
        self.identity = digest(content.encode())
        self._id_of = hashlib.blake2b(self.identity.encode(), digest_size=ID_BYTES)
        metadata = self._fixed.pop("metadata", None)
        self._metadata = dict(metadata) if isinstance(metadata, dict) else {}
        self._patterns = Patterns(read.lists)
        try:
            self._prompt = self._patterns.slot(read.prompt, "prompt")
            self._negative_prompt = self._patterns.slot(read.negative_prompt, "negative_prompt")
            self._templated = {
                key: self._patterns.slot([template.Choice(text=value)], f"job.metadata.{key}")
                for key, value in self._metadata.items()
                if isinstance(value, str)
            }
            # The slot and the labels of the words of each list of which every entry is taken; in
            # braces, as their placeholders: a list may have the name of a field.
            self._every = {
                f"{{{name}}}": self._every_word(name, read.choices[name]) for name in read.every
            }
        except errors.SetupError as error:
            raise errors.SetupError(f"{path}: {error.message}") from None
        self._is_random = read.sweep == "random"
        words = {name: range(len(labels)) for name, (_, labels) in self._every.items()}
        self._sweep = Sweep({**words, **fields.values})
        #: Jobs that differ only in what is swept.
        self.combinations = 1 if self._is_random else self._sweep.combinations
        self.count = self._count(read.count if count is None else count)

    @property
    def is_sweep(self) -> bool:
        return self._sweep.combinations > 1

    def describe(self) -> str:
        """`60 jobs: 12 combinations of 3 steps x 4 cfg_scale`."""
        jobs = f"{self.count:,} job{'s' * (self.count != 1)}"
        if not self.is_sweep:
            return jobs
        if self._is_random:
            return f"{jobs}, each with one of {self._sweep.describe()}"
        return f"{jobs}: {self.combinations:,} combinations of {self._sweep.describe()}"

    def check(self, start: int, on_job: OnJob | None = None) -> None:
        """Checks every entry of every list once, and the first jobs; all with *on_job*."""
        for turn in range(self._patterns.longest):
            self._body(0, self._patterns.draw_in_turn(turn))
        if on_job is None:
            for _ in itertools.islice(self.bodies(start), _SAMPLE_JOBS):
                pass
            return
        for index in range(start, self.count):
            on_job(f"job {index + 1}", self._job(index, self._draws(index)))

    def bodies(self, start: int) -> Iterator[str]:
        for index in range(start, self.count):
            yield self.body(index)

    def examples(self, most: int) -> Iterator[str]:
        """The first messages; those of a sweep from all over it."""
        number = min(most, self.count)
        for example in range(number):
            yield self.body(example * self.count // number if self.is_sweep else example)

    def body(self, index: int) -> str:
        """Message *index*, whatever comes before it; raises SetupError for an invalid job."""
        return self._body(index, self._draws(index))

    def _every_word(self, name: str, choices: Sequence[template.Choice]) -> tuple[int, list[str]]:
        own = {"prompt": self._prompt, "negative_prompt": self._negative_prompt}
        slot = own.get(name, self._patterns.slot_of(name))
        if slot is None:
            raise errors.SetupError(f"every: no prompt has the placeholder {{{name}}}")
        if name in own:
            return slot, [f"{name}{number}" for number in range(1, len(choices) + 1)]
        return slot, [sweep.slug(word.lora or word.text)[:_WORD_CHARACTERS] for word in choices]

    def _count(self, given: int | None) -> int:
        if self.combinations > sweep.MAX_COMBINATIONS:
            raise errors.SetupError(
                f"{self._path} has {self.combinations:,} combinations;"
                f" {sweep.MAX_COMBINATIONS:,} at most"
            )
        if given is not None:
            return given
        if self.combinations == 1:
            raise errors.SetupError(f"{self._path} has no number of jobs: add `count:` or --count")
        return self.combinations

    def _chosen(self, index: int) -> sweep.Fields:
        """What is swept of job *index*: values of fields, and words by their number."""
        if not self._sweep.values:
            return {}
        if self._is_random:
            return self._sweep.drawn(self._seed, index)
        return self._sweep.combination(index % self.combinations)

    def _draws(self, index: int) -> list[Draw]:
        """The words of job *index*: those of its round, and its own of each list in `every`."""
        chosen = self._chosen(index)
        words = {slot: chosen[name] for name, (slot, _) in self._every.items()}
        return self._patterns.draw(self._seed, index // self.combinations, words)

    def _swept(self, index: int) -> tuple[dict[str, object], str]:
        """The fields of job *index* that are its own, and how its id says what differs."""
        if not (chosen := self._chosen(index)):
            return {}, ""
        labels = [
            self._every[name][1][value] if name in self._every else sweep.label({name: value})
            for name, value in chosen.items()
            if len(self._sweep.values[name]) > 1
        ]
        own = {name: value for name, value in chosen.items() if name not in self._every}
        fields = sweep.as_job_fields(own)
        if self.is_sweep and not self._is_random and "seed" not in {*fields, *self._fixed}:
            # One seed for all points of a turn: pictures differ by what is swept alone.
            data = f"{self.identity} seed {index // self.combinations}".encode()
            fields["seed"] = int.from_bytes(hashlib.blake2b(data, digest_size=4).digest())
        return fields, "-".join(filter(None, labels))

    def _job(self, index: int, draws: list[Draw]) -> Job:
        render = self._patterns.render
        id_of = self._id_of.copy()
        id_of.update(index.to_bytes(8))
        swept, label = self._swept(index)
        job_id = f"{id_of.hexdigest()}-{label}" if label else id_of.hexdigest()
        fields: dict[str, object] = {
            **self._fixed,
            **swept,
            "prompt": render(self._prompt, draws),
            "negative_prompt": render(self._negative_prompt, draws),
            "id": job_id[:_MAX_ID_CHARACTERS],
        }
        if self._metadata:
            drawn = {key: render(slot, draws) for key, slot in self._templated.items()}
            fields["metadata"] = {**self._metadata, **drawn}
        try:
            return Job.model_validate(fields)
        except ValidationError as error:
            reason = validation.sentence(error, Job.model_fields)
            raise self._invalid(fields["prompt"], reason) from None

    def _body(self, index: int, draws: list[Draw]) -> str:
        job = self._job(index, draws)
        try:
            body = job.to_message(self._signer)
            sizes.checked_messages([body])
        except errors.JobError as error:
            raise self._invalid(job.prompt, error.message) from None
        return body

    def _invalid(self, prompt: object, reason: str) -> errors.SetupError:
        return errors.SetupError(
            f"{self._path} generates invalid jobs: {reason} (the prompt is {str(prompt)[:100]!r})"
        )
