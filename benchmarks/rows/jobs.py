"""Rows of `engine.py` for jobs of all kinds: LoRAs of any rank, number and kind, mixed sizes."""

import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from evaluation.bench import engine as bench_engine
from evaluation.bench import jobs as bench_jobs
from evaluation.bench import work
from families import lora_kinds
from imagefleet.files import demo
from rows.groups import Figures
from rows.process import Channel, Options, build, decibels, limit_memory, rate, warm
from worker.engine import contract, load

log = logging.getLogger("benchmark")

#: A LoRA's kind and rank.
LoraOfRank = tuple[lora_kinds.LoraFormat, int]

#: More than there are slots: no two images drawn at once share a LoRA.
FILES, TINY_FILES = 24, 5

#: The LoRAs of consecutive jobs, over and over.
JOBS: Mapping[str, Sequence[Sequence[LoraOfRank]]] = {
    "rank_32": [[("lora", 32)]],
    "rank_128": [[("lora", 128)]],
    "shuffled_ranks": [[("lora", rank)] for rank in (4, 64, 16, 128, 8, 32)],
    "two_loras": [[("lora", 64), ("lora", 32)]],
    "three_loras": [[("lora", 128), ("lora", 64), ("lora", 64)]],
    "locon_sixth": [*[[("lora", 32)]] * 5, [("locon", 32)]],
    "locon_all": [[("locon", 32)]],
    "loha": [[("loha", 16)]],
    "lokr": [[("lokr", 16)]],
    "dora": [[("dora", 32)]],
}

#: How often the reference's words, a chunk and a little, are in a prompt: 1 to 10 chunks.
REPEATS, TINY_REPEATS = tuple(range(10)), (0, 2)

SIZES = ((512, 512), (512, 768), (768, 512))
TINY_SIZES = ((64, 64), (64, 96), (96, 64))

#: In company of the company rows' images: one of each kind.
COMPANY: Sequence[LoraOfRank] = (("lora", 8), ("lora", 64), ("locon", 8), ("loha", 4), ("lokr", 4),
                           ("dora", 8), ("locon", 16))  # fmt: skip

#: A trained LoRA changes weights by some hundredths, a random one by as much as they are.
COMPANY_STRENGTH = 0.05


def workloads(
    setup: bench_engine.Setup, options: Options
) -> dict[str, bench_jobs.Workload]:
    """Each row's jobs; writes the LoRAs that they need."""
    count = TINY_FILES if options.is_tiny else FILES
    kinds = {each for jobs in JOBS.values() for job in jobs for each in job}
    files = {kind: build_loras(setup, options, kind, count) for kind in kinds}
    found = {}
    for row, jobs in JOBS.items():
        loras = []
        for number, job in zip(
            range(count * len(jobs)), itertools.cycle(jobs), strict=False
        ):
            at = number // len(jobs)
            loras.append(
                tuple(
                    files[each][(at + place) % count] for place, each in enumerate(job)
                )
            )
        found[row] = replace(setup.workload, loras=tuple(loras))
    return found


def build_loras(
    setup: bench_engine.Setup, options: Options, kind: LoraOfRank, count: int
) -> list[str]:
    """Writes LoRAs of a kind; returns their names."""
    name, rank = kind
    folder, device = setup.workload.lora_directory / options.group, options.torch_device
    names = lora_kinds.build_linked(
        folder, setup.model, count, device, rank=rank, kind=name
    )
    return [f"{options.group}/{each}" for each in names]


def loras(options: Options, channel: Channel) -> None:
    """LoRAs of other ranks, numbers and kinds, each against rank 32 in the same process.

    The group `capped_loras` is limited to the memory of a GPU of 8 GB.
    """
    setup, slots, prefix = limit(options)
    rows = workloads(setup, options)
    engine, workload, warmth = warm(
        options, setup, rows["rank_32"], slots, ("per_slot",)
    )
    rows = {row: replace(each, sizes=workload.sizes) for row, each in rows.items()}

    def measure(row: str, seconds: float) -> Figures:
        bench_engine.draw_a_round(engine, rows[row])
        if row.startswith("locon"):
            engine.warm_up()  # compiles for what has been drawn so far
        return rate(engine, rows[row], options, warmth, seconds)

    if (
        not prefix
    ):  # a capped engine has fewer slots once it holds changes of convolutions
        bench_engine.draw_a_round(engine, rows["locon_all"])
        engine.warm_up()
    channel.serve({f"{prefix}{row}": functools.partial(measure, row) for row in rows})


