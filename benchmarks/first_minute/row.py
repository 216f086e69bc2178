"""The process of one row of `measure.py`: prints figures as they are measured, a JSON a line."""

import argparse
import functools
import json
import logging
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])

from first_minute import (
    compared,
    endings,
    engine_rows,
    packages,
    processes,
    workers,
)
from first_minute.bag import Family
from first_minute.engine_rows import EngineRow

#: Before the library and the worker are compared, both compile.
WARM_SECONDS, PAIRS = 150, 4


def emit(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


def draw(row: EngineRow, arguments: argparse.Namespace) -> None:
    """A row of an engine."""
    path = arguments.folder / "packages" / row.packages
    if row.is_cold:
        shutil.rmtree(path, ignore_errors=True)
    settings = packages.engine_settings(path)
    from first_minute import drawing  # imports torch, after the settings

    drawing.measure(row, arguments, settings, emit)


def build(family: Family, arguments: argparse.Namespace) -> None:
    from first_minute import drawing

    drawing.build(arguments, family, emit)


def compare_library(arguments: argparse.Namespace) -> None:
    from library import measure

    given = argparse.Namespace(
        model=None,
        device=arguments.device,
        slots=arguments.slots,
        pairs=1 if arguments.tiny else PAIRS,
        warm=0 if arguments.tiny else WARM_SECONDS,
        tiny=arguments.tiny,
    )
    emit(**measure.run(given), is_complete=True)


Measure = Callable[[argparse.Namespace], None]

ROWS: Mapping[str, Measure] = {
    "models": functools.partial(build, "sd1"),
    "sdxl_models": functools.partial(build, "sdxl"),
    **{name: functools.partial(draw, row) for name, row in engine_rows.ROWS.items()},
    **{
        name: functools.partial(workers.measure, emit, row)
        for name, row in workers.ROWS.items()
    },
    "endings": functools.partial(endings.measure, emit),
    "unlike_memory": functools.partial(compared.unlike_memory, emit),
    "uniform_over_before": functools.partial(compared.uniform_over_before, emit),
    "four_steps": functools.partial(compared.four_steps, emit),
    "company": functools.partial(compared.company, emit),
    "library": compare_library,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("row", choices=list(ROWS))
    parser.add_argument("--began-at", type=float, default=time.monotonic())
    processes.add_options(parser)
    arguments = parser.parse_args()
    # On standard error: which graphs were found, and which were compiled.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    # Whatever a row has started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ROWS[arguments.row](arguments)


if __name__ == "__main__":
    main()
