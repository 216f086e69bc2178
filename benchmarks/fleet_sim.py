"""A fleet in simulated time: images/s of 1 to 2,000 replicas, and what limits them.

Each replica runs the worker's own pipeline and storage code, with an engine that takes a card's
time for an image and Azure's documented limits below the SDK. Nodes are as SaladCloud measured its
own: 1.1 interruptions an hour among 100, a quarter of them slow; one in twenty returns broken
images. Time is simulated, so a run depends on its seed alone; 1,000 to 1,400 jobs take a second.

    python benchmarks/fleet_sim.py --replicas 1,10,100,750 --seeds 5
    python benchmarks/fleet_sim.py --replicas 2000 --gpu "RTX 5090" --share 0.1
    python benchmarks/fleet_sim.py --replicas 100 --gpu "RTX 3060 8GB" --interruptions 10 --hours 1
    python benchmarks/fleet_sim.py --reference
    python benchmarks/fleet_sim.py --pictures benchmarks/results/fleet-sim.json

Every row is a part of a run that goes on: it begins once all replicas draw, and lasts for so many
simulated seconds. With --share 0.1, a tenth of the replicas is
simulated at a tenth of the storage's limits. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from imagefleet import errors
from imagefleet.pricing import prices
from imagefleet.validation import JSONDict
from simulation import account, measure, nodes, pictures, reference
from simulation.fleet import Scenario
from simulation.measure import Figures

#: All replicas draw by then, and those that were broken have been replaced.
WARM_SECONDS = 270.0

SECONDS = 120.0

#: So many seconds of one replica are measured at least, an eighth of an hour of 100: images come by
#: the slots, so that chance is more where there are few. But no row lasts longer than half an hour.
REPLICA_SECONDS = 45_000.0
LONGEST_SECONDS = 1_800.0

#: Of one replica alone, whose images come by the slots.
ALONE_SECONDS = 600.0

WIDTH = 170

CARDS = reference.CARDS

REPLICAS = (1, 10, 100, 750)


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.pictures:
        pictures.write(arguments.pictures, Path(__file__).parent.parent / "docs")
        return
    if arguments.warm_up:
        weather, seconds = (
            nodes.Weather(arguments.interruptions),
            3600 * reference.HOURS,
        )
        print(
            json.dumps(
                nodes.warm_up(weather, reference.REPLICAS, seconds, arguments.seed)
            )
        )
        return
    try:
        report = _reference(arguments) if arguments.reference else _scaling(arguments)
    except errors.SetupError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(report))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--reference", action="store_true", help="replay the public run of 24 hours"
    )
    what.add_argument(
        "--pictures", type=Path, metavar="FILE", help="draw results into docs/"
    )
    what.add_argument(
        "--warm-up", action="store_true", help="shares of the time paid in a day"
    )
    parser.add_argument(
        "--replicas",
        type=_numbers,
        metavar="LIST",
        default=REPLICAS,
        help="1,10,100,750 by default",
    )
    parser.add_argument(
        "--gpu", help="classes with a speed in gpus.toml, separated by commas"
    )
    parser.add_argument(
        "--priority", default="batch", choices=get_args(prices.Priority)
    )
    parser.add_argument(
        "--interruptions", type=float, default=1.0, help="times the usual rate"
    )
    parser.add_argument(
        "--share",
        type=float,
        default=1.0,
        help="of replicas and limits that is simulated",
    )
    parser.add_argument("--hours", type=float, help="of simulated time, of each row")
    parser.add_argument("--warm-seconds", type=float, default=WARM_SECONDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seeds", type=int, default=1, help="runs of each row, from --seed on"
    )
    return parser


def _numbers(text: str) -> list[int]:
    numbers = sorted({int(each) for each in text.split(",")})
    if numbers[0] < 1:
        raise argparse.ArgumentTypeError("should be numbers from 1 on")
    return numbers


def _scaling(arguments: argparse.Namespace) -> JSONDict:
    names = (
        [each.strip() for each in arguments.gpu.split(",")] if arguments.gpu else CARDS
    )
    cards = nodes.cards_of(names, arguments.priority)
    weather = nodes.Weather(arguments.interruptions)
    fastest = max(cards, key=lambda card: card.images_per_second)
    found: list[JSONDict] = []
    with _progress() as progress:
        plan = Scenario(1, [fastest], nodes.Weather(0, 0, 0), seed=arguments.seed)
        alone = _simulated(plan, arguments.warm_seconds, ALONE_SECONDS, progress)
        for number in arguments.replicas:
            share = max(arguments.share, 1 / number)
            simulated = round(number * share)
            if arguments.hours is None:
                seconds = max(
                    SECONDS, min(REPLICA_SECONDS / simulated, LONGEST_SECONDS)
                )
            else:
                seconds = 3600 * arguments.hours
            runs = [
                _simulated(
                    Scenario(
                        simulated,
                        cards,
                        weather,
                        seed=seed,
                        queue_limit=share * account.QUEUE_OPERATIONS_PER_SECOND,
                        account_limit=share * account.ACCOUNT_REQUESTS_PER_SECOND,
                    ),
                    arguments.warm_seconds,
                    seconds,
                    progress,
                )
                for seed in range(arguments.seed, arguments.seed + arguments.seeds)
            ]
            found.append(
                _of_row([measure.whole(run, number, share) for run in runs], alone)
            )
    _show(found, cards, arguments)
    return {**found[-1], "rows": found}


def _of_row(runs: Sequence[Figures], alone: Figures) -> JSONDict:
    """A row of the table; perfectly linear is what one replica alone makes of its card's speed."""
    # Without the edges of its time: 16 images come together.
    one = alone.share_of_possible + alone.missing["not_stored"]
    shares = [run.share_of_possible / one for run in runs]
    return {
        **asdict(measure.together(runs)),
        "linear_fraction": statistics.fmean(shares),
        "linear_fraction_by_seed": shares,
        "linear_fraction_deviation": statistics.stdev(shares)
        if len(shares) > 1
        else None,
        "one_replica_share": one,
    }