def sizes(options: Options, channel: Channel) -> None:
    """Three sizes in equal parts, and two of them alone; each job another LoRA of rank 32."""
    setup, slots, prefix = limit(options)
    engine, workload, warmth = warm(
        options, setup, setup.workload, slots, ("per_slot",)
    )
    mixed = TINY_SIZES if options.is_tiny else SIZES
    for size in mixed:
        engine.warm_up(replace(workload, sizes=(size,)).request(0))

    def measure(sizes: tuple[tuple[int, int], ...], seconds: float) -> Figures:
        drawn = replace(workload, sizes=sizes)
        bench_engine.draw_a_round(engine, drawn)
        return rate(engine, drawn, options, warmth, seconds)

    channel.serve(
        {
            f"{prefix}{row}": functools.partial(measure, sizes)
            for row, sizes in {
                "one_size": mixed[:1],
                "large_size": mixed[1:2],
                "sizes": mixed,
            }.items()
        }
    )


def prompts(options: Options, channel: Channel) -> None:
    """Prompts of 1 to 10 chunks in equal parts, each job another LoRA of rank 32."""
    setup = build(options)
    engine, workload, warmth = warm(
        options, setup, setup.workload, options.slots, ("per_slot",)
    )
    repeats = TINY_REPEATS if options.is_tiny else REPEATS
    workload = replace(workload, repeats=repeats)
    prepared = [
        engine.prepare(workload.request(number)) for number in range(len(repeats))
    ]
    for one in {each.tokens: each for each in prepared}.values():
        engine.warm_up(one.request)

    def measure(seconds: float) -> Figures:
        bench_engine.draw_a_round(engine, workload)
        figures = rate(engine, workload, options, warmth, seconds)
        return {"chunks": [len(each.prompt) for each in prepared], **figures}

    channel.serve({"prompts": measure})


def limit(options: Options) -> tuple[bench_engine.Setup, int | None, str]:
    """The model and jobs, and an engine's slots; what a row's name begins with."""
    setup = build(options)
    if not options.group.startswith("capped"):
        return setup, options.slots, ""
    limit_memory(options.torch_device)
    return setup, options.capped_slots, "capped_"


def company(options: Options, channel: Channel) -> None:
    """Images alone against the same images beside others with LoRAs of every kind, uncompiled."""
    setup = build(options) if options.is_tiny else None
    model = setup.model if setup else demo.TRAINED
    folder = options.folder / "company"
    directory = setup.workload.lora_directory if setup else folder
    own = bench_engine.Setup(
        model, bench_jobs.Workload("a red star", "green", ((0, 0),), directory), folder
    )
    names = [build_loras(own, options, kind, 1)[0] for kind in COMPANY]
    workload = replace(own.workload, loras=tuple((name,) for name in names))
    engine = load.load_engine(
        load.EngineSettings(model, options.device, slots=len(names) + 1, compile="off")
    )
    workload = replace(workload, sizes=(engine.default_size,), steps=(15, 11, 13))

    def measure(_: float) -> Figures:
        beside = [weaken(workload.request(number)) for number in range(len(names))]
        subjects = [
            replace(request, seed=100 + at) for at, request in enumerate(beside)
        ]
        subjects.append(replace(subjects[0], loras=()))
        each = []
        for subject in subjects:
            (alone,) = work.draw(engine, [subject])
            together = work.draw(engine, [subject, *beside])[0]
            each.append(decibels(together, alone))
        return {"psnr_db": min(each), "psnr_db_each": each}

    channel.serve({"company": measure})


def weaken(request: contract.ImageRequest) -> contract.ImageRequest:
    """A random LoRA is as large as the weights, far larger than any trained one."""
    weaker = {"text_encoder_weight": COMPANY_STRENGTH, "unet_weight": COMPANY_STRENGTH}
    return replace(
        request, loras=tuple(replace(lora, **weaker) for lora in request.loras)
    )
