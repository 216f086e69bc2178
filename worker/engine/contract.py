"""The seam between the pipeline and the GPU: image requests in, finished RGB arrays out.

An engine works on several images at once. The pipeline asks how many it can still take (`free`),
admits prepared requests, and calls `tick` as long as it is `busy`; whichever images a tick
finishes come back by their tickets. A batch engine finishes its images together, a slot engine
each at its own tick; the pipeline does not see the difference. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from imagefleet import errors
from imagefleet.job.prompt import Prompt

Pixels = npt.NDArray[np.uint8]
"""One image: [height, width, 3], RGB."""

Outcome = Pixels | errors.FleetError
"""What became of a request: its pixels, or the error that stands for them."""


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA file and its strength on each network."""

    name: str
    path: Path
    text_encoder_weight: float
    unet_weight: float


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """One image to generate. Sizes in pixels; a prompt that is a string has no LoRA tags."""

    prompt: Prompt | str
    negative_prompt: Prompt | str
    loras: tuple[Lora, ...]
    sampler: str
    steps: int
    cfg_scale: float
    seed: int
    width: int
    height: int
    clip_skip: int = 1


class Prepared(Protocol):
    """A request with all that can be made ready away from the GPU; opaque to the pipeline."""

    @property
    def request(self) -> ImageRequest: ...


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of one admitted request."""

    ticket: int
    outcome: Outcome


class Engine(Protocol):
    """One GPU (or CPU) with a checkpoint loaded.

    `prepare` is called from several threads; all else from one thread, the engine's own.
    """

    @property
    def model_name(self) -> str:
        """The name by which a job's `model` asks for this checkpoint."""

    @property
    def default_size(self) -> tuple[int, int]:
        """The checkpoint's own (width, height), for jobs that name none."""

    @property
    def capacity(self) -> int:
        """Requests that it holds at once; what `free` is counted down from."""

    @property
    def free(self) -> int:
        """Requests that `admit` takes now."""

    @property
    def busy(self) -> bool:
        """Whether a tick has something to do."""

    @property
    def lora_lookups(self) -> Mapping[str, int]:
        """Times that a LoRA's file was in memory ('hit') or was not ('miss'); counts on."""

    def prepare(self, request: ImageRequest) -> Prepared:
        """Checks a request and reads what it needs, away from the GPU's thread.

        Raises:
            JobError: it can never succeed here (a LoRA that does not fit, say).
        """

    def admit(self, ticket: int, prepared: Prepared) -> None:
        """Takes a request in; called only while `free` is above zero."""

    def tick(self) -> list[Finished]:
        """Does one bounded piece of work and returns what it finished.

        One image's failure is its own outcome (JobError or TransientError).

        Raises:
            NodeError: the GPU itself is broken; every image in hand is void.
        """

    def close(self) -> None:
        """Frees the GPU's memory."""
