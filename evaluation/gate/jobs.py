"""The jobs that the gate draws: those of a file, or those of the images to compare with."""

from collections.abc import Collection
from pathlib import Path

from evaluation.gate import images
from imagefleet import concurrency
from imagefleet.errors import SetupError
from imagefleet.files import demo
from imagefleet.job.message import Job, read_job
from imagefleet.job.passes import img2img
from loadgen.sources import open_source

#: Of a file, unless --count says more.
COUNT = 24

_CONCURRENT_READS = 16


def of_file(path: Path | None, count: int | None, steps: int | None) -> list[Job]:
    """The first jobs of a file, or of the demo's; raises SetupError if one is not valid."""
    name = path or demo.find_checkpoint() / "demo_jobs.jsonl"
    source = open_source(str(name), count=count or COUNT)
    source.check()
    jobs = [
        read_job(body, f"{number:06}")
        for number, body in enumerate(source.bodies(), 1)
        if body is not None
    ]
    if not jobs:
        raise SetupError(f"{name} has no captions")
    return _distinct([_to_draw(each, steps) for each in jobs])


async def of_images(side: images.Images, names: Collection[str]) -> list[Job]:
    """The jobs of stored images; raises NotComparableError if one does not say how it was drawn."""
    found = {}

    async def read(name: str) -> None:
        data = await side.read(name)
        job = None if data is None else images.job_in(data)
        if job is None:
            raise images.NotComparableError(
                f"{side.label}: {name} has no job in it, so it cannot be drawn again here: compare"
                " it with other images instead"
            )
        found[str(job.id)] = job

    await concurrency.for_each(names, read, _CONCURRENT_READS)
    return [_to_draw(found[each], None) for each in sorted(found)]


def _to_draw(job: Job, steps: int | None) -> Job:
    """The job, with the model that is loaded; raises SetupError if an engine cannot draw it."""
    named = [each for each in job.sources if img2img.place(each) is not None]
    files = [*named, *job.upscaler_files, *(unit.model for unit in job.controls)]
    reason = None
    if job.stages > 1:
        reason = f"has {job.stages} stages, of which each begins with the image of the one before"
    elif job.only_upscales:
        reason = "only enlarges an image"
    elif files:
        reason = f"needs a file of a storage, {files[0]}"
    if reason is not None:
        raise SetupError(
            f"job {job.id} {reason}: the gate draws jobs of one stage without such files; have"
            " workers draw two campaigns, and compare these"
        )
    fields: dict[str, object] = {"model": None, "verify": False}
    if steps is not None:
        fields["steps"] = steps
    return job.model_copy(update=fields)


def _distinct(jobs: list[Job]) -> list[Job]:
    seen = set[str]()
    for job in jobs:
        if str(job.id) in seen:
            raise SetupError(f"two of the captions have the id {job.id}")
        seen.add(str(job.id))
    return jobs
