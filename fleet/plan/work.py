"""The jobs that a plan is for, by model: a number of them, or those of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from imagefleet import errors
from imagefleet.job.message import Job
from imagefleet.pricing import families
from loadgen.sources import Source
from worker.files import check

#: Model names in an error.
_MOST_NAMES = 5


@dataclass(slots=True)
class Work:
    """All jobs of one model; *model* is None for those that name none."""

    model: str | None
    family: families.Family
    jobs: int = 0
    images: int = 0
    tflop: float = 0.0
    """TFLOP of all images together."""

    @property
    def tflop_per_image(self) -> float:
        return self.tflop / self.images


def of_count(jobs: int, images_per_job: int, family: families.Family) -> list[Work]:
    """The work of so many jobs of the family's own size and steps."""
    images = jobs * images_per_job
    return [Work(None, family, jobs, images, images * family.image_tflop())]


@dataclass(slots=True)
class Models:
    """The family of each model's jobs; *others* is that of models that nothing else tells."""

    by_name: Mapping[str, families.Family]
    others: families.Family | None
    unknown: dict[str, None] = field(default_factory=dict)

    def family_of(self, model: str | None) -> families.Family:
        if model is not None:
            if model in self.by_name:
                return self.by_name[model]
            if self.others is None:
                self.unknown[model] = None
        return self.others or families.SD1

    def refuse_unknown(self) -> None:
        """Raises SetupError that names the models whose family nothing tells."""
        if not self.unknown:
            return
        names = list(self.unknown)
        more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
        first = names[0]
        raise errors.SetupError(
            f"the family of the model {', '.join(names[:_MOST_NAMES])}{more} is not known: give"
            f" --model {first}={'|'.join(families.FAMILIES)}, or the checkpoint's path as --model,"
            " or --family for all"
        )


def read_models(given: Sequence[str], family: str | None) -> Models:
    """Models given as NAME=FAMILY or checkpoints; raises SetupError for what is neither."""
    by_name = {}
    for text in given:
        name, equals, slug = text.rpartition("=")
        if equals and not Path(text).exists():
            by_name[name] = families.find(slug)
        else:
            by_name |= _of_checkpoint(Path(text).expanduser())
    return Models(by_name, None if family is None else families.find(family))


def _of_checkpoint(path: Path) -> dict[str, families.Family]:
    """The family of a checkpoint by its header."""
    if not path.exists():
        raise errors.SetupError(
            f"--model {str(path)!r}: should be NAME={'|'.join(families.FAMILIES)}, or the path of a"
            " checkpoint"
        )
    check.check_path(path)
    name = path.resolve().name if path.is_dir() else path.stem
    return {name: families.of_title(check.family(path))}


def add_stages(found: dict[str | None, Work], models: Models, job: Job, jobs: int = 1) -> None:
    """Adds *jobs* such jobs to *found*, stage by stage; raises JobError for impossible sizes."""
    before: families.Size | None = None
    for stage in job.stages_left():
        work = found.get(stage.model)
        if work is None:
            work = found[stage.model] = Work(stage.model, models.family_of(stage.model))
        size = work.family.size_of(stage, before)
        passes = stage.passes(*size, enlarges=work.family.enlarges)
        images = jobs * stage.images
        work.jobs += jobs
        work.images += images
        work.tflop += images * work.family.passes_tflop(passes)
        before = passes[-1].width, passes[-1].height


def of_source(source: Source, models: Models) -> list[Work]:
    """The jobs of a file or a template, by model; a job's own size and steps count.

    Each stage of a job counts as a job of its model: it is a message and an image of its own.

    Raises:
        SetupError: a job is not valid, there is none, or a model's family is not known.
    """
    found: dict[str | None, Work] = {}

    def add(place: str, job: Job) -> None:
        try:
            add_stages(found, models, job)
        except errors.JobError as error:
            raise errors.SetupError(f"{place}: {error.message}") from None

    source.check(0, add)
    models.refuse_unknown()
    if not found:
        raise errors.SetupError("there are no jobs in the file: nothing to plan")
    for work in found.values():
        if not work.tflop:
            raise errors.SetupError(
                f"the jobs of the model {work.model or '-'} only resize images, which takes no GPU:"
                " leave them out of the plan"
            )
    return sorted(found.values(), key=lambda work: work.tflop, reverse=True)
