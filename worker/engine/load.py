"""Loads an engine; torch is imported only when that is called."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from imagefleet.errors import (
    SetupError,
    TransientError,
    UnsettledFileError,
    UnusableFileError,
)
from imagefleet.files import safetensors
from imagefleet.files.safetensors import rested, whole
from imagefleet.telemetry import logs
from imagefleet.telemetry.logs import log
from worker.engine import phases
from worker.engine.contract import Settings

if TYPE_CHECKING:
    import torch

    from worker.engine.checkpoint import Checkpoint
    from worker.engine.contract import Engine
    from worker.engine.device import Precision
    from worker.engine.families.table import Family
    from worker.engine.kernels.packages import Exchange
    from worker.engine.slots.engine import SlotEngine
    from worker.engine.slots.parts import Parts

Compile = Literal["auto", "background", "off"]

#: Held by whoever imports the libraries; others wait, which is no time of theirs.
_importing = threading.Lock()


@dataclass(frozen=True)
class EngineSettings(Settings):
    """A checkpoint, and how it is drawn with; `packages` follows from the others."""

    #: A diffusers folder or one `.safetensors` file.
    model: Path
    #: 'auto', 'cpu', 'cuda' or 'cuda:N'.
    device: str = "auto"
    #: The type of the weights; 'auto' is float16 on a GPU, for flows bfloat16; float32 on a CPU.
    precision: Precision = "auto"
    #: A folder with a single file's configuration and tokenizer, unless they are SD1.5's; by
    #: default the folder of the same name beside the file, or the file's own.
    config: Path | None = None
    #: 'epsilon' or 'v_prediction', where no configuration of the scheduler says.
    prediction_type: str | None = None
    #: A LoRA that is merged into the weights for all images.
    accelerator: Path | None = None
    #: A VAE's file, for images that name none, in place of the checkpoint's.
    vae: Path | None = None
    #: Time to compile on a GPU: before the engine is returned, while it draws, or never.
    compile: Compile = "auto"
    #: Sums in float16: up to twice the rate on GeForce cards, at some loss of accuracy.
    fp16_accumulate: bool = False
    #: A folder of compiled kernels, which are loaded: programs are in them.
    kernels: Path = Path.home() / ".cache" / "imagefleet" / "kernels"
    #: Where others' kernels are.
    exchange: Exchange | None = None


def load_engine(settings: EngineSettings) -> SlotEngine:
    """Loads a checkpoint of latents, of flows or of pixels, and the engine on it.

    No network is used. The same seed gives the same bytes on the same hardware only, and on a CPU
    with the same number of threads only. A stage of a cascade in pixels has no use for the settings
    of configurations and LoRAs. Raises SetupError if a library, the device or a part of the
    checkpoint is missing or does not fit.
    """
    import_libraries()
    from worker.engine import device as devices
    from worker.engine.kernels import package
    from worker.engine.kernels.packages import Packages
    from worker.engine.slots import engine as slot_engine
    from worker.engine.slots import memory

    device = devices.find_device(settings.device)
    is_compiled = settings.compile != "off" and device.type == "cuda"
    how = settings
    with phases.timed("load"), contextlib.ExitStack() as failed:
        if is_compiled:
            packages = Packages(settings.kernels, device, settings.exchange)
            failed.callback(packages.close)
            packages.prepare()
            threading.Thread(target=package.prepare).start()
            how = replace(settings, packages=packages)
        engine = slot_engine.SlotEngine(_parts(how, device))
        failed.pop_all()
    log.info(f"loaded: {phases.described()}", action="loaded")
    log.info(
        f"draws {memory.describe(engine.slots, engine.savings)}",
        action="fits",
        slots=engine.slots,
        **engine.savings._asdict(),
    )
    if is_compiled and settings.compile == "background":
        engine.compile_in_background()
    elif is_compiled:
        engine.warm_up()
    return engine


def _parts(settings: EngineSettings, device: torch.device) -> Parts:
    """Reads the checkpoint, of whatever kind, once nobody writes its files."""
    while True:
        try:
            with _whole(settings.model):
                return _read(settings, device)
        except UnsettledFileError as error:
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


def _read(settings: EngineSettings, device: torch.device) -> Parts:
    from worker.engine import checkpoint
    from worker.engine import device as devices
    from worker.engine.families import latents, table
    from worker.engine.flow import checkpoint as flow_checkpoint
    from worker.engine.flow import parts as flows
    from worker.engine.pixel import checkpoint as pixel_checkpoint
    from worker.engine.pixel import parts as pixels

    if (flow := flow_checkpoint.family_of(settings.model)) is not None:
        _refuse_parts(settings, flow.name)
        is_int8 = {"int8": True, "auto": None}.get(settings.precision, False)
        precision = "auto" if is_int8 else settings.precision
        dtype = devices.find_dtype(precision, device, "bfloat16")
        model = flow_checkpoint.load_checkpoint(
            settings.model, flow, device, dtype, settings.config, is_int8=is_int8
        )
        devices.set_up(device, fp16_accumulate=False)
        return flows.of_flow(model, settings)
    dtype = devices.find_dtype(settings.precision, device)
    if table.pipeline_of(settings.model) in pixel_checkpoint.FAMILIES:
        _refuse_parts(settings, "a stage of IF")
        stage = pixel_checkpoint.load_checkpoint(settings.model, device, dtype)
        devices.set_up(device, fp16_accumulate=settings.fp16_accumulate)
        return pixels.of_pixels(stage, settings)
    loaded = checkpoint.load_checkpoint(
        settings.model,
        device,
        dtype,
        settings.config,
        settings.prediction_type,
        change=functools.partial(_use_own, settings),
    )
    devices.set_up(
        device,
        fp16_accumulate=settings.fp16_accumulate,
        has_text_on_cpu=loaded.has_text_on_cpu,
    )

    def read(path: Path, like: Checkpoint) -> Checkpoint:
        return _read_like(
            replace(settings, model=path, config=None, prediction_type=None),
            like,
            takes_refiner=True,
        )

    return latents.of_latents(loaded, settings, read)


def _refuse_parts(settings: EngineSettings, what: str) -> None:
    """Raises SetupError for files of the settings that a model, which is *what*, has no use for."""
    if settings.accelerator or settings.vae or settings.taesd:
        raise SetupError(
            f"the model is {what}, for which there is no accelerator, other VAE or TAESD"
        )


def _read_like(
    settings: EngineSettings, like: Checkpoint, *, takes_refiner: bool = False
) -> Checkpoint:
    """Reads another checkpoint into the host's memory; SetupError: it is none of the same kind."""
    import torch

    from worker.engine import checkpoint
    from worker.engine.slots import weights

    with _whole(settings.model):
        other = checkpoint.load_checkpoint(
            settings.model,
            torch.device("cpu"),
            torch.float32,
            settings.config,
            settings.prediction_type,
            like=like,
            change=functools.partial(_use_own, settings),
        )
    refines = takes_refiner and weights.may_refine(other, like)
    if not (refines or weights.is_alike(like, other)):
        raise SetupError(f"{other.name!r} is not of the kind of {like.name!r}")
    return other


