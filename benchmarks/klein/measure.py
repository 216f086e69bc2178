"""Measures FLUX.2-klein-4B at full size with random weights: speed, limits, small cards, exactness.

    python benchmarks/klein/measure.py --out benchmarks/results/klein.json
    python benchmarks/klein/measure.py --rows engine,capped_7 --out F.json

Each row has a process of its own, as its memory may be limited; they run one after the other. All
that is compared is measured by one row, or by two of one run. The results are written after each
row, to those of earlier runs. `--tiny` tries all on a CPU, with meaningless figures.
"""

import argparse
import functools
import itertools
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [f"{ROOT}/benchmarks", f"{ROOT}/demo_model/training", str(ROOT)]

import torch

from demo_world import answers, world
from demo_world.klein import drawing, networks
from demo_world.klein import measure as demo_klein
from evaluation.bench import machine, work
from evaluation.score.demo.judge import load_judge
from imagefleet.pricing import families
from klein import full_size, theirs, tiny_klein
from rows import amounts, program
from rows.groups import Figures, quotient
from rows.process import CAPS, Measure, decibels, limit_memory
from worker.engine import contract, load
from worker.engine.flow import text
from worker.engine.flow.families import KLEIN
from worker.engine.pixel import text_states
from worker.engine.slots.engine import SlotEngine

#: More than there are slots: no two images drawn at once share a LoRA.
FILES, TINY_FILES = 20, 5

#: Sides of the native image, of a small one and of those of a bag, on a GPU and in a trial.
NATIVE, SMALL = (1024, 1024), (512, 512)
BAG = ((1024, 1024), (832, 1216), (768, 768))
TINY_NATIVE, TINY_SMALL = (64, 64), (32, 32)
TINY_BAG = ((64, 64), (48, 80), (48, 48))

#: The LoRAs of the bag's jobs, in turn, and their steps.
BAG_LORAS: Sequence[Sequence[full_size.Kind]] = (
    [("lora", 4)],
    [("lora", 128)],
    [("lokr", 8)],
    [("lora", 32), ("lora", 16)],
    [("lora", 64)],
)
BAG_STEPS = (4, 6, 5, 8, 4, 7, 4)

OVERHEAD_SECONDS = 400.0

#: Captions that the demo's klein draws, on a GPU and in a trial.
CAPTIONS, TINY_CAPTIONS = 500, 3


