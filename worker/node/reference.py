"""Reference images: what a checkpoint's canary images look like where it was added.

A file beside the checkpoint has their fingerprints. It belongs to these weights and this version
of the canary only: any other is ignored, never a reason to give a node up.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from imagefleet import concurrency, errors, likeness, validation
from imagefleet.likeness import Fingerprint
from imagefleet.storage import protocol
from imagefleet.telemetry import logs
from worker.engine import contract
from worker.files import model
from worker.settings import WorkerSettings

log = logs.EventLog(__name__)

CanaryImage = Literal["with_lora", "other_seed", "without_lora"]
"""A canary's image: the first, the same from another seed, and the same without its LoRA."""

CANARY_IMAGES: tuple[CanaryImage, ...] = get_args(CanaryImage)

#: Version of the prompt, the numbers below and the engine's LoRA: other versions' images differ.
VERSION = 1

#: A quarter of an image: enough for a picture, and each further one makes rounding grow.
STEPS = 4

#: The demo model's images of these settings are up to 4.4 apart in float32 and bfloat16, and 0.5 in
#: float16, from four seeds. In so few steps many others are chaotic: up to 90 with a scale of 5.
_SAMPLER, _CFG_SCALE = "ddim", 3.0
_PROMPT = "photo of a red apple on a table, bright light"
_SEED, _OTHER_SEED = 1, 2

#: A checkpoint whose drawings in two precisions differ by more than half of it has no reference.
MAX_TOLERANCE = 4 * likeness.SAME_BELOW

#: Many times what a reference has.
MAX_BYTES = 65_536

SUFFIX = ".canary.json"


class Reference(BaseModel):
    model_config = ConfigDict(frozen=True)

    version: int
    weights: str
    width: int
    height: int
    steps: int
    tolerance: float = Field(ge=likeness.SAME_BELOW, le=MAX_TOLERANCE)
    """The distance from which an image is wrong: wider where two precisions differ by much."""
    images: dict[CanaryImage, str]

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    @property
    def fingerprints(self) -> Mapping[CanaryImage, Fingerprint]:
        return {kind: likeness.from_text(text) for kind, text in self.images.items()}

    def why_unusable(self, engine: contract.Engine) -> str | None:
        """Why it says nothing about this engine's images."""
        self_check = engine.self_check
        if self_check is None or self.weights != self_check.weights_id:
            return "it belongs to other weights"
        if (self.version, self.steps, self.size) != (
            VERSION,
            STEPS,
            engine.default_size,
        ):
            return "another version of imagefleet made it"
        return None


def read(data: bytes) -> Reference:
    """Raises ValueError with one sentence if it is not a reference."""
    with validation.as_error(ValueError):
        found = Reference.model_validate_json(data)
    if found.fingerprints.keys() != set(CANARY_IMAGES):
        raise ValueError(f"it must have the images {', '.join(CANARY_IMAGES)}")
    return found


def beside(model: Path) -> Path:
    return model / "canary.json" if model.is_dir() else model.with_suffix(SUFFIX)


def stored_name(blob: str) -> str:
    """The name of the reference of a stored checkpoint, `models/NAME.safetensors` or `.tar`."""
    return f"{blob.removesuffix('.tar').removesuffix('.safetensors')}{SUFFIX}"


def request(
    kind: CanaryImage,
    size: tuple[int, int],
    lora: Path | None,
    *,
    is_unguided: bool = False,
) -> contract.ImageRequest:
    """A canary's image; *lora* is the engine's own, as `contract.SelfCheck.write_lora` wrote it.

    *is_unguided*: in one row, as the engine's jobs; no reference has such images.
    """
    loras = () if lora is None else (contract.Lora("canary", lora, 1.0, 1.0),)
    return contract.ImageRequest(
        prompt=_PROMPT,
        negative_prompt="",
        loras=() if kind == "without_lora" else loras,
        sampler=_SAMPLER,
        steps=STEPS,
        cfg_scale=1.0 if is_unguided else _CFG_SCALE,
        seed=_OTHER_SEED if kind == "other_seed" else _SEED,
        width=size[0],
        height=size[1],
    )


async def find(
    settings: WorkerSettings,
    files: protocol.BlobStore,
    retry_policy: concurrency.RetryPolicy,
) -> Reference | None:
    """The reference of the settings' model: stored with it, or beside it; None without one."""
    stored, path = model.stored_blob(settings), beside(model.local_path(settings))
    where = str(path) if stored is None else stored_name(stored)
    try:
        data = None
        if stored is not None:
            data = await retry_policy.call(lambda: files.read(where, MAX_BYTES))
        if data is None:
            where = str(path)
            data = await asyncio.to_thread(path.read_bytes)
        return read(data)
    except FileNotFoundError:
        return None
    except (errors.FleetError, OSError, ValueError) as error:
        log.warning(f"{where} cannot be read: {error}", action="reference_unread")
        return None
