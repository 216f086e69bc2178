"""Draws a table of prompts with Ray Data: an actor on each GPU, around the engine.

    python examples/ray_data.py MODEL prompts.parquet images.parquet

A row is a job: its columns are the job's fields. What cannot be drawn is a row with its reason, and
repeats no batch; an actor that is killed costs what it had in flight.
"""

import io
import sys
from collections.abc import Iterator
from typing import Any

import ray
from pydantic import ValidationError

import imagefleet
from imagefleet import validation

#: Rows that one call takes; more than the engine's slots, so that these are always full.
BATCH_ROWS = 64


class Draw:
    """An actor's engine; *options* are those of `imagefleet.Engine`."""

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = imagefleet.Engine(model, **options)

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The rows of a batch with their images, each as soon as it is drawn."""
        jobs = []
        for values in zip(*batch.values(), strict=True):
            row = dict(zip(batch, values, strict=True))
            try:
                jobs.append(imagefleet.Job.model_validate(row))
            except ValidationError as error:
                yield as_row(row["id"], error=validation.sentence(error))
        for drawn in self.engine.draw(jobs):
            if drawn.error is not None:
                yield as_row(drawn.job.id, error=drawn.error.message)
                continue
            file = io.BytesIO()
            drawn.images[0].save(file, "PNG")
            yield as_row(drawn.job.id, image=file.getvalue())


def as_row(job_id: object, *, image: bytes = b"", error: str = "") -> dict[str, Any]:
    """A batch of one row."""
    return {"id": [job_id], "image": [image], "error": [error]}


def draw(
    prompts: ray.data.Dataset,
    model: str,
    *,
    actors: tuple[int, int] = (1, 1),
    gpus: float = 1,
    **options: Any,
) -> ray.data.Dataset:
    """The images of *prompts*, which have an `id` and a job's other fields in their columns.

    *actors*: the fewest and the most at once; *gpus*: of each, 0 for a CPU.
    """
    return prompts.map_batches(
        Draw,
        fn_constructor_args=(model,),
        fn_constructor_kwargs=options,
        batch_size=BATCH_ROWS,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(min_size=actors[0], max_size=actors[1]),
        num_gpus=gpus,
    )


if __name__ == "__main__":
    model, source, target = sys.argv[1:]
    draw(ray.data.read_parquet(source), model).write_parquet(target)
