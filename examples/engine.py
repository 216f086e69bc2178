"""Draws without a queue: a list of prompts, rows of a table, and a source that never ends.

    python examples/engine.py demo_model demo_model/loras

Each result comes as soon as it is drawn, in any order; one that cannot be drawn has an error.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import imagefleet
from imagefleet import Job


def draw_prompts(engine: imagefleet.Engine, prompts: Iterable[str]) -> None:
    """Saves a picture of each prompt by its number."""
    jobs = (Job(id=str(number), prompt=prompt) for number, prompt in enumerate(prompts))
    for result in engine.draw(jobs):
        if result.error is None:
            result.images[0].save(f"{result.job.id}.png")


def draw_rows(engine: imagefleet.Engine, rows: Iterable[dict[str, Any]]) -> list[Any]:
    """Rows of a job's fields, each with its picture, or with what went wrong."""
    return [
        {
            **result.job.given_fields,
            "image": next(iter(result.images), None),
            "error": result.error,
        }
        for result in engine.draw(rows)
    ]


def draw_on(engine: imagefleet.Engine, seeds: Iterator[int]) -> Iterator[Any]:
    """Pictures of one prompt for as long as somebody takes them."""
    yield from engine.draw(
        Job(prompt="a red house", seed=seed, steps=4) for seed in seeds
    )


def main(model: str, loras: str) -> None:
    with imagefleet.Engine(model, loras=loras) as engine:
        draw_prompts(engine, ["a red house", "a blue fish, <lora:outline-style:0.8>"])
        rows = [
            {"id": "a", "prompt": "a cat"},
            {"id": "b", "prompt": "a cat <lora:none:1>"},
        ]
        print(*draw_rows(engine, rows), sep="\n")
        for result in itertools.islice(draw_on(engine, itertools.count()), 3):
            print(result.job.seed, result.images[0].size)


if __name__ == "__main__":
    main(*sys.argv[1:])
