"""The interface between the pipeline and the GPU: prepared requests in, finished RGB arrays out.

An engine draws several images at once. The pipeline admits prepared requests while some are `free`
and calls `tick` while it is `busy`; each tick returns the images that it finished, by ticket.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from imagefleet.errors import FleetError
from imagefleet.files.safetensors import Identity
from imagefleet.job.noise import DEFAULT_NOISE, Noise
from imagefleet.job.passes.first import VaeDecoder
from imagefleet.job.prompt import Prompt
from imagefleet.job.samplers import DEFAULT_OPTIONS, Options
from imagefleet.job.sizes import Size

if TYPE_CHECKING:
    from worker.engine.kernels.packages import Packages
    from worker.engine.slots.memory import SlotWeights, WeightMode

Result = TypeVar("Result")

#: One image: [height, width, 3], RGB.
Pixels = NDArray[np.uint8]

#: The result of a request: its pixels, or its error.
Outcome = Pixels | FleetError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Engine settings that do not depend on the model."""

    #: Images drawn at once; None takes as many as the GPU's memory holds.
    slots: int | None = None
    #: Number of lanes with per-slot weights of their own; None takes as many as memory holds.
    blocks: int | None = None
    #: Storage of LoRAs in slots; None chooses by the memory. "reloaded" works with one slot.
    slot_weights: SlotWeights | None = None
    #: What compiles; None: nothing is compiled.
    packages: Packages | None = None
    #: Weight modes compiled from the start, in this order; the third mode only where it pays.
    compiled_modes: Sequence[WeightMode] = ("per_slot", "shared")
    #: A folder with an AutoencoderTiny, which decodes what is not to be decoded by the VAE.
    taesd: Path | None = None
    #: True if most images are drawn without guidance; the graph for them is compiled first.
    is_unguided: bool = False
    #: Seconds for which the queue's jobs will last; None if unknown. Decides what is compiled.
    queue_seconds: Callable[[], float | None] = lambda: None


@dataclass(frozen=True)
class Lora:
    """A LoRA file and its strength on each network."""

    name: str
    path: Path
    text_encoder_weight: float
    unet_weight: float
    #: Expected identity of the file; None accepts the file as it is when it is read.
    identity: Identity | None = None


@dataclass(frozen=True)
class Embedding:
    """The file of a textual inversion embedding, which prompts name, and its SHA-256 in hex."""

    name: str
    path: Path
    sha256: str


@dataclass(frozen=True)
class Vae:
    """The file of a VAE."""

    name: str
    path: Path


@dataclass(frozen=True)
class Refiner:
    """A checkpoint that goes on with an image in its last pass; *path* None: the engine's own."""

    path: Path | None
    #: The share of the model's timesteps after which it does; None: from the first call on.
    switch_at: float | None = None
    #: True if *switch_at* is a share of the steps, not of the timesteps.
    by_steps: bool = False


@dataclass(frozen=True, eq=False)
class InitImage:
    """Start image of img2img or inpainting; the pixels have the request's size.

    For an engine whose family enlarges images (`imagefleet.pricing.families`), they have their own.
    """

    pixels: Pixels
    #: The noise's strength; of an enlarged image, its level as a share of all timesteps.
    denoising_strength: float
    #: [height, width]: 255 is drawn anew, 0 stays; blurred already. None: all is drawn anew.
    mask: NDArray[np.uint8] | None = None
    #: Initial content below the mask, as AUTOMATIC1111's `inpainting_fill`.
    masked_content: Literal["fill", "original", "latent noise", "latent nothing"] = (
        "original"
    )


@dataclass(frozen=True)
class HiresPass:
    """A second pass over the upscaled image. Sizes in pixels; None is the first pass's."""

    width: int
    height: int
    denoising_strength: float
    steps: int
    #: A latent upscaler's name in AUTOMATIC1111, or that of the file at *upscaler_path*.
    upscaler: str
    upscaler_path: Path | None = None
    prompt: Prompt | str | None = None
    negative_prompt: Prompt | str | None = None
    sampler: str | None = None
    sampler_options: Options | None = None
    loras: tuple[Lora, ...] | None = None
    #: Width and height before what exceeds the size is cut off at both sides; None: the size.
    whole: Size | None = None
    #: The file or folder of the checkpoint that draws it; None: the engine's own.
    checkpoint: Path | None = None


@dataclass(frozen=True)
class Upscale:
    """Upscaling of the request's image without drawing anything. Sizes in pixels."""

    width: int
    height: int
    #: Width and height before what exceeds the size is cut off at both sides.
    whole: Size
    scale: float
    #: Names, and the files of those that have one; the second is blended into the first.
    upscalers: tuple[tuple[str, Path | None], ...]
    #: The share of the second.
    blend: float = 0.0


@dataclass(frozen=True, eq=False)
class Control:
    """A ControlNet and the image that controls it, which has the request's size."""

    name: str
    path: Path
    pixels: Pixels
    weight: float = 1.0
    #: The share of the steps after which it begins.
    start: float = 0.0
    end: float = 1.0


