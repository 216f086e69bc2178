"""Loads an engine; torch is imported only when that is called."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from imagefleet import errors
from imagefleet.files import safetensors
from imagefleet.files.safetensors import rested, whole
from imagefleet.telemetry import logs

if TYPE_CHECKING:
    import torch

    from worker.engine.contract import Engine
    from worker.engine.device import Precision
    from worker.engine.kernels.compile import Around
    from worker.engine.slots.engine import SlotEngine
    from worker.engine.slots.memory import SlotWeights, WeightMode
    from worker.engine.slots.parts import Parts, Settings

log = logs.EventLog(__name__)

Compile = Literal["auto", "background", "off"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """A checkpoint, and how it is drawn with."""

    model: Path
    """A diffusers folder or one `.safetensors` file."""
    device: str = "auto"
    """'auto', 'cpu', 'cuda' or 'cuda:N'."""
    precision: Precision = "auto"
    """The type of the weights; 'auto' is float16 on a GPU, float32 on a CPU."""
    config: Path | None = None
    """A folder with a single file's configuration and tokenizer, unless they are SD1.5's; by
    default the folder of the same name beside the file, or the file's own."""
    prediction_type: str | None = None
    """'epsilon' or 'v_prediction', where no configuration of the scheduler says."""
    accelerator: Path | None = None
    """A LoRA that is merged into the weights for all images."""
    taesd: Path | None = None
    """A folder with an AutoencoderTiny, which decodes what is not to be decoded by the VAE."""
    is_unguided: bool = False
    """Whether most images are drawn without guidance; compiled for first, until a job shows."""
    slots: int | None = None
    """Images drawn at once; None takes as many as the GPU's memory holds."""
    compile: Compile = "auto"
    """On a GPU: before the engine is returned, a minute or two, or while it draws; or not."""
    compiled_modes: Sequence[WeightMode] = ("per_slot", "shared")
    """The weight modes the UNet is compiled for, in this order."""
    fp16_accumulate: bool = False
    """Sums in float16: up to twice the rate on GeForce cards, at some loss of accuracy."""
    slot_weights: SlotWeights | None = None
    """How slots hold LoRAs (`memory.SlotWeights`); None decides by the GPU's memory."""
    around_compiling: Around | None = None
    """What is entered while something is compiled beside the ticks."""
    queue_seconds: Callable[[], float | None] = lambda: None
    """For how long the queue's jobs will last; None if unknown."""


def load_engine(settings: EngineSettings) -> SlotEngine:
    """Loads a checkpoint of latents or of pixels, and the engine on it.

    No network is used. The same seed gives the same bytes on the same hardware only, and on a CPU
    with the same number of threads only. A stage of a cascade in pixels has no use for the settings
    of configurations and LoRAs. Raises SetupError if a library, the device or a part of the
    checkpoint is missing or does not fit.
    """
    began_at = time.monotonic()
    import_libraries()
    from worker.engine import device as devices
    from worker.engine.slots import engine as slot_engine
    from worker.engine.slots import memory, parts

    imported_at = time.monotonic()
    device = devices.find_device(settings.device)
    is_compiled = settings.compile != "off" and device.type == "cuda"
    made = _parts(
        settings,
        device,
        parts.Settings(
            settings.slots,
            slot_weights=settings.slot_weights,
            backend="inductor" if is_compiled else None,
            compiled_modes=settings.compiled_modes,
            taesd=settings.taesd,
            is_unguided=settings.is_unguided,
            queue_seconds=settings.queue_seconds,
        ),
    )
    engine = slot_engine.SlotEngine(made)
    log.info(
        f"loaded in {time.monotonic() - began_at:.1f} s, libraries in {imported_at - began_at:.1f}",
        action="loaded",
    )
    how = memory.describe(engine.slots, engine.savings)
    log.info(f"draws {how}", action="fits", slots=engine.slots, **engine.savings._asdict())
    if is_compiled and settings.compile == "background":
        engine.compile_in_background(settings.around_compiling)
    elif is_compiled:
        engine.warm_up()
    return engine


