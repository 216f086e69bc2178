"""Rented nodes, as SaladCloud's own measurements describe them."""

import bisect
import random
from collections.abc import Sequence
from dataclasses import dataclass

from imagefleet.pricing import prices
from imagefleet.validation import JSONDict
from simulation.clients import Line

#: Where nodes are, and their round trip to a storage in the east of the USA: half or more of the
#: nodes are in the USA and Canada.
REGIONS = ((0.55, 0.040), (0.35, 0.120), (0.10, 0.230))

#: Of their uploads, in bits/s: the 10th, 50th and 90th percentile of 200 nodes, and the ends.
UPLOADS = ((0.0, 8e6), (0.1, 38.7e6), (0.5, 280.6e6), (0.9, 733.7e6), (1.0, 1_000e6))

#: Seconds until another node takes the place, by share: 100 nodes came up so.
REPLACED = ((0.0, 180.0), (0.5, 600.0), (0.8, 1200.0), (0.9, 2400.0), (1.0, 4800.0))

#: A quarter of 829 nodes was notably slower than their card's mean, often half as fast.
SLOW_SHARE = 0.25
SLOWEST, LEAST_SLOW = 0.5, 0.8

BROKEN_SHARE = 0.05

#: Billed: reading a model of 2 GB, and the first images.
START_UP_SECONDS = prices.WARM_UPS["fetched_kernels"].first_image_seconds


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU class: its speed in this engine, and its price."""

    name: str
    images_per_second: float
    dollars_per_hour: float


@dataclass(slots=True)
class Node:
    """One node for as long as it is rented."""

    card: Card
    line: Line
    images_per_second: float
    is_broken: bool


@dataclass(frozen=True, slots=True)
class Weather:
    """Faults of the nodes: interruptions, broken and slow ones."""

    #: Times the usual rate.
    interruptions: float = 1.0
    slow_share: float = SLOW_SHARE
    broken_share: float = BROKEN_SHARE

    def node(self, cards: Sequence[Card], dice: random.Random) -> Node:
        card = dice.choice(cards)
        is_slow = dice.random() < self.slow_share
        speed = card.images_per_second * (
            dice.uniform(SLOWEST, LEAST_SLOW) if is_slow else 1.0
        )
        shares = [share for share, _ in REGIONS]
        seconds = dice.choices([seconds for _, seconds in REGIONS], shares)[0]
        upload = _between(UPLOADS, dice.random())
        line = Line(seconds, upload, random.Random(dice.random()))
        return Node(card, line, speed, dice.random() < self.broken_share)

    def seconds_until_interrupted(self, dice: random.Random) -> float:
        rate = prices.INTERRUPTIONS_PER_HOUR * self.interruptions / 3600
        return dice.expovariate(rate) if rate else float("inf")


def seconds_until_replaced(dice: random.Random) -> float:
    return _between(REPLACED, dice.random())


def warm_up(weather: Weather, replicas: int, seconds: float, seed: int) -> JSONDict:
    """Shares of a fleet's paid time: until first images, at full speed, and of what it may draw."""
    dice, lives = random.Random(seed), list[float]()
    for _ in range(replicas):
        left = seconds
        while left > 0:
            lives.append(min(weather.seconds_until_interrupted(dice), left))
            left -= lives[-1] + seconds_until_replaced(dice)
    shares = {}
    for case, warm_up in prices.WARM_UPS.items():
        ends = warm_up.first_image_seconds, warm_up.full_speed_seconds
        first, full = (
            sum(min(life, end) for life in lives) / sum(lives) for end in ends
        )
        drawn = 1 - warm_up.lost(first, full)
        shares[case] = {"starting": first, "full_speed": 1 - full, "drawn": drawn}
    return shares


def cards_of(names: Sequence[str], priority: prices.Priority) -> list[Card]:
    """The classes with their records in `gpus.toml`.

    Raises:
        SetupError: one is not known.
    """
    found = [
        prices.find_gpu(name, tuple(prices.ASSUMED_IMAGES_PER_SECOND)) for name in names
    ]
    return [
        Card(
            name,
            prices.ASSUMED_IMAGES_PER_SECOND[name],
            prices.gpu_dollars_per_hour(name, priority),
        )
        for name in found
    ]


def _between(points: Sequence[tuple[float, float]], share: float) -> float:
    """The value at a *share* between those of *points*."""
    place = min(
        max(bisect.bisect([each for each, _ in points], share), 1), len(points) - 1
    )
    low, begin = points[place - 1]
    high, end = points[place]
    return begin + (end - begin) * (share - low) / (high - low)
