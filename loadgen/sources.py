"""Sources of jobs: a template, a file, standard input.

Job n of a template is a function of the file's content, the seed and n.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, Unpack

from imagefleet import validation
from imagefleet.errors import SetupError
from imagefleet.job import differences, sizes
from imagefleet.job.message import DEFAULT_CAMPAIGN, Job
from loadgen import file_source, template
from loadgen.file_source import FileSource, OnJob, StandardInput, Terms
from loadgen.formats.selection import Balanced, Unique
from loadgen.inputs import Picture, WithInputs
from loadgen.template import Draw, Patterns

#: First jobs of a template that are checked before sending, besides each entry of each list.
_SAMPLE_JOBS = 200


class JobSource(Protocol):
    """Jobs in an order of their own, which are made anew each time that they are read."""

    @property
    def campaign(self) -> str | None:
        """The campaign of all jobs, whose ids are then the source's own; None: of several."""

    @property
    def count(self) -> int:
        """Positions of the source, those without a job included."""

    def check(self) -> None:
        """Raises SetupError for invalid jobs."""

    def bodies(self) -> Iterator[str | None]:
        """Messages by position, None for a position without one."""


class TemplateSource:
    def __init__(
        self, path: Path, *, seed: int | None = None, **terms: Unpack[Terms]
    ) -> None:
        self._path = path
        self._signer = terms.get("signer")
        read, content = template.read_template(path)
        self._seed = read.seed if seed is None else seed
        self._fixed = dict(read.job)
        content += f" seed={self._seed}"
        for name in ("campaign", "defaults"):
            value = terms.get(name)
            if value is not None and not self._fixed.get(name):
                self._fixed[name] = str(value)
                content += f" {name}={value}"
        if keep := terms.get("keep"):
            self._fixed.setdefault("keep", keep.model_dump(mode="json"))
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
        except SetupError as error:
            raise SetupError(f"{path}: {error.message}") from None
        count = terms.get("count") or read.count
        if count is None:
            raise SetupError(f"{path} has no number of jobs: add `count:` or --count")
        self.count = count
        #: Jobs by how they differ from AUTOMATIC1111's, of the messages that were made last.
        self.differences = Counter[str]()

    def describe(self) -> str:
        return f"{self.count:,} job{'s' * (self.count != 1)}"

    def check(self, on_job: OnJob | None = None) -> None:
        """Checks every entry of every list once, and the first jobs; all with *on_job*."""
        for turn in range(self._patterns.longest):
            self._body(0, self._patterns.draw_in_turn(turn))
        if on_job is None:
            for _ in itertools.islice(self.bodies(), _SAMPLE_JOBS):
                pass
            self.differences.clear()  # they are of the first jobs alone
            return
        for index in range(self.count):
            draws = self._patterns.draw(self._seed, index)
            on_job(f"job {index + 1}", self._job(index, draws))

    def bodies(self) -> Iterator[str]:
        self.differences.clear()
        for index in range(self.count):
            yield self.body(index)

    def body(self, index: int) -> str:
        """Message *index*, whatever comes before it; raises SetupError for an invalid job."""
        return self._body(index, self._patterns.draw(self._seed, index))

    def _job(self, index: int, draws: list[Draw]) -> Job:
        render = self._patterns.render
        id_of = self._id_of.copy()
        id_of.update(index.to_bytes(8))
        fields = {
            **self._fixed,
            "prompt": render(self._prompt, draws),
            "negative_prompt": render(self._negative_prompt, draws),
            "id": id_of.hexdigest(),
        }
        if self._metadata:
            drawn = {key: render(slot, draws) for key, slot in self._templated.items()}
            fields["metadata"] = {**self._metadata, **drawn}
        with self._named(fields["prompt"]):
            return Job.model_validate(fields)

    def _body(self, index: int, draws: list[Draw]) -> str:
        job = self._job(index, draws)
        self.differences.update(differences.of_job(job, (job.width, job.height)))
        with self._named(job.prompt):
            (body,) = sizes.checked_messages([job.to_message(self._signer)])
        return body

    def _named(self, prompt: object) -> AbstractContextManager[None]:
        before = f"{self._path} generates invalid jobs (the prompt is {str(prompt)[:100]!r}): "
        return validation.as_error(SetupError, before, Job.model_fields)


Source = TemplateSource | FileSource


def open_source(
    name: str,
    *,
    form: str | None = None,
    seed: int | None = None,
    pictures: Sequence[Picture] = (),
    unique: bool = False,
    balance: str | None = None,
    **terms: Unpack[Terms],
) -> Source:
    """The source for a file's name; `-` is standard input. *form* overrides what the name tells.

    Each job is there once for each of the *pictures*, if there are any. *unique*: each prompt once.
    *balance*: the column whose values have turns. The report of the *terms*
    says whether rows that are no jobs are skipped; else they are a SetupError.
    """
    path = Path(name)
    report = terms.get("report")
    if form is None and path.suffix in template.SUFFIXES:
        flags = {"--inputs": pictures, "--unique": unique, "--balance": balance}
        if report is not None:
            flags |= {"--skip-invalid": report.skips, "--rejects": report.rejects}
        for flag in (flag for flag, given in flags.items() if given):
            raise SetupError(f"{flag} is for files of jobs, not for templates")
        return TemplateSource(path, seed=seed, **terms)
    if seed is not None:
        raise SetupError("--seed is for templates, not for files of jobs")
    if name == "-":
        form = form or "jsonl"
    found = file_source.find_format(path, form, other_suffixes=template.SUFFIXES)
    if unique:
        found = Unique(found)
    if balance is not None:
        found = Balanced(found, balance)
    if pictures:
        found = WithInputs(found, pictures)
    if name == "-":
        return StandardInput(found, **terms)
    return FileSource(path, found, **terms)
