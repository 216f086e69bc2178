"""Compile policy: weighs the time a graph saves on expected work against the cost of compiling.

In sight is what the queue holds, of which each kind takes the share that it has of the last images.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from worker.engine.slots.memory import WEIGHT_MODES, WeightMode
from worker.engine.slots.queue import BatchKey, Costs

#: Admitted images by which those to come are judged. Few enough that a campaign of another size
#: shows within minutes.
_REMEMBERED = 512

#: So many deviations of its number of images does a kind's share leave out: of the first few, one
#: in a hundred may be two.
_DEVIATIONS = 2.0

#: What is in sight lasts no longer: a rented node may be gone by then. So a kind with less than
#: about a fiftieth of the work is never compiled.
_MOST_SECONDS = 3600.0

#: Seconds that a graph has to save: for two to five, while its kernels are loaded, timed and
#: recorded, nothing is drawn; the rest is for the memory that it keeps from other sizes. To compile
#: them, in a process of its own, costs the drawing nothing.
_LEAST_SAVED_SECONDS = 8.0

#: Where so many of a lane's ticks have an image that changes convolutions, all run in the graph for
#: these, which takes 3 to 6 % longer: with 16 slots, where one image in 24 does.
_OFTEN = 0.5

#: Images of so little of the work of others have no lane of their own: it would be almost empty,
#: and cost a thirtieth of the time, another graph and more memory.
_FEW = 0.05

#: Of more images that change convolutions, a quarter of the slots holds too few.
_FEW_CHANGES = 1 / 6

#: Ticks of a lane by which it is judged which modes it needs.
_JUDGED_TICKS = 256


class GraphKey(NamedTuple):
    """Identifies one compiled graph: a batch key, with or without convolution LoRAs."""

    batch_key: BatchKey
    #: True if their LoRAs change convolutions.
    convolutions: bool = False


class ModeUsage(dict[WeightMode, float]):
    """Moving average, per weight mode, of how often it would have been the fastest in this lane."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(WEIGHT_MODES, 0.0))

    def note(self, wanted: WeightMode) -> None:
        for mode, share in self.items():
            self[mode] = share + ((mode == wanted) - share) / _JUDGED_TICKS


@dataclass(eq=False)
class Outlook:
    """Forecast of work by graph key, from the images admitted last."""

    #: Until the queue is empty; None if unknown: then it is expected to last for as long as it has.
    _seconds_left: Callable[[], float | None]
    _clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._recent: deque[tuple[GraphKey, float]] = deque()
        self._images = Counter[GraphKey]()
        self._work: dict[GraphKey, float] = {}
        self._began_at = self._clock()
        #: Time of each loss, and how long work had lasted by then, by key; None for all keys.
        self._lost: dict[GraphKey | None, tuple[float, float]] = {
            None: (self._began_at, math.inf)
        }

    def begin(self) -> None:
        """Jobs come after a time without any."""
        self._began_at = self._clock()

    def add(self, kind: GraphKey, work: float) -> None:
        """An image was admitted: *work* is what all images' are measured in."""
        self._count(kind, 1, work)
        self._recent.append((kind, work))
        if len(self._recent) > _REMEMBERED:
            oldest, its_work = self._recent.popleft()
            self._count(oldest, -1, -its_work)

    def start_over(self, kind: GraphKey | None = None) -> None:
        """Notes that the graphs of all keys were lost, or that the graph of one could not be kept.

        All is expected to last as long as it had, or has since; that one only as it has since.
        """
        now = self._clock()
        before, _ = self._lost[None]
        self._lost[kind] = now, now - before if kind is None else 0.0

    def share(self, kind: GraphKey) -> float:
        """Estimated share of upcoming work of this key.

        It is a lower confidence bound: 0 for four images or fewer.
        """
        images = self._images[kind]
        if not images:
            return 0.0
        cautious = max(0.0, 1 - _DEVIATIONS / math.sqrt(images))
        return cautious * self._work[kind] / sum(self._work.values())

    def are_few(self, keys: Iterable[BatchKey], other: BatchKey) -> bool:
        """True unless images of some keys are known to be at least _FEW of another's work."""
        both = (False, True)
        share = sum(self.share(GraphKey(key, each)) for key in keys for each in both)
        work = sum(self._work.get(GraphKey(other, each), 0.0) for each in both)
        return work > 0 and share < _FEW * work / sum(self._work.values())

    def often_changes_convolutions(self, slots: int) -> bool:
        """True if at least _OFTEN of calls of *slots* have an image that changes convolutions.

        Of all sizes: the first few images of one would tell each node something else, and each
        graph is compiled once for all nodes.
        """
        images = self._images.total()
        changed = self._changed
        return changed > 0 and 1 - (1 - changed / images) ** slots >= _OFTEN

    @property
    def changes_few(self) -> bool:
        """True unless images that change convolutions are known to be a sixth; or none has come."""
        changed = self._changed
        least = changed - _DEVIATIONS * math.sqrt(changed)
        return bool(self._images) and least < _FEW_CHANGES * self._images.total()

    @property
    def _changed(self) -> int:
        return sum(self._images[kind] for kind in self._images if kind.convolutions)

    def seconds(self, kind: GraphKey) -> float:
        """Seconds for which images like the last ones are expected."""
        now = self._clock()
        left = self._seconds_left()
        known = now - self._began_at if left is None else left
        lost = [self._lost[each] for each in (None, kind) if each in self._lost]
        lasts = (max(now - at, lasted) for at, lasted in lost)
        return min(known, _MOST_SECONDS, *lasts)

    def pays(
        self,
        kind: GraphKey,
        graphs: int,
        costs: Costs,
        saved_share: float | None = None,
    ) -> bool:
        """True if compiling so many graphs for a key saves more than it costs.

        *saved_share* of its seconds; None: what compiling saves where nothing is compiled.
        """
        compile_seconds = graphs * costs.graph_seconds
        seconds = self.seconds(kind) - compile_seconds
        saved = costs.saved_share if saved_share is None else saved_share
        return self.share(kind) * saved * seconds > graphs * _LEAST_SAVED_SECONDS

    def _count(self, kind: GraphKey, images: int, work: float) -> None:
        self._images[kind] += images
        self._work[kind] = self._work.get(kind, 0.0) + work
        if not self._images[kind]:
            del self._images[kind], self._work[kind]
