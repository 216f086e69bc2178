"""The training of one stage, which can be stopped and continued at any step."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from demo_world.networks import MovingAverage
from demo_world.training import schedule

_REPORT_STEPS = 100


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a stage is trained, whichever ends first; its learning rate falls towards both."""

    seconds: float
    steps: int

    def progress(self, step: int, seconds: float) -> float:
        """From 0; 1 at the end."""
        return max(step / self.steps, seconds / self.seconds)


class Task(Protocol):
    """What a stage learns."""

    def loss(self, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a new batch, and figures to report; *progress* is from 0 to 1."""
        ...

    def take_gradients(self) -> None:
        """Called after the loss' gradients are there, and before a step is taken along them."""
        ...


@dataclass(slots=True)
class Stop:
    """Set by a signal; the step that runs is finished first."""

    is_set: bool = False

    def __call__(self, *_: object) -> None:
        self.is_set = True


class Training:
    """A stage's parameters with their optimizer and moving average."""

    def __init__(
        self,
        name: str,
        trained: Iterable[nn.Module],
        *,
        learning_rate: float,
        decay: float,
    ) -> None:
        self.name = name
        self.step, self.seconds = 0, 0.0
        self._learning_rate = learning_rate
        groups = schedule.parameter_groups("embed_tokens", *trained)
        is_cuda = any(each.is_cuda for each in groups[0]["params"])
        self._optimizer = torch.optim.AdamW(
            groups, learning_rate, (0.9, 0.99), fused=is_cuda
        )
        self._parameters = schedule.parameters_of(self._optimizer)
        self._average = MovingAverage(self._parameters, decay)

    def state(self) -> dict[str, Any]:
        """All that a later process needs to continue."""
        return {
            "step": self.step,
            "seconds": self.seconds,
            "parameters": [each.detach() for each in self._parameters],
            "optimizer": self._optimizer.state_dict(),
            "average": self._average.state(),
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        self.step, self.seconds = state["step"], state["seconds"]
        for own, value in zip(self._parameters, state["parameters"], strict=True):
            own.copy_(value)
        self._optimizer.load_state_dict(state["optimizer"])
        self._average.load(state["average"])

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The parameters are their moving averages inside."""
        live = [each.detach().clone() for each in self._parameters]
        self._average.copy_to_live()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(self._parameters, live, strict=True):
                    parameter.copy_(value)

    def run(
        self,
        task: Task,
        limits: Limits,
        *,
        is_stopped: Callable[[], bool],
        on_save: Callable[[], None],
        save_seconds: float,
    ) -> None:
        """Trains up to the limits, or until it is stopped.

        *on_save* is called every *save_seconds*, and at the end.
        """
        saved_at = clock = time.monotonic()
        while not is_stopped():
            progress = limits.progress(self.step, self.seconds)
            if progress >= 1:
                break
            schedule.set_learning_rate(
                self._optimizer, self.step, progress, self._learning_rate
            )
            self._optimizer.zero_grad(set_to_none=True)
            loss, figures = task.loss(progress)
            loss.backward()
            task.take_gradients()
            nn.utils.clip_grad_norm_(self._parameters, 1.0)
            self._optimizer.step()
            self._average.update()
            self.step += 1
            clock, spent = time.monotonic(), clock
            self.seconds += clock - spent
            if self.step % _REPORT_STEPS == 0 or self.step <= 2:
                self._report(figures)
            if clock - saved_at >= save_seconds:
                on_save()
                saved_at = clock = time.monotonic()
        on_save()

    def _report(self, figures: dict[str, Tensor]) -> None:
        shown = "  ".join(
            f"{name} {float(value):.4f}" for name, value in figures.items()
        )
        print(
            f"  {self.name}: step {self.step}  {self.seconds:.0f} s  {shown}",
            flush=True,
        )
