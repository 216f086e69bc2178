"""An accelerator: a LoRA with which a model draws in few steps, merged for all of a worker's jobs.

A model that was distilled itself, or has a schedule of its own, is treated alike.

Each kind wants its own sampler, steps and guidance. A job that leaves them out, or has the usual
ones of all jobs, is drawn with those; it stays the same job, and its image tells how it was drawn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from imagefleet.errors import JobError, SetupError
from imagefleet.job import samplers
from imagefleet.job.message import Job
from imagefleet.job.samplers import Sampler
from imagefleet.pricing import families
from imagefleet.validation import JSONDict
from worker.settings import WorkerSettings


@dataclass(frozen=True)
class AcceleratorKind:
    """Samplers, guidance and steps of one kind of accelerator; the first are the usual ones."""

    title: str
    #: Regular expression found in the file names of this kind, in lower case.
    pattern: str
    samplers: tuple[str, ...]
    steps: tuple[int, int]
    guidance: tuple[float, float] = (1.0, 1.0)
    #: Schedule type of the samplers; in SGM Uniform timesteps end where a step ends: 999, 749.
    schedule: str = "SGM Uniform"

    @property
    def rows(self) -> int:
        """Rows of each step of a job that leaves guidance out."""
        return 1 if self.guidance[0] == 1 else 2


#: By their makers' descriptions. The first that fits a file's name: Hyper-SD's CFG-preserved files
#: are drawn with guidance, and DMD2 "will not behave" with other samplers than LCM, which takes its
#: timesteps whole in Turbo alone.
KINDS = (
    AcceleratorKind(
        "Hyper-SD with CFG", r"hyper.*cfg", ("Euler", "TCD"), (8, 12), (5.0, 8.0)
    ),
    AcceleratorKind("Hyper-SD", r"hyper", ("Euler", "TCD"), (1, 8)),
    AcceleratorKind("SDXL-Lightning", r"lightning", ("Euler",), (2, 8)),
    AcceleratorKind("DMD2", r"dmd", ("LCM",), (1, 8), (1.0, 2.0), "Turbo"),
    AcceleratorKind("PCM", r"pcm", ("Euler",), (2, 16), (1.0, 8.0)),
    AcceleratorKind("LCM", r"lcm", ("LCM", "Euler a"), (2, 8), (1.0, 2.0)),
    AcceleratorKind("few steps", r"few[-_ ]?steps", ("Euler",), (1, 8)),  # the demo's
)

#: Models that want their own, by their family. klein's prompts are text, which weighs nothing.
OF_FAMILIES = {
    "klein": AcceleratorKind(
        "FLUX.2-klein", "", ("Euler",), (1, 50), schedule="Automatic"
    ),
    "klein_base": AcceleratorKind(
        "FLUX.2-klein base", "", ("Euler",), (1, 150), (4.0, 10.0), "Automatic"
    ),
}

#: Where a file's name says nothing like "4step".
_USUAL_STEPS = 4
_STEPS = re.compile(r"(\d+)[-_ ]?steps?")


@dataclass(frozen=True)
class Accelerator:
    #: The LoRA's name; '' for what a model itself wants.
    name: str
    kind: AcceleratorKind
    steps: int

    @classmethod
    def of(cls, source: str) -> Accelerator:
        """The accelerator of a setting; raises SetupError if its name tells no kind."""
        name = Path(source).stem if source.endswith(".safetensors") else source
        for kind in KINDS:
            if re.search(kind.pattern, name.lower()):
                least, most = kind.steps
                told = _STEPS.search(name.lower())
                steps = int(told[1]) if told else _USUAL_STEPS
                return cls(name, kind, min(max(steps, least), most))
        raise SetupError(
            f"--accelerator {name[:40]!r}: its name tells no kind; it should hold lcm, lightning,"
            " hyper, dmd2, pcm or few-steps"
        )

    @classmethod
    def of_family(cls, family: str) -> Accelerator | None:
        """What the models of a family want themselves; None for most."""
        kind = OF_FAMILIES.get(family)
        if kind is None:
            return None
        return cls("", kind, families.find(family).steps)

    @property
    def usual(self) -> tuple[int, int]:
        """Steps, and rows of each, of a job that leaves steps and guidance out."""
        return self.steps, self.kind.rows

    def fit(self, job: Job) -> Job:
        """The job with these settings for its usual ones; raises JobError for contrary ones.

        One that only enlarges an image has none.
        """
        if job.only_upscales:
            return job
        if any(tag.name == self.name for tag in job.loras):
            raise JobError(
                f"the prompt names the LoRA {self.name[:40]!r}, which this worker draws all jobs"
                " with: leave it out of the job"
            )
        kind = self.kind
        given = job.given_fields
        name = given.get("sampler_name", kind.samplers[0])
        sampler = self._sampler("the sampler", name, given.get("scheduler"))
        steps = given.get("steps", self.steps)
        self._check("steps", steps, kind.steps)
        scale = given.get("cfg_scale", kind.guidance[0])
        self._check("cfg_scale", scale, kind.guidance)
        weight = scale * sum(job.parsed_prompt.weights)
        if self.name:
            self._check(
                "cfg_scale times the prompt's own weight", weight, kind.guidance
            )
        fields: JSONDict = {
            "sampler_name": sampler.title,
            "scheduler": kind.schedule,
            "steps": steps,
            "cfg_scale": scale,
        }
        if job.enable_hr:
            fields |= self._fit_second_pass(job, sampler, scale)
        drawn = job.model_copy(update=fields)
        # Its name in the storage and in the records: it is another's by no more than this worker.
        vars(drawn).update(digest=job.digest, stage_digest=job.stage_digest)
        return drawn

    def _fit_second_pass(self, job: Job, first: Sampler, scale: float) -> JSONDict:
        kind = self.kind
        name = job.hr_sampler_name
        second = self._sampler("hr_sampler_name", name or first.title, job.hr_scheduler)
        if job.hr_second_pass_steps:
            self._check("hr_second_pass_steps", job.hr_second_pass_steps, kind.steps)
        own, _ = job.hires_prompts
        if own is not None:
            weight = scale * sum(own.weights)
            self._check(
                "cfg_scale times the weight of hr_prompt", weight, kind.guidance
            )
        return {"hr_sampler_name": name and second.title, "hr_scheduler": None}

    def _sampler(self, field: str, name: str, scheduler: str | None) -> Sampler:
        schedule = samplers.check_scheduler(scheduler) or samplers.scheduler_in(name)
        if schedule in {None, "Automatic"}:
            schedule = self.kind.schedule
        sampler = samplers.find(name, schedule)
        usual = {None, self.kind.schedule}
        if (
            sampler.title not in self.kind.samplers
            or sampler.schedule_type not in usual
        ):
            raise self._refusal(
                f"{field} is {sampler.name}",
                f"{' or '.join(self.kind.samplers)} with {self.kind.schedule}",
            )
        return sampler

    def _check(self, field: str, value: float, limits: tuple[float, float]) -> None:
        low, high = limits
        if not low <= value <= high:
            taken = f"{low:g}" if low == high else f"{low:g} to {high:g}"
            raise self._refusal(f"{field} is {value:g}", taken)

    def _refusal(self, given: str, taken: str) -> JobError:
        lora = f"{self.name[:40]!r}, an accelerator of the kind " if self.name else ""
        return JobError(
            f"{given}, and this worker draws with {lora}{self.kind.title}, which takes {taken}:"
            " leave it out of the job"
        )


def is_unguided(settings: WorkerSettings) -> bool:
    """True if a worker draws without guidance the jobs that name no cfg_scale."""
    source = settings.accelerator
    return source is not None and Accelerator.of(source).kind.rows == 1
