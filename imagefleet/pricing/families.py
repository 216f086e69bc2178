"""The model families: what an image of each takes, and what GPU it needs (`families.toml`)."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from imagefleet import validation
from imagefleet.errors import SetupError

if TYPE_CHECKING:
    from imagefleet.job.message import Job
    from imagefleet.job.passes.fields import Pass
    from imagefleet.job.sizes import Size

_SIDE = 512

#: What encoding an image takes of what decoding one does: 0.44 at 512x512, 0.47 at 1024x1024. And
#: what a ControlNet takes of its UNet: 0.35 of SD1.5's, 0.45 of SDXL's. Counted by torch
#: (`torch.utils.flop_counter`) for the architectures.
_ENCODING = 0.45
_CONTROL = 0.4

#: What ESRGAN's usual network (23 blocks of 64 channels) takes for each pixel that it enlarges to
#: 16, in 10^12 operations: counted likewise. Transformers take several times as much.
_ENLARGING = 3.59e-5

#: A GPU class's name ends with its memory.
_MEMORY = re.compile(r" (\d+)GB$")

#: How the names of GPU classes before Ampere begin.
_WITHOUT_BFLOAT16 = ("GTX ", "RTX 20")


@dataclass(frozen=True, slots=True)
class Family:
    """One family; *width*, *height* and *steps* are of an image whose job says nothing else."""

    slug: str
    title: str
    name: str
    width: int
    height: int
    steps: int
    unet_tflop: tuple[float, ...]
    vae_tflop: tuple[float, ...]
    text_tflop: float
    least_gigabytes: int
    #: Memory of the smallest GPU that holds the weights whole; smaller ones hold most in int8.
    whole_gigabytes: int = field(default=0, kw_only=True)
    #: True if it is not drawn in float16.
    needs_bfloat16: bool = field(default=False, kw_only=True)
    #: Operations/s of a card, against those that it does in SD1.5's images.
    rate: float
    is_measured: bool
    rate_source: str
    #: Rows of a step of a job that says nothing of guidance.
    rows: int = 2
    #: True if the family enlarges the image that a job begins with, in all of the job's steps.
    enlarges: bool = False
    #: Times that each side of the image is enlarged; None: the image gets the family's own size.
    scale: int | None = None

    def size_of(self, job: Job, before: Size | None = None) -> Size:
        """Width and height of a job's first pass; *before* is the size of the stage before it."""
        width, height = self.scaled(before) or (self.width, self.height)
        given = job.size_to_begin_with
        return given[0] or width, given[1] or height

    def scaled(self, size: Size | None) -> Size | None:
        """The size that an image gets; None if the family has its own for all images."""
        if self.scale is None or size is None:
            return None
        return self.scale * size[0], self.scale * size[1]

    def image_tflop(
        self,
        width: int | None = None,
        height: int | None = None,
        steps: int | None = None,
        rows: int | None = None,
    ) -> float:
        """The operations of one image of so many rows a step (1: no guidance), in 10^12."""
        rows = rows or self.rows
        call, decoding = self._per_call(width or self.width, height or self.height)
        return rows * ((steps or self.steps) * call + self.text_tflop) + decoding

    def is_held_in_int8(self, gpu: str) -> bool:
        """True if a GPU class is too small for the weights as they are, by the class's name."""
        return _gigabytes(gpu) < self.whole_gigabytes

    def passes_tflop(self, passes: Iterable[Pass]) -> float:
        """The operations of one image of several passes, or one that begins with another."""
        total = 0.0
        for job_pass in passes:
            call, decoding = self._per_call(job_pass.width, job_pass.height)
            rows = (
                job_pass.rows
                * job_pass.calls
                * call
                * (1 + _CONTROL * job_pass.controls)
            )
            images = job_pass.decodes + _ENCODING * job_pass.encodes
            total += rows + images * decoding + job_pass.enlarged * _ENLARGING
            if job_pass.is_drawn:
                total += job_pass.rows * self.text_tflop
        return total

    def taken_tflop(
        self, tflop: float, size: Size | None = None, *, has_other_loras: bool = False
    ) -> float:
        """*tflop* of an image, and what it takes beside them, in TFLOP that take as long.

        *size*: of its first pass, by default the family's own. *has_other_loras*: the LoRAs of its
        job are not those of the job before.
        """
        width, height = size or (self.width, self.height)
        _, decoding = self._per_call(width, height)
        taken: float = tflop + _TABLES["decoding_beside"] * decoding
        if has_other_loras:
            most, decrease = _TABLES["lora_beside"]
            usual = self.image_tflop(width, height)
            taken += most * usual - decrease * min(tflop, usual)
        return taken

    def _per_call(self, width: int, height: int) -> tuple[float, float]:
        """TFLOP of one row of the UNet, and of decoding, by the pixels in units of 512x512."""
        pixels = width * height / _SIDE**2
        call, decoding = (
            linear * pixels + quadratic * pixels**2 + sum(constant)
            for linear, quadratic, *constant in (self.unet_tflop, self.vae_tflop)
        )
        return call, decoding

    def images_per_second(
        self, of_sd1: float, steps: int | None = None, rows: int | None = None
    ) -> float:
        """The speed of a card that draws so many of SD1.5's images per second."""
        tflop = self.taken_tflop(self.image_tflop(steps=steps, rows=rows))
        return of_sd1 * self.rate * SD1.taken_tflop(SD1.image_tflop()) / tflop


_TABLES = tomllib.loads(
    Path(__file__).with_name("families.toml").read_text(encoding="utf-8")
)
_FAMILY = TypeAdapter(Family)
FAMILIES = {
    slug: _FAMILY.validate_python({"slug": slug, **table})
    for slug, table in _TABLES.items()
    if isinstance(table, dict)
}
SD1 = FAMILIES["sd1"]


def find(slug: str) -> Family:
    """Raises SetupError for an unknown family."""
    return validation.choose("model family", slug, FAMILIES)


def of_title(title: str) -> Family:
    """The family that a checkpoint's header tells (`worker.files.check.family`)."""
    return next(each for each in FAMILIES.values() if each.title == title)


def _gigabytes(gpu: str) -> float:
    """The memory of a GPU class, by its name; infinite where that does not tell it."""
    memory = _MEMORY.search(gpu)
    return int(memory[1]) if memory else math.inf


def refuse_gpu(gpu: str, family: Family) -> None:
    """Raises SetupError for a GPU class too small or too old for a family, by the class's name."""
    if family.needs_bfloat16 and gpu.startswith(_WITHOUT_BFLOAT16):
        raise SetupError(
            f"the {gpu} does not compute in bfloat16, which {family.name} needs: choose one of the"
            " RTX 30 series or newer"
        )
    if _gigabytes(gpu) < family.least_gigabytes:
        raise SetupError(
            f"the {gpu} has too little memory for {family.name}, which takes a GPU of"
            f" {family.least_gigabytes} GB at least: choose another class"
        )
