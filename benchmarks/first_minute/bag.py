"""A bag of unlike jobs, drawn by a seed."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from evaluation.bench.jobs import Workload
from worker.engine import contract

#: Jobs with a LoRA of rank 32 each, else unlike ones: of one size, of three, or of three sizes and
#: some of them in four unguided steps.
Jobs = Literal["uniform", "one_size", "sizes", "few_steps"]

Family = Literal["sd1", "sdxl"]

KINDS = ("lora", "loha", "lokr", "dora", "locon")

SAMPLERS = ("euler_ancestral", "dpmpp_2m_karras", "ddim", "euler")

STEPS, TINY_STEPS = (10, 30), (2, 5)

#: The jobs' shares: of numbers of LoRAs, of jobs with a LoCon among them, of few steps, of sizes as
#: parts of the native one. Other kinds, the samplers and the steps are equally frequent.
SHARES: Mapping[str, Sequence[tuple[Any, float]]] = {
    "loras": [(0, 0.25), (1, 0.4), (2, 0.2), (3, 0.15)],
    "sdxl_loras": [(0, 0.3), (1, 0.5), (2, 0.2)],
    "locon": [(True, 0.15), (False, 0.85)],
    "few_steps": [(True, 0.25), (False, 0.75)],
    "sizes": [((1.0, 1.0), 0.5), ((1.0, 1.5), 0.25), ((1.5, 1.0), 0.25)],
    "sdxl_sizes": [((1.0, 1.0), 0.5), ((0.875, 1.125), 0.25), ((1.125, 0.875), 0.25)],
}


def draw(
    jobs: Jobs, family: Family, workload: Workload, *, is_tiny: bool
) -> Iterator[contract.ImageRequest]:
    """Endless jobs of *workload*, whose LoRAs are of all kinds; the same ones each time."""
    if jobs == "uniform":
        plain = [
            names for names in workload.loras if names[0].startswith("random-lora-")
        ]
        yield from replace(workload, loras=tuple(plain)).requests()
    chance = random.Random(0)
    prefix = "sdxl_" if family == "sdxl" else ""

    def choose(name: str) -> Any:
        given = SHARES.get(prefix + name) or SHARES[name]
        values, shares = zip(*given, strict=True)
        return chance.choices(values, shares)[0]

    files = {
        kind: [name for (name,) in workload.loras if name.startswith(f"random-{kind}-")]
        for kind in KINDS
    }
    for number, request in enumerate(workload.requests()):
        count, has_locon = choose("loras"), choose("locon")
        kinds = [chance.choice(KINDS[:-1]) for _ in range(count)]
        kinds[:1] = ["locon"] if has_locon else kinds[:1]
        chosen = [(chance.choice(files[kind]),) for kind in kinds]
        one_each = replace(workload, loras=tuple(chosen))
        parts = (1.0, 1.0) if jobs == "one_size" else choose("sizes")
        is_few = jobs == "few_steps" and choose("few_steps")
        yield replace(
            request,
            loras=tuple(one_each.request(at).loras[0] for at in range(len(chosen))),
            sampler=chance.choice(SAMPLERS),
            steps=4 if is_few else chance.randint(*(TINY_STEPS if is_tiny else STEPS)),
            cfg_scale=1.0 if is_few else request.cfg_scale,
            seed=number,
            width=int(request.width * parts[0]),
            height=int(request.height * parts[1]),
        )
