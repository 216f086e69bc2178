"""Lanes: the jobs that share calls, with slots of their own, and which of them runs next.

Each tick is one lane's, so no lane has to end for another to begin. A full lane costs nothing
beyond its pixels; one with few images waits for more, but not for long (`Lanes.urgency`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from worker.engine.lora.merge import LoraKey
from worker.engine.slots.memory import WeightMode
from worker.engine.slots.queue import BatchKey, SlotJob
from worker.engine.slots.step import Step

#: Urgent images that go before one that waits.
MOST_OVERTAKES = 8

#: Ticks that an almost empty lane waits for more images; a half full one waits half of them. So a
#: lane's empty slots cost at most 1/32 of the time, and it runs once in 32 ticks, and one more for
#: each other lane.
PATIENCE_TICKS = 32

#: A lane counts as full with so many images a slot: one whose next images are there already goes
#: before one that would have an empty slot once its images end.
_FULL = 1.5

#: Ticks of one lane in a row where lanes load their weights into the same memory: loading takes
#: about a third of a tick.
SHARED_TURN_TICKS = 16

#: A lane of long prompts may have a context so many times as large as a plain one of all slots,
#: where the memory has room for several lanes' weights; elsewhere no larger.
_ROOMY_CONTEXT = 4

#: Where there are so many blocks of weights, two of them are one of twice the slots, for images of
#: one row with LoRAs of their own.
_BLOCKS_PER_WIDE_ONE = 4


#: Lanes with tensors, if several may have weights of their own: three sizes with prompts of all
#: lengths. A lane of SD1.5 at 16 slots takes 0.25 GB beside its weights, 1 GB for long prompts.
MAX_LANES = 12

#: The same on a card whose slots take all of its memory.
MAX_LANES_SHARING = 4


@dataclass(eq=False)
class Lane:
    """The jobs of one batch key, in slots or waiting for one."""

    batch_key: BatchKey
    slots: int
    #: Younger jobs, with LoRAs that are merged already, that may go before a waiting one.
    max_overtakes: int
    #: The tick at which the lane ran last, or its first job came.
    ran_at: int = 0
    #: Oldest first.
    waiting: list[SlotJob] = field(default_factory=list)
    active: dict[int, SlotJob] = field(default_factory=dict)
    #: The step with the lane's tensors; None while it is closed.
    step: Step | None = None
    #: The slots' weights that it uses, alone or in turn with other lanes.
    block: int = 0
    #: The last tick's.
    weight_mode: WeightMode = "shared"
    #: True while it ends its images to give its place to another.
    is_closing: bool = False

    @property
    def held(self) -> int:
        return len(self.active) + len(self.waiting)

    @property
    def is_kept(self) -> bool:
        """True while it stays open: what is compiled is bound to its tensors."""
        return self.step is not None and self.step.is_kept

    def take(
        self, preferred: LoraKey | None = None, *, may_change: bool = True
    ) -> SlotJob | None:
        """Removes the next job, one with the LoRAs *preferred* if it may overtake the others.

        None that changes convolutions, unless one *may_change* them.
        """
        fitting = [
            place
            for place, job in enumerate(self.waiting)
            if may_change or not job.changes_convolutions
        ]
        if not fitting:
            return None
        at = fitting[0]
        for place in fitting if preferred is not None else ():
            job = self.waiting[place]
            if job.prepared.lora_key == preferred:
                at = place
                break
            if job.is_urgent or job.overtakes >= self.max_overtakes:
                break
        for older in self.waiting[:at]:
            older.overtakes += 1
        return self.waiting.pop(at)

    def place(self, job: SlotJob, *, first: bool) -> None:
        """Adds a waiting job, the *first* of its kind or last: urgent ones, and the others.

        None is overtaken by urgent ones all the time.
        """
        urgent = 0
        for place, each in enumerate(self.waiting, 1):
            if each.is_urgent or each.overtakes >= MOST_OVERTAKES:
                urgent = place
        begin, end = (0, urgent) if job.is_urgent else (urgent, len(self.waiting))
        at = begin if first else end
        if job.is_urgent:
            for older in self.waiting[at:]:
                older.overtakes += 1
        self.waiting.insert(at, job)

    def close(self) -> None:
        """Frees its tensors; its waiting jobs stay."""
        self.step = None
        self.is_closing = False


@dataclass(eq=False)
class Lanes:
    """All admitted jobs, by batch key."""

    #: Slots of two rows in lanes of the native size and context, and of smaller ones.
    slots: int
    #: For how many such lanes there is memory for weights.
    blocks: int
    _native: BatchKey
    _max_overtakes: int
    _lanes: dict[BatchKey, Lane] = field(default_factory=dict)
    _current: Lane | None = None
    _tick: int = 0
    _turn_began_at: int = 0

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    @property
    def busy(self) -> list[Lane]:
        """The lanes with jobs."""
        return [lane for lane in self if lane.held]

    @property
    def jobs(self) -> int:
        return len(self.held)

    @property
    def held(self) -> list[SlotJob]:
        return [job for lane in self for job in (*lane.active.values(), *lane.waiting)]

    @property
    def active(self) -> list[SlotJob]:
        """The jobs in slots."""
        return [job for lane in self for job in lane.active.values()]

    @property
    def max_open(self) -> int:
        return MAX_LANES if self.blocks > 1 else MAX_LANES_SHARING

    @property
    def block_slots(self) -> list[int]:
        """Number of slots for which each block has weights."""
        wide = self.blocks // _BLOCKS_PER_WIDE_ONE if self.slots > 1 else 0
        narrow = self.blocks - 2 * wide
        return [self.slots] * narrow + [2 * self.slots] * wide

    @property
    def free(self) -> int:
        """Jobs that may still be admitted, whatever their batch keys.

        All slots of the lanes that have jobs, and one job ready for each slot of one lane: then
        some lane is always full. Where lanes take long turns, each needs as many jobs ready.
        """
        busy = sorted(self.busy, key=lambda lane: lane.step is None)
        if not busy:
            return 2 * self.slots
        inside = busy[: self.max_open]
        outside = busy[self.max_open :]
        beyond = sum(lane.held for lane in outside)
        rooms = []
        for lane in inside:
            beyond += max(0, lane.held - lane.slots)
            rooms.append(max(0, lane.slots - lane.held))
        room = 0 if outside else min(rooms)
        ready = max(self.slots, *(lane.slots for lane in inside))
        ready *= len(inside) if self._turn_ticks > 1 else 1
        return max(0, ready + room - beyond)

    def slots_of(self, batch_key: BatchKey) -> int:
        """The slots that make a lane's calls as large as those of the native size.

        So a larger size needs no more memory, and all lanes' ticks take about as long. A lane's own
        memory is mostly its context, which long prompts must not multiply. Images of one row are
        twice as many, if their slots need no weights of their own or there is memory for these;
        those of more than two, fewer. A single slot stays one.
        """
        if batch_key.isolated is not None:
            return 1
        most = self.slots
        if batch_key.slot_rows == 1 and self.slots > 1:
            most = 2 * self.slots if batch_key.is_plain else self.block_slots[-1]
        most = max(1, 2 * most // max(2, batch_key.slot_rows))
        pixels = self._native.width * self._native.height
        slots = most * pixels / (batch_key.width * batch_key.height)
        most_tokens = self._native.tokens * (_ROOMY_CONTEXT if self.blocks > 1 else 1)
        slots *= min(1, most_tokens / batch_key.tokens)
        return max(1, min(most, round(slots)))

    def lane_of(self, batch_key: BatchKey) -> Lane:
        """The lane of a batch key; a new one has the slots of `slots_of`."""
        if batch_key not in self._lanes:
            slots = self.slots_of(batch_key)
            self._lanes[batch_key] = Lane(
                batch_key, slots, self._max_overtakes, self._tick
            )
        return self._lanes[batch_key]

    def add(
        self, batch_key: BatchKey, jobs: Iterable[SlotJob], *, first: bool = False
    ) -> None:
        """Adds waiting jobs of a key, *first* before those that wait already."""
        lane = self.lane_of(batch_key)
        if not lane.held:
            lane.ran_at = self._tick
        for job in reversed(list(jobs)) if first else jobs:
            lane.place(job, first=first)

    def next(self) -> Lane | None:
        """The lane of the next tick; None without jobs. The caller opens it if it is closed."""
        for lane in list(self):
            is_left = lane.batch_key.checkpoint is not None and not lane.waiting
            if (lane.is_closing or is_left) and not lane.active:
                lane.close()
            if lane.step is None and not lane.held:
                del self._lanes[lane.batch_key]
        busy = self.busy
        if not busy:
            self._current = None
            return None
        chosen = self._current
        if chosen is None or not self._goes_on(chosen):
            chosen = max(busy, key=self.urgency)
            if chosen.step is None and not self._make_room():
                closable = [lane for lane in busy if lane.step and not lane.is_kept]
                if closable:
                    chosen = min(closable, key=lambda lane: len(lane.active))
                    chosen.is_closing = True
            self._turn_began_at = self._tick
        self._current = chosen
        self._tick += 1
        chosen.ran_at = self._tick
        return chosen

    def urgency(self, lane: Lane) -> float:
        """The lane with the highest runs next: the fuller and the longer it has waited.

        Full lanes take turns, with one that has an urgent image, too. Any other runs after
        PATIENCE_TICKS and one turn of each lane. So lanes are drawn by their share of the images,
        whatever their slots: turns alike would empty those that few images come for.
        """
        filled = min(1, lane.held / (_FULL * lane.slots))
        filled += any(each.is_urgent for each in (*lane.waiting, *lane.active.values()))
        return filled + (self._tick - lane.ran_at) / (PATIENCE_TICKS * self._turn_ticks)

    def takes_jobs(self, lane: Lane) -> bool:
        """False for a lane that has to end for the others' sake."""
        is_long = (
            lane.batch_key.changes_shared_weights
            and self._tick - self._turn_began_at > PATIENCE_TICKS
        )
        return not (lane.is_closing or is_long)

    def choose_block(self, lane: Lane) -> int:
        """The weights for a lane that opens: unused ones, or those that fewest lanes share."""
        if lane.batch_key.is_plain:
            return 0  # it uses none
        users = [
            each.block for each in self if each.step and not each.batch_key.is_plain
        ]
        slots = self.block_slots
        fitting = [block for block in range(len(slots)) if slots[block] >= lane.slots]
        return min(fitting, key=users.count)

    def clear(self) -> None:
        self._lanes.clear()
        self._current = None

    def _goes_on(self, lane: Lane) -> bool:
        """True if the lane of the last tick also runs in the next one."""
        if lane.step is None or not lane.held:
            return False
        if lane.batch_key.changes_shared_weights or lane.is_closing:
            return bool(lane.active) or self.takes_jobs(lane)
        return self._tick - self._turn_began_at < self._turn_ticks

    @property
    def _turn_ticks(self) -> int:
        """Ticks of a lane before another's turn."""
        loading = [lane for lane in self.busy if lane.weight_mode != "shared"]
        used = [lane.block for lane in loading if lane.step is not None]
        return 1 if len(set(used)) == len(used) else SHARED_TURN_TICKS

    def _make_room(self) -> bool:
        """Makes room for another lane, if need be by closing an idle one; False if none is idle."""
        opened = [lane for lane in self if lane.step]
        if len(opened) < self.max_open:
            return True
        closable = [lane for lane in opened if not (lane.active or lane.is_kept)]
        if closable:
            min(closable, key=lambda lane: (lane.held, lane.ran_at)).close()
        return bool(closable)
