"""Measures the engine: images/s with a LoRA per job and without, limits, exactness.

    python benchmarks/engine.py --seconds 270 --out benchmarks/results/engine-h200.json
    python benchmarks/engine.py --rows mixed,no_lora --out /tmp/two-rows.json

Each group of rows has its own process (`rows/engine.py`), so that all load and compile in parallel
and a failure affects no other group. They measure one at a time, in the order of the rows' value,
until the time is up. The results are written anew, after each row. `--tiny` tries everything on a
CPU, with meaningless figures.
"""

import argparse
import asyncio
import functools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rows import groups
from rows.groups import Figures, Measurement, quotient

ROWS_SCRIPT = Path(__file__).with_name("rows") / "engine.py"

#: Of the whole time: until the processes are ready.
READY_SHARE = 0.6

#: In the order of their value.
ROWS = (
    Measurement("limit", "exact", 0, 3),
    Measurement("psnr", "exact", 0, 10),
    Measurement("mixed", "engine", 12, 4),
    Measurement("no_lora", "base", 10, 4),
    Measurement("mixed_steps", "engine", 18, 6),
    Measurement("baseline", "plain", 0, 15),
    Measurement("baseline_four_steps", "plain", 0, 15),
    Measurement("worker", "engine", 20, 8),
    Measurement("cfg_1", "base", 10, 4),
    Measurement("half_guided", "base", 16, 8),
    Measurement("edited", "base", 56, 24),
    Measurement("all_samplers", "base", 6, 170),
    Measurement("four_steps_engine", "few_steps", 8, 4),
    Measurement("four_steps", "few_steps", 20, 8),
    Measurement("four_steps_lora_engine", "few_steps_lora", 8, 4),
    Measurement("four_steps_lora", "few_steps_lora", 20, 8),
    Measurement("rank_32", "loras", 10, 6),
    Measurement("rank_128", "loras", 10, 8),
    Measurement("locon_all", "loras", 10, 8),
    *(
        Measurement(name, "loras", 8, 8)
        for name in ("three_loras", "dora", "two_loras", "shuffled_ranks")
    ),
    *(Measurement(name, "loras", 8, 6) for name in ("loha", "lokr", "locon_sixth")),
    Measurement("one_size", "sizes", 10, 6),
    Measurement("large_size", "sizes", 10, 6),
    Measurement("sizes", "sizes", 24, 8),
    Measurement("prompts", "prompts", 16, 8),
    Measurement("company", "company", 0, 40),
    Measurement("psnr_compiled", "exact_compiled", 0, 10),
    Measurement("capped", "capped", 10, 5),
    Measurement("capped_rank_32", "capped_loras", 8, 6),
    *(
        Measurement(f"capped_{name}", "capped_loras", 8, 8)
        for name in ("rank_128", "three_loras", "dora")
    ),
    Measurement("capped_locon_all", "capped_loras", 8, 60),
    Measurement("capped_sizes", "capped_sizes", 24, 8),
)

#: The group that creates the model.
BUILDER = "engine"


async def run(arguments: argparse.Namespace, ends_at: float, folder: Path) -> None:
    """Measures the rows that are asked for, within the given time."""
    options = [str(folder), "--device", arguments.device]
    for name in ("slots", "capped_slots", "bundle"):
        if (value := getattr(arguments, name)) is not None:
            options += [f"--{name.replace('_', '-')}", str(value)]
    options += ["--tiny"] if arguments.tiny else []
    rows = [
        Measurement(row.name, row.group, row.seconds * arguments.scale, row.overhead)
        for row in ROWS
        if row.name in arguments.rows
    ]
    builds = [row.group for row in rows if not row.group.startswith("exact")]
    options += ["--builder", BUILDER if BUILDER in builds else next(iter(builds), "")]
    await groups.measure(
        rows,
        lambda group: groups.Group.start(ROWS_SCRIPT, group, *options),
        functools.partial(groups.add_row, arguments.out, summarise),
        ready_seconds=READY_SHARE * (ends_at - time.monotonic()),
        ends_at=ends_at,
    )


Rows = Mapping[str, Figures]


def figure(rows: Rows, row: str, key: str = "images_per_second") -> float | None:
    """A figure of a row; None if it was not measured."""
    return rows.get(row, {}).get(key)


def summarise(rows: Rows) -> Figures:
    """The main figures, and those they are computed from."""
    found = functools.partial(figure, rows)
    mixed, limit = found("mixed"), rows.get("limit", {})
    from_queue = found("worker") or mixed
    most = quotient(limit.get("matrix_flops_per_second"), limit.get("flops_per_image"))
    decibels = [
        value for row in ("psnr", "psnr_compiled") if (value := found(row, "psnr_db"))
    ]
    return {
        "mixed_lora_images_per_second": rounded(from_queue),
        "no_lora_images_per_second": rounded(found("no_lora")),
        "mixed_over_no_lora": quotient(mixed or found("rank_32"), found("no_lora")),
        "over_diffusers_peft": quotient(from_queue, found("baseline")),
        "idle_fraction_300ms": rounded(found("worker", "idle_fraction")),
        "capped_over_uncapped": quotient(found("capped"), mixed),
        "mixed_steps_over_uniform": quotient(
            found("mixed_steps", "unet_calls_per_second"),
            found("mixed", "unet_calls_per_second"),
        ),
        "matrix_limit_fraction": quotient(from_queue, most),
        "psnr_db": rounded(min(decibels, default=None)),
        "mixed_lora_measured": "from the queue to the stored PNG"
        if found("worker")
        else "engine",
        "engine_mixed_lora_images_per_second": rounded(mixed),
        "matrix_limit_images_per_second": most,
        "diffusers_peft_images_per_second": rounded(found("baseline")),
        **summarise_jobs(rows),
        **summarise_few_steps(rows),
        "hardware": limit.get("hardware"),
        "versions": limit.get("versions"),
    }


