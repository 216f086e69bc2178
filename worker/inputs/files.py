"""The files of upscalers and ControlNets, which jobs name."""

from __future__ import annotations

from worker.files import manifest
from worker.files.library import FileKind

#: ESRGAN's have 67 MB, the largest transformers some 400.
UPSCALER = FileKind("upscaler", manifest.UPSCALERS, 2**29)

#: SDXL's have 2.5 GB in half precision. They are checked in memory, so they are fetched singly.
CONTROLNET = FileKind("ControlNet", manifest.CONTROLNETS, 3 * 2**30, fetched_at_once=1)
