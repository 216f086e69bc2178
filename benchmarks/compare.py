"""Compares a benchmark of two checkouts in one run, on a machine whose speed changes by the minute.

It is run in short slices, by turns in either checkout, in another order each pair. For each figure
of the JSON on its last line: the medians, their ratio, and the interval in which 95 of 100 such
ratios lie, by bootstrap over the pairs. Exit code 1 if a ratio is surely, by its whole interval,
worse than `--within`: smaller, or larger of a figure that is CPU time.

    python benchmarks/compare.py BASE_TREE -- benchmarks/store.py --jobs 400
    python benchmarks/compare.py BASE_TREE --pairs 8 -- benchmarks/overlap.py --jobs 20
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).parents[1]

#: Drawn anew from the pairs for an interval.
SAMPLES = 2_000

Figures = dict[str, float]
Pair = tuple[Figures, Figures]
"""Yields the results of the base and of this checkout, of slices next to each other."""


def measure(tree: Path, command: Sequence[str]) -> Figures:
    """One slice: runs the benchmark of a checkout, with its own code."""
    variables = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": ""}
    call = [sys.executable, *command]
    ended = subprocess.run(
        call, check=False, cwd=tree, env=variables, capture_output=True, text=True
    )
    if ended.returncode:
        raise SystemExit(f"{command} failed in {tree}: {ended.stderr[-2000:]}")
    found = json.loads(ended.stdout.splitlines()[-1])
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float)
    }


def ratio(pairs: Sequence[Pair], name: str) -> float:
    """This checkout's median over the base's; NaN where the base has 0."""
    base, this = (
        statistics.median(each[name] for each in side)
        for side in zip(*pairs, strict=True)
    )
    return this / base if base else float("nan")


def interval(pairs: Sequence[Pair], name: str) -> tuple[float, float]:
    chance = random.Random(0)
    ratios = sorted(
        ratio(chance.choices(pairs, k=len(pairs)), name) for _ in range(SAMPLES)
    )
    return ratios[SAMPLES // 40], ratios[-SAMPLES // 40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("base", type=Path, help="the other checkout")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument(
        "--within", type=float, default=0.03, help="what may be lost [0.03]"
    )
    parser.add_argument(
        "command", nargs="+", help="after `--`: the benchmark and its arguments"
    )
    arguments = parser.parse_args()
    trees = arguments.base.resolve(), HERE
    pairs = list[Pair]()
    for number in track(range(arguments.pairs), "pairs", console=Console(stderr=True)):
        order = (0, 1) if number % 2 else (1, 0)
        found = {side: measure(trees[side], arguments.command) for side in order}
        pairs.append((found[0], found[1]))
    table = Table("", "base", "this", "ratio", "95 % of ratios")
    result: dict[str, list[float]] = {}
    worse = []
    for name in pairs[0][0].keys() & pairs[0][1].keys():
        if not any(base[name] for base, _ in pairs):
            continue
        low, high = interval(pairs, name)
        result[name] = [round(each, 4) for each in (ratio(pairs, name), low, high)]
        is_worse = (
            low > 1 + arguments.within if "cpu" in name else high < 1 - arguments.within
        )
        if is_worse and "longest" not in name:
            worse.append(name)
    for name in sorted(result):
        medians = (
            statistics.median(each[side][name] for each in pairs) for side in (0, 1)
        )
        middle, low, high = result[name]
        table.add_row(
            name,
            *(f"{each:,.3f}" for each in medians),
            f"{middle:.3f}",
            f"{low:.3f} to {high:.3f}",
        )
    Console().print(table)
    print(json.dumps({"pairs": len(pairs), "ratios": result, "worse": worse}))
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
