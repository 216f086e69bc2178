"""The limits of a job's fields that its passes share."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

#: The shortest and the longest side of an image, in pixels.
MIN_SIDE = 64
MAX_SIDE = 2048

#: The largest `cfg_scale`, also times the prompt's own weight: beyond, images come out broken.
MAX_GUIDANCE = 30

PromptText = Annotated[str, StringConstraints(max_length=65_536)]
