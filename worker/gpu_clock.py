"""The engine's time: busy, idle, and until its first image at full speed."""

from collections import defaultdict
from dataclasses import dataclass, field

from imagefleet.telemetry import logs
from worker.engine import contract, phases

log = logs.EventLog(__name__)


@dataclass(slots=True)
class GpuClock:
    """The engine's busy and idle seconds, from its first image on; moments are monotonic."""

    busy_seconds: float = 0.0
    idle_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    images: int = 0
    first_at: float | None = None
    last_at: float | None = None
    first_image_at: float | None = None
    full_speed_at: float | None = None
    """The end of the first image beside which nothing is compiled."""

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

    def note_images(self, engine: contract.Engine, began_at: float, now: float) -> None:
        """Notes the first image, and the first at full speed; not to be called after that."""
        after = f"{now - began_at:.1f} s after the start"
        if self.first_image_at is None:
            self.first_image_at = now
            log.info(f"first image {after}", action="first_image")
        if not getattr(engine, "is_compiling", False):
            self.full_speed_at = now
            log.info(
                f"full speed {after}: {phases.described()}",
                action="full_speed",
                phases=phases.seconds.copy(),
            )