def _simulated(
    plan: Scenario, warm_seconds: float, seconds: float, progress: Progress
) -> Figures:
    whole = warm_seconds + seconds
    task = progress.add_task(f"{plan.replicas:,} replicas", total=whole)

    def report(at: float) -> None:
        progress.update(task, completed=at)
        progress.refresh()

    return measure.measure(plan, warm_seconds, seconds, report)


def _reference(arguments: argparse.Namespace) -> JSONDict:
    with _progress() as progress:
        task = progress.add_task("the public run", total=1.0)

        def report(share: float) -> None:
            progress.update(task, completed=share)
            progress.refresh()

        hours = 24.0 if arguments.hours is None else arguments.hours
        replay = reference.replay(arguments.seed, hours, report)
        share = arguments.share
        part = _simulated(
            reference.our_plan(arguments.seed, share),
            WARM_SECONDS,
            reference.OUR_SECONDS,
            progress,
        )
        ours = measure.whole(part, reference.REPLICAS, share)
    table = Table(
        "", "published", "replayed", "difference", "this engine, by simulation"
    )
    for name, values in reference.rows(replay, ours):
        table.add_row(name, *values)
    _console().print(table, reference.ABOUT, soft_wrap=True)
    return reference.report(replay, ours)


def _show(
    found: Sequence[JSONDict],
    cards: Sequence[nodes.Card],
    arguments: argparse.Namespace,
) -> None:
    table = Table(
        "replicas",
        "images/s",
        "of linear",
        "idle",
        "queue op/s",
        "of the busiest",
        "requests/s",
        "refused/s",
        "redelivered",
        "lost",
        "visible twice",
        "images per $",
        "limit",
    )
    for row in found:
        table.add_row(
            f"{row['replicas']:,}",
            f"{row['images_per_second']:,.2f}",
            _share(row),
            f"{row['idle_fraction']:.2%}",
            f"{row['queue_operations_per_second']:,.0f}",
            f"{row['busiest_queue_per_second']:,.0f}",
            f"{row['requests_per_second']:,.0f}",
            f"{row['refused_per_second']:,.1f}",
            f"{row['redeliveries']:,}",
            f"{row['lost']:,}",
            f"{row['visible_duplicates']:,}",
            f"{row['images_per_dollar']:,.0f}",
            row["bottleneck"],
        )
    last = found[-1]
    _console().print(
        table,
        f"{', '.join(card.name for card in cards)};"
        f" {last['simulated_replicas']:,} of {last['replicas']:,} replicas simulated, with as much"
        f" of the storage's limits;"
        f" {last['seconds']:,.0f} simulated seconds of a run that goes on; interruptions"
        f" {arguments.interruptions:g} times the usual rate: {last['interruptions']};"
        f" broken nodes given up: {last['given_up']}; one replica alone makes"
        f" {last['one_replica_share']:.2%} of its card's speed.",
        soft_wrap=True,
    )


def _share(row: JSONDict) -> str:
    text = f"{row['linear_fraction']:.2%}"
    if row["linear_fraction_deviation"] is None:
        return text
    return f"{text} ± {100 * row['linear_fraction_deviation']:.2f}"


def _console() -> Console:
    """Wide enough for the table, where nobody has a terminal."""
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def _progress() -> Progress:
    """Without a thread of its own, which would see simulated time."""
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
    )
    return Progress(*columns, console=Console(stderr=True), auto_refresh=False)


if __name__ == "__main__":
    main()
