"""Loads an engine; torch is imported only when that is called."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from imagefleet import errors

if TYPE_CHECKING:
    from worker.engine.contract import Engine
    from worker.engine.device import Precision
    from worker.engine.kernels.background import Around
    from worker.engine.pixel.engine import PixelEngine
    from worker.engine.slots.engine import SlotEngine
    from worker.engine.slots.memory import SlotWeights
    from worker.engine.slots.queue import WeightMode

log = logging.getLogger(__name__)

Compile = Literal["auto", "background", "off"]


def load_engine(
    model: Path,
    device: str = "auto",
    *,
    precision: Precision = "auto",
    config: Path | None = None,
    prediction_type: str | None = None,
    slots: int | None = None,
    compile: Compile = "auto",  # noqa: A002 - torch's name for it
    compiled_modes: Sequence[WeightMode] = ("per_slot", "shared"),
    fp16_accumulate: bool = False,
    slot_weights: SlotWeights | None = None,
    around_compiling: Around | None = None,
) -> SlotEngine:
    """Loads a checkpoint (a diffusers folder or one `.safetensors` file) and the engine on it.

    No network is used. The same seed gives the same bytes on the same hardware only, and on a CPU
    with the same number of threads only.

    Args:
        model: the checkpoint.
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        precision: of the weights; 'auto' is float16 on a GPU, float32 on a CPU.
        config: a folder with a single file's configuration and tokenizer, unless they are
            SD1.5's; by default the folder of the same name beside the file, or the file's own.
        prediction_type: 'epsilon' or 'v_prediction', where no configuration of the scheduler says.
        slots: images drawn at once; None takes as many as the GPU's memory holds.
        compile: 'auto' compiles on a GPU before it returns, a minute or two; with 'background' the
            engine draws at once, and compiles meanwhile.
        compiled_modes: the weight modes the UNet is compiled for, in this order.
        fp16_accumulate: sums matrix products in float16: up to twice the rate on GeForce cards,
            at some loss of accuracy.
        slot_weights: how slots hold LoRAs (`memory.SlotWeights`); None decides by the GPU's
            memory.
        around_compiling: with 'background', given the name of what is compiled; what it returns is
            entered on the compiler's thread meanwhile.

    Raises:
        SetupError: a library, the device or a part of the checkpoint is missing or does not fit.
    """
    began_at = time.monotonic()
    import_libraries()
    from worker.engine import checkpoint
    from worker.engine import device as devices
    from worker.engine.kernels import background
    from worker.engine.slots import engine as slot_engine
    from worker.engine.slots import memory

    imported_at = time.monotonic()
    found = devices.find_device(device)
    dtype = devices.find_dtype(precision, found)
    loaded = checkpoint.load_checkpoint(model, found, dtype, config, prediction_type)
    read_at = time.monotonic()
    devices.set_up(found, fp16_accumulate=fp16_accumulate, has_text_on_cpu=loaded.has_text_on_cpu)
    on_gpu = found.type == "cuda"
    engine = slot_engine.SlotEngine(
        loaded,
        slots,
        slot_weights=slot_weights,
        backend="inductor" if compile != "off" and on_gpu else None,
        compiled_modes=compiled_modes,
    )
    log.info(
        "loaded in %.1f s: libraries %.1f, checkpoint %.1f, slots %.1f",
        time.monotonic() - began_at,
        imported_at - began_at,
        read_at - imported_at,
        time.monotonic() - read_at,
        extra={"action": "loaded"},
    )
    log.info(
        "draws %s",
        memory.describe(engine.slots, engine.savings),
        extra={"action": "fits", "slots": engine.slots, **engine.savings._asdict()},
    )
    if on_gpu and compile == "background":
        engine.compile_in_background(around_compiling or background.nothing_around)
    elif on_gpu:
        engine.warm_up(*engine.default_size)
    return engine


def load_any_engine(model: Path, device: str = "auto", **settings: Any) -> Engine:
    """The engine for a checkpoint of whatever kind: of latents (`load_engine`), or of pixels.

    *settings* are those of `load_engine`; a stage of a cascade in pixels takes device, precision,
    slots, compile, fp16_accumulate and around_compiling, and has no use for the others.

    Raises:
        SetupError: as `load_engine`.
    """
    import_libraries()
    from worker.engine.families import table
    from worker.engine.pixel import checkpoint as pixel_checkpoint

    if table.pipeline_of(model) not in pixel_checkpoint.FAMILIES:
        return load_engine(model, device, **settings)
    return _load_pixel_engine(model, device, **settings)


def _load_pixel_engine(
    model: Path,
    device: str,
    *,
    precision: Precision = "auto",
    slots: int | None = None,
    compile: Compile = "auto",  # noqa: A002 - torch's name for it
    fp16_accumulate: bool = False,
    around_compiling: Around | None = None,
    **_unused: object,
) -> PixelEngine:
    from worker.engine import device as devices
    from worker.engine.kernels import background
    from worker.engine.pixel import checkpoint
    from worker.engine.pixel import engine as pixel_engine

    found = devices.find_device(device)
    loaded = checkpoint.load_checkpoint(model, found, devices.find_dtype(precision, found))
    devices.set_up(found, fp16_accumulate=fp16_accumulate)
    is_compiled = compile != "off" and found.type == "cuda"
    engine = pixel_engine.PixelEngine(loaded, slots, backend="inductor" if is_compiled else None)
    log.info("draws %d images at once", engine.slots, extra={"action": "fits"})
    if is_compiled and compile == "background":
        engine.compile_in_background(around_compiling or background.nothing_around)
    elif is_compiled:
        engine.warm_up()
    return engine


def read_beside(
    engine: Engine,
    model: Path,
    *,
    config: Path | None = None,
    prediction_type: str | None = None,
) -> Callable[[], bool] | None:
    """Reads a checkpoint into the host's memory, for an engine that goes on drawing with its own.

    Returns what has the engine draw with it instead, for the engine's thread: see
    `SlotEngine.take_weights`. None: it needs an engine of its own, or loading it will say what is
    wrong with it.
    """
    import torch

    from worker.engine import checkpoint
    from worker.engine.slots import weights
    from worker.engine.slots.engine import SlotEngine

    if not isinstance(engine, SlotEngine):
        return None
    cpu, like = torch.device("cpu"), engine.checkpoint
    try:
        other = checkpoint.load_checkpoint(
            model, cpu, torch.float32, config, prediction_type, like=like
        )
    except errors.SetupError:
        return None
    if not weights.is_alike(like, other):
        return None
    read = [other]

    def take() -> bool:
        return engine.take_weights(read.pop())  # and the host's memory is free again

    return take


def import_libraries() -> None:
    """Imports torch and all else that an engine needs, which takes seconds; on any thread.

    Raises:
        SetupError: a library is missing.
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