#: The rows of `rows/jobs.py` that are compared with its row of rank 32.
COMPARED = ("rank_128", "shuffled_ranks", "two_loras", "three_loras", "locon_sixth", "locon_all",
            "loha", "lokr", "dora")  # fmt: skip


def summarise_jobs(rows: Rows) -> Figures:
    """The main figures of `rows/jobs.py`."""
    found = functools.partial(figure, rows)
    names = ("rank_32", *COMPARED)
    capped = [quotient(found(f"capped_{row}"), found(row)) for row in names]
    capped.append(quotient(found("capped_sizes"), found("sizes")))
    return {
        **{
            f"{row}_over_rank_32": quotient(found(row), found("rank_32"))
            for row in COMPARED
        },
        "sizes_mixed_by_pixels": quotient(
            found("sizes", "pixels_per_second"), found("one_size", "pixels_per_second")
        ),
        "large_size_by_pixels": quotient(
            found("large_size", "pixels_per_second"),
            found("one_size", "pixels_per_second"),
        ),
        "prompts_mixed_over_rank_32": quotient(found("prompts"), found("rank_32")),
        "company_psnr_db": rounded(found("company", "psnr_db")),
        "least_capped_over_uncapped": min(
            (each for each in capped if each), default=None
        ),
    }


def summarise_few_steps(rows: Rows) -> Figures:
    """The main figures of images without guidance, of few steps, and of all samplers."""
    found = functools.partial(figure, rows)
    rows_of = functools.partial(figure, rows, key="unet_rows_per_second")
    each = rows.get("all_samplers", {}).get("each", {})
    guided, unguided = rows_of("no_lora"), rows_of("cfg_1")
    # Half of the images are guided, and have two thirds of the rows.
    unmixed = 3 / (2 / guided + 1 / unguided) if guided and unguided else None
    return {
        "cfg1_over_cfg7": quotient(found("cfg_1"), found("no_lora")),
        "editing_over_plain_by_rows": quotient(
            rows_of("edited"), found("edited", "plain_unet_rows_per_second")
        ),
        "guided_mixed_over_unmixed": quotient(rows_of("half_guided"), unmixed),
        "all_samplers_over_euler_a": quotient(
            rows_of("all_samplers"), each.get("euler_ancestral")
        ),
        "slowest_sampler_over_euler_a": quotient(
            min(each.values(), default=None), each.get("euler_ancestral")
        ),
        "sd15_4_steps_images_per_second": rounded(found("four_steps")),
        "sd15_4_steps_idle_fraction": rounded(found("four_steps", "idle_fraction")),
        "sd15_4_steps_lora_images_per_second": rounded(found("four_steps_lora")),
        "sd15_4_steps_lora_over_diffusers_peft": quotient(
            found("four_steps_lora"), found("baseline_four_steps")
        ),
    }


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def show(results: Figures) -> None:
    table = Table("figure", "measured")
    for name, value in results.items():
        if isinstance(value, int | float):
            table.add_row(name, f"{value:g}")
    Console().print(table)
    for name, figures in results["rows"].items():
        if problem := figures.get("error") or figures.get("not_measured"):
            print(f"{name}: {problem}")


def commit() -> str | None:
    """The commit of the source, if it is a checkout."""
    asked = subprocess.run(
        ("git", "-C", str(ROWS_SCRIPT.parent), "rev-parse", "HEAD"),
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or None


def row_names(text: str = "") -> list[str]:
    """Comma-separated names of rows; all by default."""
    known = [row.name for row in ROWS]
    names = text.split(",") if text else known
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(
            f"unknown row {unknown[0]!r}; known: {', '.join(known)}"
        )
    return names


def main() -> None:
    began_at = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="total time")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).with_name("results") / "engine-h200.json",
    )
    parser.add_argument(
        "--rows", type=row_names, default=row_names(), help="such as mixed,no_lora"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--slots", type=int, help="images at once (default: by free memory)"
    )
    parser.add_argument("--capped-slots", type=int, help="the same with limited memory")
    parser.add_argument(
        "--bundle", type=int, help="jobs of a message to a whole worker (default: 1)"
    )
    parser.add_argument(
        "--scale", type=float, default=1, help="factor for each row's seconds"
    )
    parser.add_argument("--commit", default=commit(), help="recorded in the results")
    parser.add_argument("--tiny", action="store_true", help="a trial with a tiny model")
    arguments = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(1)
    )  # which also ends the processes
    arguments.out.unlink(missing_ok=True)  # figures of several runs are not compared
    with tempfile.TemporaryDirectory(prefix="imagefleet-bench-") as folder:
        asyncio.run(
            run(arguments, began_at + arguments.seconds, Path(folder) / "shared")
        )
    seconds = round(time.monotonic() - began_at, 1)
    results = groups.add_figures(
        arguments.out, {"seconds": seconds, "commit": arguments.commit}
    )
    show(results)
    print(
        json.dumps({name: value for name, value in results.items() if name != "rows"})
    )


if __name__ == "__main__":
    main()
