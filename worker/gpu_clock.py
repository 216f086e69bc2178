"""The engine's time: busy, idle, and until its first image at full speed."""

from collections import defaultdict
from dataclasses import dataclass, field

from imagefleet.telemetry.logs import log
from worker.engine import phases
from worker.engine.contract import Engine

#: Seconds of a full engine's ticks, with nothing left to compile, that tell its full speed: more
#: than two rounds of all slots on a slow card.
FULL_SPEED_SECONDS = 60.0

#: Seconds of such ticks before that, below which their speed says nothing.
LEAST_WARM_UP_SECONDS = 5.0


@dataclass
class Pace:
    """Work of a full engine's ticks, in rows of UNet calls times pixels, and their seconds."""

    row_pixels: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.row_pixels / self.seconds

    def add(self, row_pixels: int, seconds: float) -> None:
        self.row_pixels += row_pixels
        self.seconds += seconds


@dataclass
class GpuClock:
    """The engine's busy and idle seconds, from its first image on; moments are monotonic."""

    #: The worker's start.
    began_at: float
    busy_seconds: float = 0.0
    idle_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    images: int = 0
    first_at: float | None = None
    last_at: float | None = None
    #: The end of a job's first image; what a node draws to check itself is no job's.
    first_image_at: float | None = None
    #: The end of a job's first image beside which nothing is compiled or about to be.
    full_speed_at: float | None = None
    #: Share of full speed at which it drew between these two moments; None while unknown.
    #:
    #: Ticks of an engine that lacks jobs do not count: their empty slots take as long as full ones.
    warm_up_speed: float | None = None
    #: While they are measured: the paces between the two moments and after the second.
    paces: tuple[Pace, Pace] | None = None

    @property
    def idle_fraction(self) -> float:
        """The share of time, between the first image and the last, that the engine waited."""
        if (
            self.first_at is None
            or self.last_at is None
            or self.last_at <= self.first_at
        ):
            return 0.0
        return max(0.0, 1 - self.busy_seconds / (self.last_at - self.first_at))

    def note_image(self, engine: Engine, now: float) -> None:
        """Notes a job's first image, and its first at full speed; not to be called after that."""
        after = f"{now - self.began_at:.1f} s after the start"
        is_compiling = getattr(engine, "is_compiling", False)
        if self.first_image_at is None:
            self.first_image_at = now
            log.info(f"first image {after}", action="first_image")
            if is_compiling:
                self.paces = Pace(), Pace()
        if not is_compiling:
            self.full_speed_at = now
            log.info(
                f"full speed {after}: {phases.described()}",
                action="full_speed",
                phases=phases.seconds.copy(),
            )

    def note_full_tick(self, engine: Engine, row_pixels: int, seconds: float) -> None:
        """Adds a tick that drew with a full engine; not needed while nothing is measured."""
        if self.paces is None:
            return
        warm_up, full_speed = self.paces
        if self.full_speed_at is None:
            warm_up.add(row_pixels, seconds)
        elif not getattr(engine, "is_compiling", False):  # for another size by now
            full_speed.add(row_pixels, seconds)
        if full_speed.seconds < FULL_SPEED_SECONDS:
            return
        self.paces = None
        if warm_up.seconds < LEAST_WARM_UP_SECONDS:
            return
        self.warm_up_speed = warm_up.rate / full_speed.rate
        log.info(
            f"drew at {self.warm_up_speed:.3f} of full speed from the first image until then",
            action="full_speed",
            warm_up_speed=self.warm_up_speed,
        )
