"""A worker's figures: now, for a terminal's live line or a log's line a minute, and at its end."""

import signal
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from imagefleet.telemetry.logs import duration, log
from imagefleet.telemetry.metrics import QueueFlow
from imagefleet.validation import JSONDict

Phase = Literal[
    "connecting to the storage",
    "fetching the model",
    "loading the model",
    "checking the node",
    "generating",
    "waiting for jobs",
    "draining",
    "waiting for the operator",
    "waiting for another node",
]

#: The start-up is over, and nothing is waited for that stops the work.
WORKING: frozenset[Phase] = frozenset({"generating", "waiting for jobs", "draining"})

#: Seconds over which images/s are measured.
WINDOW_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Counts:
    """A worker's counts since its start; *dollars* None where its price is unknown."""

    images: int = 0
    #: Out of the queue, whatever the outcome.
    ended_jobs: int = 0
    failed_jobs: int = 0
    cancelled_jobs: int = 0
    dropped_jobs: int = 0
    jobs_in_flight: int = 0
    dollars: float | None = None


@dataclass(frozen=True, kw_only=True)
class Progress(Counts):
    """One worker's phase and figures; None for those not known (yet)."""

    phase: Phase
    why_waiting: str | None
    seconds: float
    #: Images per second over the last minute.
    images_per_second: float | None
    #: Images per dollar, all in, since the start.
    images_per_dollar: float | None
    #: Jobs left in the queue, those in flight on any worker included.
    jobs_left: int | None
    #: Seconds until the queue is empty, at the pace it shrinks at, whoever draws from it.
    seconds_left: float | None
    #: True if `seconds_left` is at this worker's pace alone: the queue was measured only once.
    is_own_pace: bool

    @property
    def state(self) -> str:
        """The phase in words."""
        if self.phase == "draining":
            return f"draining, {self.jobs_in_flight:,} in flight"
        return f"{self.phase}: {self.why_waiting}" if self.why_waiting else self.phase

    @property
    def figures(self) -> list[str]:
        """The figures in words: what is known and says something in this phase."""
        if self.phase not in WORKING:
            return [duration(self.seconds)]
        is_generating = self.phase == "generating"
        shown = [f"{self.images:,} image{'s' * (self.images != 1)}"]
        without_image = {
            "failed": self.failed_jobs,
            "cancelled": self.cancelled_jobs,
            "dropped": self.dropped_jobs,
        }
        shown += [f"{jobs:,} {end}" for end, jobs in without_image.items() if jobs]
        if self.images_per_second is not None and (
            is_generating or self.images_per_second
        ):
            shown.append(f"{self.images_per_second:.2f} images/s")
        if is_generating:
            shown.append(f"{self.jobs_in_flight:,} in flight")
        if is_generating and self.jobs_left is not None:
            shown.append(f"{self.jobs_left:,} left")
        if self.images_per_dollar is not None:
            shown.append(f"{self.images_per_dollar:,.0f} images/$")
        if is_generating and self.seconds_left is not None:
            shown.append(
                f"{'~' if self.is_own_pace else ''}{duration(self.seconds_left)} to go"
            )
        return shown


@dataclass(frozen=True)
class WorkerReport:
    """The totals of one run; *jobs* by outcome, *gpu_dollars* None where the price is unknown."""

    images: int
    jobs: Mapping[str, int]
    seconds: float
    start_up_seconds: float
    engine_busy_seconds: float = 0.0
    engine_idle_fraction: float = 0.0
    gpu_dollars: float | None = None
    storage_dollars: float = 0.0
    #: The signal that ended a run with `until_empty` before the queue was empty.
    stopped_by: signal.Signals | None = None

    @property
    def failed_jobs(self) -> int:
        return self.jobs.get("failed", 0)

    @property
    def images_per_second(self) -> float:
        """Images per second without the start-up."""
        return self.images / max(self.seconds - self.start_up_seconds, 1e-9)

    @property
    def images_per_dollar(self) -> float | None:
        """Images per dollar, all in; None where the price is unknown."""
        return (
            self.images / (self.gpu_dollars + self.storage_dollars)
            if self.gpu_dollars
            else None
        )


