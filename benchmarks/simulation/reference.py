"""The public run of 9 million images, replayed with its own worker; then with this one.

Published: 750 replicas of mixed RTX 20, 30 and 40 with 8 GB or more, 24 hours, about 7 s a job, a
worker that pulls, generates with AUTOMATIC1111 and uploads in turn, 9,274,913 images, $1,872, and
523 jobs done twice (blog.salad.com/stable-diffusion-inference-benchmark).

Into the replay go the replicas, the hours, the 7 s, and that day's price of SaladCloud's class
"Stable Diffusion Compatible" with 4 vCPU and 8 GB. The mix of cards is not published: equal shares
of those classes that `gpus.toml` has a speed of. How often nodes went away is not published either,
and decides nothing but the repeated jobs: the rate at which 523 are repeated is used, and beside
it stands what the rate of SaladCloud's later measurement gives.
"""

import bisect
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from imagefleet.pricing.prices import INTERRUPTIONS_PER_HOUR
from imagefleet.validation import JSONDict
from simulation import measured
from simulation.account import (
    ACCOUNT_REQUESTS_PER_SECOND,
    IMAGE_BYTES,
    QUEUE_OPERATIONS_PER_SECOND,
)
from simulation.clients import REQUEST_BYTES, SERVER_SECONDS
from simulation.fleet import Scenario
from simulation.measure import Figures
from simulation.nodes import (
    START_UP_SECONDS,
    Card,
    Node,
    Weather,
    cards_of,
    seconds_until_replaced,
)

REPLICAS = 750
HOURS = 24.0

#: Of pulling, generating and uploading together.
SECONDS_PER_JOB = 7.0

#: Of the class, and 4 vCPU at $0.004 and 8 GB at $0.001 an hour, which were billed then.
DOLLARS_PER_HOUR = 0.08 + 4 * 0.004 + 8 * 0.001

#: The results, with which a replay is compared; only the last one is used for it, as said above.
PUBLISHED_IMAGES = 9_274_913
PUBLISHED_DOLLARS = 1_872.0
PUBLISHED_REPEATS = 523

#: Those of its time with a record in `gpus.toml`.
CARDS = tuple(measured.TFLOP_PER_SECOND)

#: Simulated of our own fleet; the rest of the day is the same.
OUR_SECONDS = 240.0

#: Of each replay: among some 520 repeats chance is 23, and 9 in the mean of so many days.
DAYS = 6

#: Nodes drawn to find out how long AUTOMATIC1111 takes on a card.
_CALIBRATED_ON = 20_000

ABOUT = (
    f"Replayed: {HOURS:g} hours of 750 sequential workers, at 7 s a job on average and the price,"
    f" both as published; the mean of {DAYS} times. Their rate of interruptions is the one at which"
    f" so many jobs are repeated. This engine: {OUR_SECONDS:.0f} simulated seconds of the worker's"
    " own pipeline on the same cards at the same price, times 24 hours; of each card's fp16 rate it"
    " gets the share that was measured on an H200."
)


@dataclass(frozen=True, slots=True)
class Replay:
    """Results of the public run's worker: the mean of some days."""

    hours: float
    images: float
    dollars: float
    repeats: float
    #: Repeats whose image was stored already.
    visible_duplicates: float
    repeats_at_usual_rate: float
    #: Share of the time in which GPUs wait for the network.
    idle_fraction: float
    linear_fraction: float
    seconds_per_job: float


def replay(
    seed: int, hours: float = HOURS, report: Callable[[float], None] = lambda _: None
) -> Replay:
    """Jobs never end, and 107 a second are far from any limit of the storage."""
    cards = cards_of(CARDS, "high")
    weather = Weather(broken_share=0.0)
    work = _a1111_images(cards, weather)
    own_rate = PUBLISHED_REPEATS / (REPLICAS * HOURS) / INTERRUPTIONS_PER_HOUR
    own = Weather(own_rate, broken_share=0.0)
    day, usual = (
        _Days(own, cards, work, hours * 3600),
        _Days(weather, cards, work, hours * 3600),
    )
    dice = random.Random(seed)
    for number in range(DAYS):
        for days, share in ((day, 2 * number), (usual, 2 * number + 1)):
            days.add(random.Random(dice.random()))
            report((share + 1) / (2 * DAYS))
    return Replay(
        hours=hours,
        images=day.jobs / DAYS,
        dollars=day.billed_seconds / DAYS / 3600 * DOLLARS_PER_HOUR,
        repeats=day.repeats / DAYS,
        visible_duplicates=day.stored_twice / DAYS,
        repeats_at_usual_rate=usual.repeats / DAYS,
        idle_fraction=1 - day.generating_seconds / day.billed_seconds,
        linear_fraction=day.jobs / day.possible_jobs,
        seconds_per_job=day.billed_seconds / day.jobs,
    )


