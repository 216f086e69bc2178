"""When a worker asks which queue and shard: pure functions, which time no clock.

A worker has one home shard, which it asks at every receive; the others it asks when its home has
nothing, and one of them first at one of 8 receives, so that a shard which is nobody's home is
emptied all the same. A shard that was empty is asked again after a pause that doubles.
"""

from __future__ import annotations

import random

from imagefleet.storage.protocol import Shards

#: One of so many receives that return jobs asks another shard before the home, and one the queues
#: of lower priorities first.
FAIR_EVERY = 8

#: A queue that was empty is asked again after this pause, which doubles up to the longest.
FIRST_PAUSE_SECONDS = 0.5

#: A queue that does not exist, whose token is missing, or that does not answer while the main one
#: does, is asked again after this time.
MISSING_PAUSE_SECONDS = 60.0

#: The longest pauses of a home that is empty: short where other queues have jobs, since a job of
#: high priority may arrive, long where none has any. For three queues an idle worker makes some
#: 23,000 receives a day, half of them for these pauses: 0.1 cents.
LONGEST_HOME_PAUSE_SECONDS = 2.0
LONGEST_IDLE_PAUSE_SECONDS = 10.0

#: The other shards together cost an idle worker as much as its home, asked each 10 seconds, up to
#: a shard's longest pause.
SECONDS_PER_SHARD = 10.0
LONGEST_PAUSE_SECONDS = 120.0

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


def pause_seconds(empty_receives: int, longest_seconds: float) -> float:
    """How long a queue is left alone that was empty once more than *empty_receives* times."""
    return min(FIRST_PAUSE_SECONDS * float(2 ** min(empty_receives, 30)), longest_seconds)


def longest_pause_seconds(shards: int, *, is_home: bool, is_idle: bool) -> float:
    """The longest pause of an empty queue, one of so many *shards*; *is_idle*: all are empty."""
    if is_home:
        return LONGEST_IDLE_PAUSE_SECONDS if is_idle else LONGEST_HOME_PAUSE_SECONDS
    return min(SECONDS_PER_SHARD * (shards - 1), LONGEST_PAUSE_SECONDS)


def look_seconds(seconds: float, shards: int) -> float:
    """Seconds between two looks at all shards' sizes; *seconds* between those at a single shard."""
    return seconds * min(shards, MOST_SELDOM)


def spread(bodies: list[str], shards: int, first: int) -> dict[int, list[str]]:
    """Messages by shard, as many to each, beginning with the shard *first*."""
    dealt = {(first + number) % shards: bodies[number::shards] for number in range(shards)}
    return {shard: some for shard, some in dealt.items() if some}