@dataclass(frozen=True)
class ImageRequest:
    """One image to generate. Sizes in pixels; a prompt that is a string has no LoRA tags.

    Its image has whole cells of the latents: sides that are no multiples are rounded down.
    """

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
    #: The embeddings that the prompts name.
    embeddings: tuple[Embedding, ...] = ()
    sampler_options: Options = DEFAULT_OPTIONS
    noise: Noise = DEFAULT_NOISE
    init: InitImage | None = None
    #: The seed of the noise below a mask; None: the image's.
    fill_seed: int | None = None
    hires: HiresPass | None = None
    controls: tuple[Control, ...] = ()
    #: Files with what a text encoder says of the two prompts (`pixel.text_states`), for stages
    #: without an encoder.
    text_states: tuple[Path, Path] | None = None
    #: None: TAESD if the engine has one.
    decoder: VaeDecoder | None = None
    #: True for seamless images: the UNet's and the VAE's convolutions wrap around.
    tiling: bool = False
    #: VAE that encodes, and that decodes unless TAESD does; None takes the checkpoint's own.
    vae: Vae | None = None
    refiner: Refiner | None = None
    #: The upscaling of a request that draws nothing: else only `init.pixels` and size matter.
    upscale: Upscale | None = None
    #: Set once its estimate at half of its calls has dropped it; None: nobody looks at one.
    stop: Event | None = None
    #: Parts of the picture are drawn again afterwards, by requests with masks.
    is_detailed: bool = False

    @property
    def is_stopped(self) -> bool:
        """True if it is to be drawn no further: JobCancelled is its outcome, if it has a slot."""
        return self.stop is not None and self.stop.is_set()


class PreparedRequest(Protocol):
    """A request with all its work off the GPU done; opaque to the pipeline.

    A dataclass: with another `request` of the same job in its place, only seed and noise differ.
    """

    @property
    def request(self) -> ImageRequest: ...


@dataclass(frozen=True)
class Finished:
    """An image, or before it its estimate if that is looked at: perhaps again, after a failure."""

    ticket: int
    outcome: Outcome
    is_estimate: bool = False


class SelfCheck(Protocol):
    """Checks of an engine's weights, for a node that tests itself."""

    def find_fault(self) -> str | None:
        """Describes how the device's weights differ from the checkpoint's; None if they do not.

        For the engine's thread, between two ticks.
        """


class Engine(Protocol):
    """One GPU (or CPU) with a checkpoint loaded.

    `prepare` and `find_embeddings` are called from several threads, everything else from the
    engine's thread.
    """

    #: The checkpoint's name, for a job's `model`.
    model_name: str
    #: The checkpoint's model family (`imagefleet.pricing.families`).
    family: str
    #: The checkpoint's native (width, height), for jobs without a size.
    default_size: Size
    #: True if most images are drawn without guidance, as with an accelerator.
    is_unguided: bool
    #: True if most of the model's weights are held in int8.
    is_int8: bool
    #: The encoder whose states of the prompts each request has as files; None: it needs none.
    text_encoder: str | None
    #: LoRA files found in memory ('hit') or read from disk ('miss') since the start.
    lora_lookups: Mapping[str, int]

    @property
    def self_check(self) -> SelfCheck | None:
        """None: it has no weights, as a stand-in."""

    @property
    def capacity(self) -> int:
        """Requests that it holds at once: `free` when it is empty."""

    @property
    def free(self) -> int:
        """Requests that can be admitted now."""

    @property
    def busy(self) -> bool:
        """True if a tick has work to do."""

    def find_embeddings(
        self, prompts: Iterable[Prompt | str], names: Collection[str]
    ) -> tuple[str, ...]:
        """Embedding *names* that occur in the prompts, in order.

        Quick if *names* is the same object as the last time.
        """

    def prepare(self, request: ImageRequest) -> PreparedRequest:
        """Checks a request and reads what it needs, off the engine's thread.

        Raises JobError if it can never succeed here (for example, a LoRA that does not fit).
        """

    def admit(
        self, ticket: int, prepared: PreparedRequest, *, is_urgent: bool = False
    ) -> None:
        """Adds a request; only while `free` is above zero.

        One that *is_urgent* has the next free slot, before those that wait for one.
        """

    def tick(self) -> list[Finished]:
        """Does one bounded piece of work and returns the finished images.

        One image's failure is its own outcome (JobError or TransientError). Raises NodeError if the
        GPU itself is broken; all in-flight images are lost.
        """

    def call(self, function: Callable[[], Result]) -> Result:
        """Calls what else needs the GPU, between two ticks; out of memory, it gives up some first.

        Raises what *function* raised, TransientError if the memory is too short for it alone, and
        NodeError if the GPU is broken.
        """

    def close(self) -> None:
        """Frees the GPU's memory."""