class ProgressMeter:
    """Turns counts into figures: rates over the last minute, and what is left in the queue."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Counts]] = deque()
        self._flow = QueueFlow()
        self._depth: tuple[int, int] | None = None

    def measured(self, at: float, messages: int, counts: Counts) -> None:
        """The queue's depth *at* (monotonic seconds), and what was counted until then."""
        self._flow.add_sample(at, messages)
        self._depth = messages, counts.ended_jobs

    @property
    def queue_seconds(self) -> float | None:
        """Seconds until the queue is empty, at its recent rate; infinite if it does not shrink."""
        return self._flow.seconds_to_empty if self._depth else None

    def read(
        self,
        now: float,
        seconds: float,
        phase: Phase,
        counts: Counts,
        why_waiting: str | None,
    ) -> Progress:
        """The figures *now* (monotonic seconds), *seconds* after the start.

        Called every second or so: the rates come from what was counted at the earlier calls.
        """
        images_per_second = None
        jobs_per_second = None
        if phase in WORKING:
            images_per_second, jobs_per_second = self._rates(now, counts)
        else:  # the first images are made from here on
            self._samples = deque([(now, counts)])
        left = self._jobs_left(counts)
        seconds_left, is_own_pace = self._seconds_left(left, jobs_per_second)
        return Progress(
            **asdict(counts),
            phase=phase,
            why_waiting=why_waiting if phase == "waiting for jobs" else None,
            seconds=seconds,
            images_per_second=images_per_second if counts.images else None,
            images_per_dollar=counts.images / counts.dollars
            if counts.dollars
            else None,
            jobs_left=left,
            seconds_left=seconds_left,
            is_own_pace=is_own_pace,
        )

    def _rates(self, now: float, counts: Counts) -> tuple[float | None, float | None]:
        """Images and jobs per second."""
        self._samples.append((now, counts))
        while len(self._samples) > 1 and now - self._samples[1][0] >= WINDOW_SECONDS:
            self._samples.popleft()
        began_at, before = self._samples[0]
        seconds = now - began_at
        if not seconds:
            return None, None
        return (
            (counts.images - before.images) / seconds,
            (counts.ended_jobs - before.ended_jobs) / seconds,
        )

    def _jobs_left(self, counts: Counts) -> int | None:
        """The queue's last depth, less the jobs that this worker has ended since."""
        if self._depth is None:
            return None
        messages, ended = self._depth
        return max(messages - (counts.ended_jobs - ended), counts.jobs_in_flight)

    def _seconds_left(
        self, left: int | None, jobs_per_second: float | None
    ) -> tuple[float | None, bool]:
        if left is None:
            return None, False
        net = self._flow.net_per_second
        pace = jobs_per_second if net is None else -net
        if pace is None or pace <= 0:
            return None, False  # nothing ends, or the queue does not shrink
        return left / pace, net is None


def log_progress(progress: Progress) -> None:
    log.info(
        f"{progress.state}: {', '.join(progress.figures)}",
        action="progress",
        **_rounded(asdict(progress)),
    )


def log_report(report: WorkerReport) -> None:
    fields = asdict(report)
    del fields["stopped_by"]  # not known yet; the signal has a line of its own
    jobs = (
        ", ".join(f"{count} {outcome}" for outcome, count in report.jobs.items())
        or "none"
    )
    idle = f"the engine was idle {100 * report.engine_idle_fraction:.1f} % of the time"
    for name in ("failed_jobs", "images_per_second", "images_per_dollar"):
        fields[name] = getattr(report, name)
    log.info(
        f"done: {report.images} images in {report.seconds:.0f} s, {idle}; jobs: {jobs}",
        action="stop",
        **_rounded(fields),
    )


def _rounded(fields: Mapping[str, object]) -> JSONDict:
    return {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in fields.items()
    }
