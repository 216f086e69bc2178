"""Fuzzes every target for as long as you like, and prints counts and the inputs that were found.

    python tests/fuzz/run.py --seconds 600
    python tests/fuzz/run.py --target prompt --seconds 60

The last line is one JSON object. Exit code 1 if anything was found.
"""

import argparse
import json
import logging
import random
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parents[1] / "worker/engine/support"),
]

#: What one input may add to the process, in KiB.
MAX_GROWTH = 200_000

#: In turns, so that all targets have had their share whenever it is stopped.
TURN_SECONDS = 1.0


@dataclass
class Tally:
    """What became of the inputs of one target; *found*: reasons, each with its first input."""

    inputs: int = 0
    accepted: int = 0
    found: dict[str, str] = field(default_factory=dict)
    times: Counter[str] = field(default_factory=Counter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--target", action="append")
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    _with_mutations(given.target, given.seconds, given.seed)


def _with_mutations(names: list[str] | None, seconds: float, seed: int | None) -> None:
    import mutations
    import targets

    seed = random.randrange(2**32) if seed is None else seed
    source = random.Random(seed)
    chosen = {name: targets.TARGETS[name] for name in names or targets.TARGETS}
    tallies = {name: Tally() for name in chosen}
    began = reported = time.monotonic()
    while time.monotonic() - began < seconds:
        for name, target in chosen.items():
            turn = time.monotonic()
            while time.monotonic() - turn < min(TURN_SECONDS, seconds / len(chosen)):
                _try(target, mutations.mutated(source, target.seeds), tallies[name])
        if time.monotonic() - reported > 60:
            reported = time.monotonic()
            inputs = sum(each.inputs for each in tallies.values())
            print(
                f"{reported - began:.0f} s: {inputs:,} inputs",
                file=sys.stderr,
                flush=True,
            )
    _report(tallies, time.monotonic() - began, seed)


def _try(target: object, data: bytes, tally: Tally) -> None:
    import targets

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tally.inputs += 1
    try:
        tally.accepted += target.check(data)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if grown > MAX_GROWTH:
            raise targets.FoundError(f"the process grew by {grown / 1024:.0f} MiB")
    except targets.FoundError as error:
        cause = error.__cause__
        frames = traceback.extract_tb(cause.__traceback__) if cause else []
        place = (
            f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}"
            if frames
            else ""
        )
        reason = (str(error)[:80] if cause else str(error)[:14]) + place
        tally.times[reason] += 1
        tally.found.setdefault(reason, f"{str(error)[:300]}: {data[:2_000]!r}")


def _report(tallies: dict[str, Tally], seconds: float, seed: int | None) -> None:
    print(f"{'target':<16}{'inputs':>12}{'accepted':>12}{'found':>8}")
    for name, each in tallies.items():
        print(f"{name:<16}{each.inputs:>12,}{each.accepted:>12,}{len(each.found):>8,}")
    for name, each in tallies.items():
        for reason, shown in each.found.items():
            print(f"\n{name}, {each.times[reason]:,} times: {shown}")
    totals = {
        "seconds": round(seconds),
        "seed": seed,
        "inputs": sum(each.inputs for each in tallies.values()),
        "accepted": sum(each.accepted for each in tallies.values()),
        "found": sum(len(each.found) for each in tallies.values()),
    }
    print(json.dumps(totals), flush=True)
    sys.exit(bool(totals["found"]))


if __name__ == "__main__":
    main()