def _use_own(
    settings: EngineSettings, family: Family, networks: Mapping[str, Any]
) -> None:
    """Gives a checkpoint that was just read the accelerator and the VAE of the settings."""
    from worker.engine.families import table
    from worker.engine.lora import shared
    from worker.engine.passes import images

    try:
        if settings.accelerator is not None and family is not table.REFINER:
            shared.merge_for_good(settings.accelerator, family, networks)
        if settings.vae is not None:
            images.load_for_good(
                settings.vae, networks["vae"], overflows=family.overflows_in_float16
            )
    except (UnusableFileError, TransientError) as error:
        raise SetupError(error.message) from error


def read_beside(engine: Engine, settings: EngineSettings) -> Callable[[], bool] | None:
    """Reads a checkpoint into the host's memory, for an engine that goes on drawing with its own.

    Returns what has the engine draw with it instead, for its thread: `SlotEngine.take_weights`.
    None: it needs an engine of its own, or loading it will say what is wrong with it.
    """
    from worker.engine.checkpoint import Checkpoint
    from worker.engine.slots.engine import SlotEngine

    if not isinstance(engine, SlotEngine) or not isinstance(
        engine.checkpoint, Checkpoint
    ):
        return None
    try:
        read = [_read_like(settings, engine.checkpoint)]
    except (SetupError, UnsettledFileError):
        return None
    # Popped, so that the host's memory is free again.
    return lambda: engine.take_weights(read.pop())


def import_libraries() -> None:
    """Imports an engine's libraries, for seconds, on any thread; SetupError if one is missing."""
    collects = gc.isenabled()
    gc.disable()  # a fifth of the time: hardly any of the many new objects is garbage
    try:
        with _importing, phases.timed("import"):
            import worker.engine.slots.engine  # noqa: F401 - it imports all
        logs.take_over_libraries()
    except ModuleNotFoundError as error:
        raise SetupError(
            f"the worker needs {error.name}, which is not installed: pip install .[worker]"
        ) from error
    finally:
        if collects:
            gc.enable()