def model_of(arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.folder / ("tiny" if arguments.tiny else "klein")
    model = full_size.build(folder, arguments.device, is_tiny=arguments.tiny)
    if arguments.device.type == "cuda":
        torch.cuda.empty_cache()
    return model


def sizes(arguments: argparse.Namespace) -> tuple[tuple[int, int], tuple[int, int]]:
    return (TINY_NATIVE, TINY_SMALL) if arguments.tiny else (NATIVE, SMALL)


def requests_of(
    size: tuple[int, int], loras: Sequence[Sequence[contract.Lora]] = ((),)
) -> Iterator[contract.ImageRequest]:
    """Requests without end, each with the next LoRAs and a seed of its own."""
    width, height = size
    for number, own in enumerate(itertools.cycle(loras)):
        yield full_size.request(
            width=width, height=height, loras=tuple(own), seed=number
        )


def bag(
    arguments: argparse.Namespace, loras: Mapping[full_size.Kind, Sequence[Path]]
) -> Iterator[contract.ImageRequest]:
    """Unlike LoRAs, steps and sizes, shuffled by cycles of unlike lengths."""
    kinds, steps = itertools.cycle(BAG_LORAS), itertools.cycle(BAG_STEPS)
    shapes = itertools.cycle(TINY_BAG if arguments.tiny else BAG)
    for number, (own, count, shape) in enumerate(
        zip(kinds, steps, shapes, strict=False)
    ):
        found = [loras[kind][number % len(loras[kind])] for kind in own]
        yield full_size.request(
            width=shape[0],
            height=shape[1],
            steps=count,
            seed=number,
            loras=tuple(map(full_size.lora_of, found)),
        )


def row_pixels(request: contract.ImageRequest) -> float:
    return request.width * request.height * request.steps


def load_engine(
    arguments: argparse.Namespace, model: Path, **settings: object
) -> SlotEngine:
    how = {"compile": "auto" if arguments.compile else "off", **settings}
    return load.load_engine(load.EngineSettings(model, str(arguments.device), **how))


def write_loras(
    arguments: argparse.Namespace, model: Path, kind: full_size.Kind
) -> list[Path]:
    count = TINY_FILES if arguments.tiny else FILES
    return full_size.write_loras(
        model.with_name("loras"), model, kind, count, arguments.device
    )


def write_own(arguments: argparse.Namespace, model: Path) -> list[tuple[contract.Lora]]:
    """LoRAs for jobs with one each."""
    paths = write_loras(arguments, model, ("lora", 32))
    return [(full_size.lora_of(path),) for path in paths]


def warm(engine: SlotEngine, requests: Sequence[contract.ImageRequest]) -> None:
    """Draws a round, so that graphs for what its jobs have are compiled and recorded."""
    work.draw(engine, [*requests, *requests])
    for request in requests[:1]:
        engine.warm_up(request)
    work.draw(engine, requests)


def rate(
    engine: SlotEngine,
    size: tuple[int, int],
    seconds: float,
    loras: Sequence[Sequence[contract.Lora]],
) -> float:
    """Images/s of one size, with the next LoRAs in each, after graphs for them are there."""
    warm(engine, list(itertools.islice(requests_of(size, loras), 2 * engine.slots)))
    return work.drive(engine, requests_of(size, loras), seconds).images_per_second


def prepare_engine(arguments: argparse.Namespace) -> Measure:
    """The engine alone: rates of two sizes, company, prompts, and the card's limit."""
    model = model_of(arguments)
    native, small = sizes(arguments)
    own = write_own(arguments, model)
    began_at = time.monotonic()
    engine = load_engine(arguments, model)
    ready = time.monotonic() - began_at
    work.draw(engine, [full_size.request(width=native[0], height=native[1])])
    first = time.monotonic() - began_at

    def measure(seconds: float) -> Figures:
        figures: Figures = {
            "ready_seconds": ready,
            "first_picture_seconds": first,
            "slots": engine.slots,
            "matrix_flops_per_second": machine.measure_matrix_rate(
                arguments.device, engine.checkpoint.unet.dtype
            ),
            "flops_per_image": 1e12
            * families.find("klein").image_tflop(*native, steps=4),
            "hardware": machine.hardware(arguments.device),
            "versions": machine.versions(),
        }
        for name, size in {"1024": native, "512": small}.items():
            for loras, word in ((((),), "no_lora"), (own, "mixed")):
                figures[f"{word}_{name}_images_per_second"] = rate(
                    engine, size, seconds, loras
                )
        unlike = (
            replace(each, prompt=f"a house of the colour {each.seed}")
            for each in requests_of(native)
        )
        driven = work.drive(engine, unlike, seconds)
        figures["unlike_prompts_images_per_second"] = driven.images_per_second
        some = itertools.islice(requests_of(native, own), 2 * engine.slots)
        jobs = [replace(each, steps=4 + each.seed % 3) for each in some]
        figures["company_psnr_db"] = company(engine, jobs)
        figures["graphs"] = dict(engine.graphs)
        return figures

    return measure


def prepare_bag(arguments: argparse.Namespace) -> Measure:
    """Unlike LoRAs, steps and sizes against uniform jobs with a LoRA each."""
    model = model_of(arguments)
    native, _ = sizes(arguments)
    own = write_own(arguments, model)
    kinds = {each for some in BAG_LORAS for each in some}
    of_bag = {each: write_loras(arguments, model, each) for each in sorted(kinds)}
    engine = load_engine(arguments, model)
    jobs = list(itertools.islice(bag(arguments, of_bag), 8 * engine.slots))
    for shape in TINY_BAG if arguments.tiny else BAG:
        warm(engine, [each for each in jobs if (each.width, each.height) == shape])

    def measure(seconds: float) -> Figures:
        mixed, uniform = (
            amounts.per_second(work.drive(engine, requests, seconds), row_pixels)
            for requests in (itertools.cycle(jobs), requests_of(native, own))
        )
        return {
            "bag_over_uniform": mixed / uniform,
        }

    return measure


def company(engine: SlotEngine, jobs: Sequence[contract.ImageRequest]) -> float:
    """PSNR of images among unlike ones against the same alone, the lowest."""
    together = work.draw(engine, jobs)
    alone = (work.draw(engine, [job])[0] for job in jobs[:4])
    return min(itertools.starmap(decibels, zip(alone, together, strict=False)))


def prepare_diffusers(arguments: argparse.Namespace) -> Measure:
    """The engine and diffusers in one process: compiled, with peft, and against float32."""
    model = model_of(arguments)
    native, _ = sizes(arguments)
    loras = write_own(arguments, model)[:4]
    engine = load_engine(arguments, model)
    like = full_size.request(width=native[0], height=native[1])
    on_gpu = arguments.device.type == "cuda"
    half = torch.bfloat16 if on_gpu else torch.float32

    def measure(seconds: float) -> Figures:
        ours = {}
        for word, own in (("no_lora", ((),)), ("mixed", loras)):
            ours[f"{word}_images_per_second"] = rate(engine, native, seconds, own)
        shapes = (TINY_BAG if arguments.tiny else BAG)[:2]
        requests = [
            replace(like, width=width, height=height) for width, height in shapes
        ]
        drawn = work.draw(engine, requests)
        engine.close()
        exact = tiny_klein.read_pipeline(model).to(arguments.device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        references = [theirs.draw(exact, [each])[0] for each in requests]
        del exact
        pipeline = tiny_klein.read_pipeline(model, dtype=half).to(arguments.device)
        peft = theirs.lora_rate(pipeline, like, [lora for (lora,) in loras], seconds)
        compiled = theirs.compiled_rate(pipeline, like, seconds, compiles=on_gpu)
        return {
            **ours,
            "peft_images_per_second": peft,
            "compiled_images_per_second": compiled,
            "psnr_db": min(map(decibels, drawn, references)),
        }

    return measure


def prepare_capped(arguments: argparse.Namespace, gigabytes: int) -> Measure:
    """Another LoRA a job with the GPU's memory limited; 8 GB: in int8, from stored states."""
    model = model_of(arguments)
    native, _ = sizes(arguments)
    own = write_own(arguments, model)
    jobs = requests_of(native, own)
    settings: dict[str, object] = {}
    if gigabytes == min(CAPS):
        settings["precision"] = "int8"
        prompt = str(full_size.request().prompt)
        states = stored_states(arguments, model, [prompt, ""], KLEIN.text)
        model = without_encoder(arguments, model)
        jobs = (replace(each, text_states=(*states,)) for each in jobs)
    limit_memory(arguments.device, gigabytes)
    engine = load_engine(arguments, model, **settings)

    def measure(seconds: float) -> Figures:
        warm(engine, list(itertools.islice(jobs, 2 * engine.slots)))
        driven = work.drive(engine, jobs, seconds)
        return {
            "images_per_second": driven.images_per_second,
            "slots": engine.slots,
            **engine.savings._asdict(),
            "peak_memory_bytes": machine.peak_memory_bytes(arguments.device),
        }

    return measure


def prepare_int8(arguments: argparse.Namespace) -> Measure:
    """Weights in int8 and in bfloat16, one engine after the other."""
    model = model_of(arguments)
    native, _ = sizes(arguments)
    own = write_own(arguments, model)

    def measure(seconds: float) -> Figures:
        figures: Figures = {}
        for precision in ("auto", "int8"):
            engine = load_engine(arguments, model, precision=precision)
            figures[f"{precision}_images_per_second"] = rate(
                engine, native, seconds, own
            )
            engine.close()
        return figures

    return measure


def prepare_demo(arguments: argparse.Namespace) -> Measure:
    """The demo's klein in slots: which captions of unseen scenes it draws right."""
    model = ROOT / "demo_klein"
    if arguments.tiny:
        model = model_of(arguments)
    count = TINY_CAPTIONS if arguments.tiny else CAPTIONS
    scenes = drawing.held_out_scenes(count, seed=count)
    # Its encoder is a ninth as deep as klein's, and other layers are taken.
    rule = replace(KLEIN.text, layers=networks.TAKEN_LAYERS)
    captions = [caption for _, caption in scenes]
    *states, empty = stored_states(arguments, model, [*captions, ""], rule)
    jobs = [
        full_size.request(
            prompt=caption,
            width=world.IMAGE_PX,
            height=world.IMAGE_PX,
            seed=number,
            text_states=(states[number], empty),
        )
        for number, caption in enumerate(captions)
    ]
    engine = load_engine(arguments, without_encoder(arguments, model))

    def measure(_: float) -> Figures:
        found = demo_klein.judged(work.draw(engine, jobs), load_judge())
        right = [
            answers.both_right(scene, each)
            for (scene, _), each in zip(scenes, found, strict=True)
        ]
        return {"both_right": answers.share(right)}

    return measure


def without_encoder(arguments: argparse.Namespace, model: Path) -> Path:
    """The model as a card of 8 GB has it: without the weights of the text encoder."""
    folder: Path = arguments.folder / f"{model.name}-small"
    weights = shutil.ignore_patterns("model*.safetensors")
    if not folder.exists():
        whole = model.resolve()
        shutil.copytree(whole, folder, copy_function=os.symlink, ignore=weights)
    return folder


def stored_states(
    arguments: argparse.Namespace,
    model: Path,
    prompts: Sequence[str],
    rule: text.TextRule,
) -> list[Path]:
    """Files of the prompts' states, as the rule takes them of the model's own encoder."""
    # As the engine asks for them, whichever layers they are of.
    name = text.encoder_name(model, KLEIN.text)
    folder: Path = arguments.folder
    paths = [folder / f"{text_states.stem(each, name)}.safetensors" for each in prompts]
    if not all(path.exists() for path in paths):
        on_gpu = arguments.device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        encoder = text.ChatEncoder(model, rule, arguments.device, dtype)
        encoder.place(may_stay=True)
        for prompt, path in zip(prompts, paths, strict=True):
            (states,) = encoder.encode([prompt])
            path.write_bytes(text_states.content(prompt, name, states))
        del encoder, states
        if on_gpu:
            torch.cuda.empty_cache()
    return paths


ROWS: program.Rows = {
    "engine": prepare_engine,
    "bag": prepare_bag,
    "diffusers": prepare_diffusers,
    "int8": prepare_int8,
    "demo": prepare_demo,
    **{
        f"capped_{math.floor(limit)}": functools.partial(
            prepare_capped, gigabytes=gigabytes
        )
        for gigabytes, limit in sorted(CAPS.items())
    },
}


def summarise(rows: Mapping[str, Figures]) -> Figures:
    """The main figures; None for what was not measured."""

    def found(row: str, key: str = "images_per_second") -> float | None:
        value: float | None = rows.get(row, {}).get(key)
        return value

    none = found("engine", "no_lora_1024_images_per_second")
    mixed = found("engine", "mixed_1024_images_per_second")
    limit = quotient(
        found("engine", "matrix_flops_per_second"), found("engine", "flops_per_image")
    )
    ours, plain = (
        found("diffusers", f"{word}_images_per_second") for word in ("mixed", "no_lora")
    )
    summary: Figures = {
        "klein_1024_images_per_second": none,
        "klein_512_images_per_second": found("engine", "no_lora_512_images_per_second"),
        "klein_matrix_limit_fraction": quotient(none, limit),
        "klein_mixed_over_no_lora": quotient(mixed, none),
        "klein_mixed_over_no_lora_512": quotient(
            found("engine", "mixed_512_images_per_second"),
            found("engine", "no_lora_512_images_per_second"),
        ),
        "klein_bag_over_uniform": found("bag", "bag_over_uniform"),
        "klein_over_diffusers_compiled": quotient(
            plain, found("diffusers", "compiled_images_per_second")
        ),
        "klein_over_diffusers_peft": quotient(
            ours, found("diffusers", "peft_images_per_second")
        ),
        "klein_int8_over_bf16": quotient(
            found("int8", "int8_images_per_second"),
            found("int8", "auto_images_per_second"),
        ),
        "klein_psnr_db": found("diffusers", "psnr_db"),
        "klein_company_psnr_db": found("engine", "company_psnr_db"),
        "klein_unlike_over_same_prompts": quotient(
            found("engine", "unlike_prompts_images_per_second"), none
        ),
        "klein_demo_right": found("demo", "both_right"),
    }
    for row in ROWS:
        if row.startswith("capped"):
            summary[f"klein_{row}"] = quotient(found(row), mixed)
    return summary


def main() -> None:
    parser = program.options(__doc__, ROWS, "/tmp/imagefleet-klein")
    program.run(__file__, parser.parse_args(), ROWS, summarise, OVERHEAD_SECONDS)


if __name__ == "__main__":
    main()
