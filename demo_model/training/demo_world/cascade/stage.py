"""The training of one stage, which can be stopped and continued at any step."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from demo_world.cascade import networks
from demo_world.cascade.losses import StageLoss
from demo_world.cascade.networks import StageName
from demo_world.cascade.pictures import Pictures
from demo_world.networks import MovingAverage
from demo_world.training import schedule

LEARNING_RATE = 1.2e-3
AVERAGE_DECAY = 0.999

#: Captions that are empty in training, so that there is guidance.
CAPTION_DROPOUT = 0.1

_REPORT_STEPS = 50


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a stage is trained, whichever ends first; its learning rate falls towards both."""

    seconds: float
    steps: int
    batch: int


class StageTraining:
    """A stage's networks with their optimizer and moving average."""

    def __init__(
        self,
        stage: StageName,
        device: torch.device,
        encoder: nn.Module | None = None,
        *,
        is_bfloat16: bool = False,
    ) -> None:
        """*encoder*: trained with the base, given to the second stage; None for a new one."""
        self.stage = stage
        self._is_bfloat16 = is_bfloat16
        self.step, self.seconds = 0, 0.0
        self._device = device
        self.tokenizer = networks.build_tokenizer()
        # Slower than the usual layout on a CPU.
        layout = (
            torch.channels_last if device.type == "cuda" else torch.contiguous_format
        )
        self.unet = networks.build_unet(stage).to(device, memory_format=layout)
        self._is_joint = encoder is None
        self.encoder = encoder or networks.build_text_encoder(self.tokenizer)
        self.encoder.requires_grad_(self._is_joint).to(device)
        groups = schedule.parameter_groups("shared", self.unet, self.encoder)
        self._optimizer = torch.optim.AdamW(
            groups, LEARNING_RATE, (0.9, 0.99), fused=device.type == "cuda"
        )
        self._parameters = schedule.parameters_of(self._optimizer)
        self._average = MovingAverage(self._parameters, AVERAGE_DECAY)
        self._loss = StageLoss(stage, networks.make_scheduler(stage), device)
        self._empty = networks.tokenize(self.tokenizer, [""]).to(device)

    def state(self) -> dict[str, Any]:
        """All that a later process needs to continue."""
        return {
            "step": self.step,
            "seconds": self.seconds,
            "unet": self.unet.state_dict(),
            "encoder": self.encoder.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "average": self._average.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.step, self.seconds = state["step"], state["seconds"]
        self.unet.load_state_dict(state["unet"])
        self.encoder.load_state_dict(state["encoder"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._average.load(state["average"])

    def averaged(self) -> tuple[Any, Any]:
        """Copies of the UNet and of the encoder with the moving average of the weights."""
        live = [each.detach().clone() for each in self._parameters]
        self._average.copy_to_live()
        unet, encoder = (
            copy.deepcopy(self.unet).eval(),
            copy.deepcopy(self.encoder).eval(),
        )
        with torch.no_grad():
            for parameter, value in zip(self._parameters, live, strict=True):
                parameter.copy_(value)
        return unet, encoder

    def train(
        self,
        pictures: Pictures,
        limits: Limits,
        *,
        is_stopped: Callable[[], bool],
        on_save: Callable[[], None],
        save_seconds: float,
        is_compiled: bool = False,
    ) -> bool:
        """Trains up to the limits; false if it was stopped before.

        *on_save* is called every *save_seconds*, and at the end.
        """
        unet: Any = torch.compile(self.unet) if is_compiled else self.unet
        self.unet.train()
        saved_at = clock = time.monotonic()
        is_done = False
        while not is_stopped():
            progress = max(self.step / limits.steps, self.seconds / limits.seconds)
            if is_done := progress >= 1:
                break
            schedule.set_learning_rate(
                self._optimizer, self.step, progress, LEARNING_RATE
            )
            pictures.take(wait=pictures.ready < limits.batch)
            of_prediction, of_variance = self._step(unet, *pictures.batch(limits.batch))
            self.step += 1
            clock, spent = time.monotonic(), clock
            self.seconds += clock - spent
            if self.step % _REPORT_STEPS == 0:
                print(
                    f"{self.stage}: step {self.step}  {self.seconds:.0f} s  loss"
                    f" {float(of_prediction):.4f}  variance {float(of_variance):.4f}"
                    f"  {pictures.ready} pictures",
                    flush=True,
                )
            if clock - saved_at >= save_seconds:
                on_save()
                saved_at = clock = time.monotonic()
        on_save()
        return is_done

    def _step(self, unet: Any, images: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        dropped = torch.rand(len(ids), 1, device=self._device) < CAPTION_DROPOUT
        ids = torch.where(dropped, self._empty, ids)
        with torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._is_bfloat16
        ):
            with torch.set_grad_enabled(self._is_joint):
                states = networks.encode(self.encoder, ids)
            of_prediction, of_variance = self._loss(unet, images, states)
        schedule.descend(self._optimizer, of_prediction + of_variance)
        self._average.update()
        return of_prediction.detach(), of_variance.detach()
