"""Submits three jobs and saves their images.

First start a worker, for example on the demo's model:

    imagefleet worker --model demo_model --lora-directory demo_model/loras

Then run this: python examples/client.py. Both use ./imagefleet-data, or the storage that
IMAGEFLEET_STORAGE names.
"""

import imagefleet

COLOURS = ("red", "green", "blue")


def main() -> None:
    jobs = [
        imagefleet.Job(prompt=f"a {colour} house", id=colour, steps=15)
        for colour in COLOURS
    ]
    with imagefleet.connect() as fleet:
        batch = fleet.submit(jobs, campaign="example")
        for result in batch.results(timeout=600):
            print(result.id, result.status, result.reason or f"seed {result.seed}")
            if result.status == "completed":
                result.image().save(f"{result.id}.png")


if __name__ == "__main__":
    main()
