"""How long a stage trains, and how its learning rate falls."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

WARM_UP_SHARE = 0.03


@dataclass(slots=True)
class Schedule:
    """Yields progress from 0 to 1, ending at `steps` or after `seconds`, whichever is first."""

    steps: int
    seconds: float
    report_every: int = 200
    _started: float = field(default_factory=time.monotonic)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        self._started = time.monotonic()
        step = 0
        while True:
            progress = max(
                step / self.steps, (time.monotonic() - self._started) / self.seconds
            )
            if progress >= 1:
                return
            yield step, progress
            step += 1

    def report(self, step: int, **values: torch.Tensor | float) -> None:
        if step % self.report_every == 0:
            elapsed = time.monotonic() - self._started
            figures = "  ".join(
                f"{name} {float(value):.4f}" for name, value in values.items()
            )
            print(f"  step {step}  {elapsed:.0f} s  {figures}", flush=True)


def set_learning_rate(
    optimizer: torch.optim.Optimizer, step: int, progress: float, highest: float
) -> None:
    """A short linear warm-up, then a half cosine down to 1 % of `highest`."""
    warm_up = min(1.0, (step + 1) / 200, max(progress / WARM_UP_SHARE, 0.02))
    rate = highest * warm_up * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_share", 1.0)


def parameter_groups(table: str, *networks: nn.Module) -> list[dict[str, Any]]:
    """Vectors and layers with *table* in their names do not decay: rare words would fade away."""
    named = [each for network in networks for each in network.named_parameters()]
    groups: dict[float, list[nn.Parameter]] = {0.01: [], 0.0: []}
    for name, value in named:
        is_free = value.ndim < 2 or table in name
        if value.requires_grad:
            groups[0.0 if is_free else 0.01].append(value)
    return [{"params": each, "weight_decay": decay} for decay, each in groups.items()]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Takes one step along the loss' gradient, whose norm is limited to 1."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(parameters_of(optimizer), 1.0)
    optimizer.step()


def compiled(function, device: torch.device):  # noqa: ANN001, ANN201 - keeps the callable's type
    """`torch.compile` on a GPU; on the CPU compiling costs more than toy runs gain."""
    return torch.compile(function) if device.type == "cuda" else function


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