def _a1111_images(cards: Sequence[Card], weather: Weather) -> float:
    """Factor by which AUTOMATIC1111 is slower than a card's record, at 7 s a job on average."""
    dice = random.Random(0)
    nodes = [weather.node(cards, dice) for _ in range(_CALIBRATED_ON)]
    waits = np.array([sum(_network_seconds(node)) for node in nodes])
    records = np.array([1 / node.images_per_second for node in nodes])
    low, high = 0.01, 1_000.0
    for _ in range(60):
        middle = (low + high) / 2
        # The fleet's seconds by its jobs, not the mean of the nodes'.
        seconds = len(nodes) / (1 / (waits + middle * records)).sum()
        low, high = (middle, high) if seconds < SECONDS_PER_JOB else (low, middle)
    return low


def _network_seconds(node: Node) -> tuple[float, float, float]:
    """Average seconds of receiving a job, storing its image and deleting its message."""
    line = node.line
    call = line.round_trip_seconds + SERVER_SECONDS
    header = 8 * REQUEST_BYTES / line.upload_bits_per_second
    upload = 8 * IMAGE_BYTES / line.upload_bits_per_second
    return call + header, call + header + upload, call + header


class _Days:
    """Every node of the replicas, one after the other: they do not get in each other's way."""

    def __init__(
        self, weather: Weather, cards: Sequence[Card], work: float, seconds: float
    ) -> None:
        self.jobs = self.repeats = self.stored_twice = 0
        self.possible_jobs = self.billed_seconds = self.generating_seconds = 0.0
        self._weather, self._cards, self._work, self._seconds = (
            weather,
            cards,
            work,
            seconds,
        )

    def add(self, dice: random.Random) -> None:
        """One more day."""
        for _ in range(REPLICAS):
            self._place(random.Random(dice.random()))

    def _place(self, dice: random.Random) -> None:
        at = 0.0
        while at < self._seconds:
            node = self._weather.node(self._cards, dice)
            until = at + self._weather.seconds_until_interrupted(dice)
            self._rent(
                node, min(until, self._seconds) - at, dice, until < self._seconds
            )
            self.billed_seconds += min(until, self._seconds) - at
            away = min(seconds_until_replaced(dice), max(0.0, self._seconds - until))
            usual = self._work / node.images_per_second + sum(_network_seconds(node))
            self.possible_jobs += (min(until, self._seconds) - at + away) / usual
            at = until + away

    def _rent(
        self, node: Node, seconds: float, dice: random.Random, is_cut: bool
    ) -> None:
        """One node's jobs, until its time is over; the first begins when the model is loaded."""
        draws = np.random.default_rng(dice.getrandbits(64))
        pull, upload, delete = _network_seconds(node)
        generate = self._work / node.images_per_second
        count = int(seconds / generate) + 2
        server = draws.exponential(SERVER_SECONDS, (count, 3)) - SERVER_SECONDS
        steps = np.array([pull, generate + upload, delete]) + server
        ends = START_UP_SECONDS + np.cumsum(steps)
        # At the end of a day nobody is interrupted: the last job is finished.
        done = (
            bisect.bisect(ends, seconds)
            if is_cut
            else bisect.bisect(ends, seconds) // 3 * 3
        )
        self.jobs += done // 3
        self.generating_seconds += generate * (done // 3)
        self.repeats += is_cut and done % 3 > 0
        self.stored_twice += is_cut and done % 3 == 2


def our_plan(seed: int, share: float) -> Scenario:
    """The worker's own pipeline on the same cards; a *share* of the replicas and the limits."""
    return Scenario(
        round(REPLICAS * share),
        our_cards(),
        seed=seed,
        queue_limit=share * QUEUE_OPERATIONS_PER_SECOND,
        account_limit=share * ACCOUNT_REQUESTS_PER_SECOND,
    )


def our_cards() -> list[Card]:
    """Each class at this engine's measured share of its limit, at that day's price."""
    return [
        Card(name, measured.images_per_second(name), DOLLARS_PER_HOUR) for name in CARDS
    ]


def rows(
    replayed: Replay, ours: Figures
) -> list[tuple[str, tuple[str, str, str, str]]]:
    """Rows of the table; our figures are for a whole day."""
    scale = HOURS / replayed.hours
    day = HOURS * 3600 / ours.seconds
    published = PUBLISHED_IMAGES / PUBLISHED_DOLLARS
    images_per_dollar = replayed.images / replayed.dollars
    usual = f"{replayed.repeats_at_usual_rate * scale:,.0f} at {INTERRUPTIONS_PER_HOUR * 100:g}/h"
    return [
        _row(
            "images",
            PUBLISHED_IMAGES,
            replayed.images * scale,
            f"{ours.images * day:,.0f}",
        ),
        _row(
            "dollars",
            PUBLISHED_DOLLARS,
            replayed.dollars * scale,
            f"{ours.dollars * day:,.0f}",
        ),
        _row(
            "images per dollar",
            published,
            images_per_dollar,
            f"{ours.images_per_dollar:,.0f}",
        ),
        _row(
            "jobs repeated",
            PUBLISHED_REPEATS,
            replayed.repeats * scale,
            f"{ours.redeliveries * day:,.0f} redelivered, {ours.visible_duplicates} visible",
        ),
        ("the same, usual rate of interruptions", ("", usual, "", "")),
        _row("seconds per job", SECONDS_PER_JOB, replayed.seconds_per_job, ""),
        (
            "GPUs idle",
            ("", f"{replayed.idle_fraction:.1%}", "", f"{ours.idle_fraction:.2%}"),
        ),
    ]


def _row(
    name: str, published: float, replayed: float, ours: str
) -> tuple[str, tuple[str, str, str, str]]:
    digits = 0 if published > 100 else 2
    texts = f"{published:,.{digits}f}", f"{replayed:,.{digits}f}"
    return name, (*texts, f"{replayed / published - 1:+.1%}", ours)


def report(replayed: Replay, ours: Figures) -> JSONDict:
    """The replayed run with a simulation's keys, the published one, and ours."""
    rate = replayed.images / (replayed.hours * 3600)
    scale = HOURS / replayed.hours
    return {
        "replicas": REPLICAS,
        "images_per_second": rate,
        "linear_fraction": replayed.linear_fraction,
        "idle_fraction": replayed.idle_fraction,
        "lost": 0,
        "visible_duplicates": replayed.visible_duplicates,
        "redeliveries": replayed.repeats,
        "queue_operations_per_second": 2 * rate,
        "dollars": replayed.dollars,
        "images_per_dollar": replayed.images / replayed.dollars,
        "bottleneck": "GPUs, and a worker that lets them wait for the network",
        "hours": replayed.hours,
        "images": replayed.images,
        "redeliveries_at_usual_rate": replayed.repeats_at_usual_rate,
        "published": {
            "images": PUBLISHED_IMAGES,
            "dollars": PUBLISHED_DOLLARS,
            "images_per_dollar": PUBLISHED_IMAGES / PUBLISHED_DOLLARS,
            "redeliveries": PUBLISHED_REPEATS,
        },
        "difference": {
            "images": replayed.images * scale / PUBLISHED_IMAGES - 1,
            "dollars": replayed.dollars * scale / PUBLISHED_DOLLARS - 1,
            "images_per_dollar": replayed.images
            / replayed.dollars
            / (PUBLISHED_IMAGES / PUBLISHED_DOLLARS)
            - 1,
            "redeliveries": replayed.repeats * scale / PUBLISHED_REPEATS - 1,
        },
        "ours": asdict(ours),
    }
