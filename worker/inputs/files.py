"""The files of upscalers and ControlNets, which jobs name, and of their prompts' text states."""

from __future__ import annotations

from worker.files import manifest
from worker.files.library import FileKind

#: ESRGAN's have 67 MB, the largest transformers some 400.
UPSCALER = FileKind("upscaler", manifest.UPSCALERS, 2**29)

#: SDXL's have 2.5 GB in half precision. They are checked in memory, so they are fetched singly.
CONTROLNET = FileKind("ControlNet", manifest.CONTROLNETS, 3 * 2**30, fetched_at_once=1)

#: T5-XXL's have 631 kB.
TEXT_STATES = FileKind("text states", manifest.TEXT_STATES, 2**22)

#: Bytes of fetched states on disk: those of some 1,700 prompts. A job's stages may be drawn on the
#: same machine, and all jobs may have one negative prompt; besides, each is mostly used once.
TEXT_STATES_BYTES = 2**30
