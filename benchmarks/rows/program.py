"""A program whose rows have a process each: its options, the processes, and the one of a row."""

import argparse
import asyncio
import functools
import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from imagefleet import errors
from rows import groups
from rows.groups import Figures, Measurement
from rows.process import Channel, Measure
from worker.engine import device as devices

Rows = Mapping[str, Callable[[argparse.Namespace], Measure]]
Summarise = Callable[[Mapping[str, Figures]], Figures]


def options(description: str, rows: Rows, folder: str) -> argparse.ArgumentParser:
    """Options of a program that starts itself for each of its *rows*."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("row", nargs="?", choices=list(rows), help=argparse.SUPPRESS)
    parser.add_argument("--rows", default=",".join(rows), help="comma-separated")
    parser.add_argument(
        "--together", action="store_true", help="load and compile at once"
    )
    parser.add_argument("--folder", type=Path, default=Path(folder))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=30.0, help="per measured rate")
    parser.add_argument(
        "--limit", type=float, default=900.0, help="seconds until rows are ready"
    )
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--tiny", action="store_true")
    return parser


def run(
    script: str,
    arguments: argparse.Namespace,
    rows: Rows,
    summarise: Summarise,
    overhead_seconds: float,
) -> None:
    """Measures the row that the arguments name, or starts *script* for each of several."""
    if arguments.row:
        _measure_row(arguments, rows)
    else:
        asyncio.run(_measure_rows(Path(script), arguments, summarise, overhead_seconds))


def _measure_row(arguments: argparse.Namespace, rows: Rows) -> None:
    """Prepares the row, and measures it when it is asked to."""
    channel = Channel()
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {arguments.row}: %(message)s"
    )
    arguments.device = devices.find_device(arguments.device)
    try:
        measure = rows[arguments.row](arguments)
    except errors.FleetError as error:
        figures = {"error": error.message}
        measure = lambda _: figures  # noqa: E731
        if arguments.device.type == "cuda":
            held = torch.cuda.memory_summary(arguments.device, abbreviated=True)
            print(held, file=sys.stderr)
    channel.serve({arguments.row: measure})


async def _measure_rows(
    script: Path,
    arguments: argparse.Namespace,
    summarise: Summarise,
    overhead_seconds: float,
) -> None:
    given = [each for each in sys.argv[1:] if each != "--together"]
    rows = [
        Measurement(name, name, arguments.seconds, overhead_seconds)
        for name in arguments.rows.split(",")
    ]
    for batch in [rows] if arguments.together else [[row] for row in rows]:
        await groups.measure(
            batch,
            lambda name: groups.Group.start(script, name, *given),
            functools.partial(groups.add_row, arguments.out, summarise),
            ready_seconds=arguments.limit,
        )
    print(json.dumps(summarise(groups.add_figures(arguments.out, {})["rows"])))