def _parts(settings: EngineSettings, device: torch.device, how: Settings) -> Parts:
    """Reads the checkpoint, of whatever kind, once nobody writes its files."""
    while True:
        try:
            with _whole(settings.model):
                return _read(settings, device, how)
        except errors.UnsettledFileError as error:
            log.info(f"the model waits: {error}", action="model_waits")
            time.sleep(safetensors.REST_SECONDS)


@contextlib.contextmanager
def _whole(model: Path) -> Iterator[None]:
    """Reads a model in the block; UnsettledFileError: one of its files may be half-written."""
    found = [model] if model.is_file() else sorted(model.rglob("*.safetensors"))
    with contextlib.ExitStack() as files:
        for file in found:
            files.enter_context(whole(rested(file)))
        yield


def _read(settings: EngineSettings, device: torch.device, how: Settings) -> Parts:
    from worker.engine import checkpoint
    from worker.engine import device as devices
    from worker.engine.families import latents, table
    from worker.engine.pixel import checkpoint as pixel_checkpoint
    from worker.engine.pixel import parts as pixels

    dtype = devices.find_dtype(settings.precision, device)
    if table.pipeline_of(settings.model) in pixel_checkpoint.FAMILIES:
        if settings.accelerator or settings.taesd:
            raise errors.SetupError(
                "the model is a stage of IF, for which there is no accelerator and no TAESD"
            )
        stage = pixel_checkpoint.load_checkpoint(settings.model, device, dtype)
        devices.set_up(device, fp16_accumulate=settings.fp16_accumulate)
        return pixels.of_pixels(stage, how)
    loaded = checkpoint.load_checkpoint(
        settings.model,
        device,
        dtype,
        settings.config,
        settings.prediction_type,
        accelerator=settings.accelerator,
    )
    devices.set_up(
        device,
        fp16_accumulate=settings.fp16_accumulate,
        has_text_on_cpu=loaded.has_text_on_cpu,
    )
    return latents.of_latents(loaded, how)


def read_beside(engine: Engine, settings: EngineSettings) -> Callable[[], bool] | None:
    """Reads a checkpoint into the host's memory, for an engine that goes on drawing with its own.

    Returns what has the engine draw with it instead, for the engine's thread: see
    `SlotEngine.take_weights`. None: it needs an engine of its own, or loading it will say what is
    wrong with it.
    """
    import torch

    from worker.engine import checkpoint
    from worker.engine.checkpoint import Checkpoint
    from worker.engine.slots import weights
    from worker.engine.slots.engine import SlotEngine

    if not isinstance(engine, SlotEngine) or not isinstance(engine.checkpoint, Checkpoint):
        return None
    cpu, like = torch.device("cpu"), engine.checkpoint
    try:
        with _whole(settings.model):
            other = checkpoint.load_checkpoint(
                settings.model,
                cpu,
                torch.float32,
                settings.config,
                settings.prediction_type,
                like=like,
                accelerator=settings.accelerator,
            )
    except (errors.SetupError, errors.UnsettledFileError):
        return None
    if not weights.is_alike(like, other):
        return None
    read = [other]

    def take() -> bool:
        return engine.take_weights(read.pop())  # and the host's memory is free again

    return take


def import_libraries() -> None:
    """Imports torch and all else that an engine needs, which takes seconds; on any thread.

    Raises SetupError if a library is missing.
    """
    collects = gc.isenabled()
    gc.disable()  # a fifth of the time: hardly any of the many new objects is garbage
    try:
        import worker.engine.slots.engine  # noqa: F401 - it imports all
    except ModuleNotFoundError as error:
        raise errors.SetupError(
            f"the worker needs {error.name}, which is not installed: pip install .[worker]"
        ) from error
    finally:
        if collects:
            gc.enable()
