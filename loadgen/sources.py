"""Sources of jobs: a template, a file, standard input.

Job n of a template is a function of the file's content, the seed and n. One with lists of fields is
a sweep: job n has combination n modulo their number, and the words and the seed of n divided by it.
"""

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Unpack

from imagefleet import errors, validation
from imagefleet.job import sizes
from imagefleet.job.message import DEFAULT_CAMPAIGN, Job
from loadgen import file_source, sweep, template
from loadgen.file_source import FileSource, OnJob, StandardInput, Terms
from loadgen.template import Draw, Patterns

#: First jobs of a template that are checked before sending, besides each entry of each list.
_SAMPLE_JOBS = 200

_MAX_ID_CHARACTERS = 128


class TemplateSource:
    def __init__(
        self, path: Path, *, seed: int | None = None, **terms: Unpack[Terms]
    ) -> None:
        campaign, count = terms.get("campaign"), terms.get("count")
        self._path = path
        self._signer = terms.get("signer")
        read, content = template.read_template(path)
        self._seed = read.seed if seed is None else seed
        self._fixed, self._sweep = sweep.read(read.job)
        content += f" seed={self._seed}"
        if campaign is not None and not self._fixed.get("campaign"):
            self._fixed["campaign"] = campaign
            content += f" campaign={campaign}"
        if (defaults := terms.get("defaults")) and not self._fixed.get("defaults"):
            self._fixed["defaults"] = defaults
            content += f" defaults={defaults}"
        self.campaign = str(self._fixed.get("campaign") or DEFAULT_CAMPAIGN)
        self.identity = file_source.digest(content.encode())
        self._id_of = hashlib.blake2b(
            self.identity.encode(), digest_size=file_source.ID_BYTES
        )
        metadata = self._fixed.pop("metadata", None)
        self._metadata = dict(metadata) if isinstance(metadata, dict) else {}
        self._patterns = Patterns(read.lists)
        try:
            self._prompt = self._patterns.slot(read.prompt, "prompt")
            self._negative_prompt = self._patterns.slot(
                read.negative_prompt, "negative_prompt"
            )
            self._templated = {
                key: self._patterns.slot(
                    [template.Choice(text=value)], f"job.metadata.{key}"
                )
                for key, value in self._metadata.items()
                if isinstance(value, str)
            }
        except errors.SetupError as error:
            raise errors.SetupError(f"{path}: {error.message}") from None
        #: Jobs that differ only in what is swept.
        self.combinations = self._sweep.combinations
        count = read.count if count is None else count
        if count is None and not self.is_sweep:
            raise errors.SetupError(
                f"{path} has no number of jobs: add `count:` or --count"
            )
        self.count = self.combinations if count is None else count

    @property
    def is_sweep(self) -> bool:
        return self.combinations > 1

    def describe(self) -> str:
        """`60 jobs: 12 combinations of 3 steps x 4 cfg_scale`."""
        jobs = f"{self.count:,} job{'s' * (self.count != 1)}"
        if not self.is_sweep:
            return jobs
        return f"{jobs}: {self.combinations:,} combinations of {self._sweep.describe()}"

    def check(self, on_job: OnJob | None = None) -> None:
        """Checks every entry of every list once, and the first jobs; all with *on_job*."""
        for turn in range(self._patterns.longest):
            self._body(0, self._patterns.draw_in_turn(turn))
        if on_job is None:
            for _ in itertools.islice(self.bodies(), _SAMPLE_JOBS):
                pass
            return
        for index in range(self.count):
            on_job(f"job {index + 1}", self._job(index, self._draws(index)))

    def bodies(self) -> Iterator[str]:
        return map(self.body, range(self.count))

    def examples(self, most: int) -> Iterator[str]:
        """The first messages; those of a sweep from all over it."""
        number = min(most, self.count)
        for example in range(number):
            yield self.body(
                example * self.count // number if self.is_sweep else example
            )

    def body(self, index: int) -> str:
        """Message *index*, whatever comes before it; raises SetupError for an invalid job."""
        return self._body(index, self._draws(index))

    def _draws(self, index: int) -> list[Draw]:
        """The words of job *index*: those of its round."""
        return self._patterns.draw(self._seed, index // self.combinations)

    def _swept(self, index: int) -> tuple[dict[str, object], str]:
        """The fields of job *index* that are its own, and how its id says what differs."""
        if not (chosen := self._sweep.combination(index % self.combinations)):
            return {}, ""
        labels = [
            sweep.label(name, value)
            for name, value in chosen.items()
            if len(self._sweep.values[name]) > 1
        ]
        fields = sweep.as_job_fields(chosen)
        if self.is_sweep and "seed" not in {*fields, *self._fixed}:
            # One seed for all points of a turn: pictures differ by what is swept alone.
            data = f"{self.identity} seed {index // self.combinations}".encode()
            fields["seed"] = int.from_bytes(
                hashlib.blake2b(data, digest_size=4).digest()
            )
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
        with self._named(fields["prompt"]):
            return Job.model_validate(fields)

    def _body(self, index: int, draws: list[Draw]) -> str:
        job = self._job(index, draws)
        with self._named(job.prompt):
            (body,) = sizes.checked_messages([job.to_message(self._signer)])
        return body

    def _named(self, prompt: object) -> AbstractContextManager[None]:
        before = f"{self._path} generates invalid jobs (the prompt is {str(prompt)[:100]!r}): "
        return validation.as_error(errors.SetupError, before, Job.model_fields)


#: Messages by position, None for a position without one.
Source = TemplateSource | FileSource


def open_source(
    name: str,
    *,
    form: str | None = None,
    seed: int | None = None,
    **terms: Unpack[Terms],
) -> Source:
    """The source for a file's name; `-` is standard input. *form* overrides what the name tells.

    The report of the *terms* says whether rows that are no jobs are skipped; else they are a
    SetupError.
    """
    path, report = Path(name), terms.get("report")
    if form is None and path.suffix in template.SUFFIXES:
        if report is not None and (report.skips or report.rejects):
            flag = "--skip-invalid" if report.skips else "--rejects"
            raise errors.SetupError(f"{flag} is for files of jobs, not for templates")
        return TemplateSource(path, seed=seed, **terms)
    if seed is not None:
        raise errors.SetupError("--seed is for templates, not for files of jobs")
    if name == "-":
        return StandardInput(file_source.find_format(path, form or "jsonl"), **terms)
    found = file_source.find_format(path, form, other_suffixes=template.SUFFIXES)
    return FileSource(path, found, **terms)
