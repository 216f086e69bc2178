"""The rule by which workers share the shards of a queue: pure functions, which time no clock.

A worker has one home shard, which it asks at every receive; the others it asks when its home has
nothing, and one of them first at one of 8 receives, so that a shard which is nobody's home is
emptied all the same. A shard that was empty is asked again after a pause that doubles.
"""

from __future__ import annotations

import random

from imagefleet.storage.combined import queue
from imagefleet.storage.protocol import Shards

#: One of so many receives that return jobs asks another shard before the home.
FAIR_EVERY = 8

#: The other shards together cost an idle worker as much as its home, asked each 10 seconds, up to
#: a shard's longest pause.
SECONDS_PER_SHARD = 10.0
LONGEST_PAUSE_SECONDS = 120.0

#: A home is asked again so soon while another shard has jobs.
LONGEST_HOME_PAUSE_SECONDS = 2.0

#: Seconds after which whoever sends jobs all the time reads the number of shards again.
SENDERS_LOOK_SECONDS = 60.0

#: Times as long between two looks at the sizes of all shards, at most.
MOST_SELDOM = 5


def in_order(share: float, shards: Shards) -> list[int]:
    """The shards as a worker asks them, its home first; *share*, from 0 to 1, is where it stands.

    The homes are those that jobs are sent to. Each worker has another order of the rest, so that
    those who help do not all go to one shard.
    """
    home = min(int(share * shards.used), shards.used - 1)
    others = [each for each in range(shards.made) if each != home]
    random.Random(share).shuffle(others)  # noqa: S311 - the same for the same worker
    return [home, *others]


def longest_pause_seconds(shards: int, *, is_home: bool) -> float:
    """The longest pause of an empty shard; a home is asked each time while no shard has jobs."""
    if is_home:
        return LONGEST_HOME_PAUSE_SECONDS
    return min(SECONDS_PER_SHARD * (shards - 1), LONGEST_PAUSE_SECONDS)


def pause_seconds(empty_receives: int, shards: int, *, is_home: bool) -> float:
    """The pause of a shard that was empty again, after so many empty receives in a row before."""
    return queue.pause_seconds(empty_receives, longest_pause_seconds(shards, is_home=is_home))


def look_seconds(seconds: float, shards: int) -> float:
    """Seconds between two looks at all shards' sizes; *seconds* between those at a single shard."""
    return seconds * min(shards, MOST_SELDOM)


def spread(bodies: list[str], shards: int, first: int) -> dict[int, list[str]]:
    """Messages by shard, as many to each, beginning with the shard *first*."""
    dealt = {(first + number) % shards: bodies[number::shards] for number in range(shards)}
    return {shard: some for shard, some in dealt.items() if some}
