"""The jobs that a plan is for, by model: a number of them, or those of a file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from imagefleet.errors import JobError, SetupError
from imagefleet.job.message import Job
from imagefleet.job.prompt import LoraTag
from imagefleet.pricing import families
from imagefleet.pricing.families import Family
from loadgen.sources import Source
from worker.accelerator import Accelerator

#: The most work of a bundle: 30 seconds of a card that draws one usual image of SD1.5 a second.
_BUNDLE_TFLOP = 30 * families.SD1.image_tflop()


@dataclass
class ModelJobs:
    """All jobs of one model; *model* is None for those that name none."""

    model: str | None
    family: Family
    jobs: int = 0
    images: int = 0
    #: TFLOP of all images together, with those that take as long as the rest does.
    tflop: float = 0.0
    #: Pixels of all images together.
    pixels: int = 0
    #: Jobs that are sent in bundles: those of one image and stage.
    bundled: int = 0
    #: LoRAs of the last job: another one with the same needs no others.
    loras: Sequence[LoraTag] = ()

    @property
    def most_in_bundle(self) -> int:
        """Jobs in a bundle, by their work."""
        return max(1, round(_BUNDLE_TFLOP / self.tflop_per_image))

    @property
    def tflop_per_image(self) -> float:
        return self.tflop / self.images


def of_count(jobs: int, models: Models) -> list[ModelJobs]:
    """The work of so many jobs of the family's own size, and steps without an accelerator's."""
    family = models.family_of(None)
    usual = models.accelerator.usual if models.accelerator else ()
    tflop = jobs * family.taken_tflop(family.image_tflop(None, None, *usual))
    pixels = jobs * family.width * family.height
    return [ModelJobs(None, family, jobs, jobs, tflop, pixels, jobs)]


@dataclass(frozen=True)
class Models:
    """The family of each model's jobs; *others* is that of models that nothing else tells."""

    by_name: Mapping[str, Family]
    others: Family | None
    #: Settings that all jobs are drawn with.
    accelerator: Accelerator | None = None

    def family_of(self, model: str | None) -> Family:
        """Raises SetupError for a model whose family nothing tells."""
        family = self.others if model is None else self.by_name.get(model, self.others)
        if model is not None and family is None:
            raise SetupError(
                f"the family of the model {model} is not known: give --model {model}="
                f"{'|'.join(families.FAMILIES)}, or --family for all"
            )
        return family or families.SD1


def read_models(
    given: Sequence[str], family: str | None, accelerator: str | None = None
) -> Models:
    """Models given as NAME=FAMILY; raises SetupError for what is not."""
    by_name = {}
    for text in given:
        name, equals, slug = text.rpartition("=")
        if not equals:
            raise SetupError(
                f"--model {text}: should be NAME={'|'.join(families.FAMILIES)}"
            )
        by_name[name] = families.find(slug)
    others = None if family is None else families.find(family)
    return Models(by_name, others, Accelerator.of(accelerator) if accelerator else None)


def add_stages(
    found: dict[str | None, ModelJobs], models: Models, job: Job, jobs: int = 1
) -> None:
    """Adds *jobs* such jobs to *found*, stage by stage.

    Raises JobError for impossible sizes, and for what contradicts the accelerator.
    """
    before = None
    for stage in job.stages_left():
        work = found.get(stage.model)
        if work is None:
            work = found[stage.model] = ModelJobs(
                stage.model, models.family_of(stage.model)
            )
        usual = models.accelerator or Accelerator.of_family(work.family.slug)
        if usual is not None and not stage.only_upscales:
            stage = usual.fit(stage)  # noqa: PLW2901 - as the worker does
        size = work.family.size_of(stage, before)
        passes = stage.passes(*size, enlarges=work.family.enlarges)
        images = jobs * stage.images
        work.jobs += jobs
        work.images += images
        tflop = work.family.passes_tflop([*passes, *stage.detail_passes(*size)])
        if not stage.only_upscales:
            others = bool(stage.loras) and stage.loras != work.loras
            tflop = work.family.taken_tflop(tflop, size, has_other_loras=others)
            work.loras = stage.loras
        work.tflop += images * tflop
        before = passes[-1].width, passes[-1].height
        work.pixels += images * math.prod(before)
        work.bundled += jobs if job.stages == stage.images == 1 else 0


def of_source(source: Source, models: Models) -> list[ModelJobs]:
    """The jobs of a file or a template, by model; a job's own size and steps count.

    Each stage of a job counts as a job of its model: it is a message and an image of its own.

    Raises:
        SetupError: a job is not valid, there is none, or a model's family is not known.
    """
    found: dict[str | None, ModelJobs] = {}

    def add(place: str, job: Job) -> None:
        try:
            add_stages(found, models, job)
        except JobError as error:
            raise SetupError(f"{place}: {error.message}") from None

    source.check(add)
    if not found:
        raise SetupError("there are no jobs in the file: nothing to plan")
    for work in found.values():
        if not work.tflop:
            raise SetupError(
                f"the jobs of the model {work.model or '-'} only resize images, which takes no GPU:"
                " leave them out of the plan"
            )
    return sorted(found.values(), key=lambda work: work.tflop, reverse=True)
