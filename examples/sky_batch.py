"""Draws a file of prompts with Sky Batch: the engine in a pool of SkyPilot's workers.

    pip install skypilot[aws]
    python examples/sky_batch.py s3://BUCKET/prompts.jsonl s3://BUCKET/images/

Each line is a job: {"id": "0001", "prompt": "a red house"}. What cannot be drawn is a line of the
manifest with its reason, and its batch goes on; a node that is lost costs the batch that it had.
`sky_batch.yaml` is the pool.
"""

import sys
from pathlib import Path

import sky

POOL, BATCH_ROWS = "imagefleet-pool", 256


@sky.batch.remote_function
def draw() -> None:
    """Runs on a worker, on which only what it imports itself is known."""
    import sky
    from pydantic import ValidationError

    import imagefleet
    from imagefleet import validation

    with imagefleet.Engine(
        "/models/model.safetensors", loras="/models/loras"
    ) as engine:
        for batch in sky.batch.load():
            found = {row["id"]: {"id": row["id"], "error": ""} for row in batch}
            jobs = []
            for row in batch:
                try:
                    jobs.append(imagefleet.Job.model_validate(row))
                except ValidationError as error:
                    found[row["id"]]["error"] = validation.sentence(error)
            for drawn in engine.draw(jobs):
                if drawn.error is None:
                    found[drawn.job.id]["image"] = drawn.images[0]
                else:
                    found[drawn.job.id]["error"] = drawn.error.message
            sky.batch.save_results(list(found.values()))


def main(prompts: str, images: str) -> None:
    pool = sky.Task.from_yaml(str(Path(__file__).with_suffix(".yaml")))
    sky.get(sky.jobs.pool_apply(pool, POOL, mode=sky.serve.UpdateMode.ROLLING))
    manifest = sky.batch.JsonWriter(f"{images}manifest.jsonl", column=["id", "error"])
    sky.batch.Dataset(sky.batch.JsonReader(prompts)).map(
        draw, POOL, BATCH_ROWS, [sky.batch.ImageWriter(images), manifest]
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
