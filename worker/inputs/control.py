"""Images that control a drawing, resized as sd-webui-controlnet does (`detectmap_proc`).

Of its interpolation: maps of a few colours keep them, others are averaged where they shrink and
cubic where they grow, as there. Its OpenCV has another cubic, and thins the lines of pictures in
black and white once more: a picture in the job's size is not touched, there or here.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from worker.engine.contract import Pixels
from worker.inputs import pictures
from worker.inputs.pictures import Size

_FIT, _FILL = 0, 2

#: A picture of so few colours is a map of classes, whose colours must not mix.
_FEWEST, _MANY = 2, 200


def pixels(image: Image.Image, mode: int, size: Size) -> Pixels:
    """The pixels in *size*: stretched (0), cut to it (1), or with borders of their colour (2).

    Raises:
        JobError: an image far longer than wide is to be cut.
    """
    image = image.convert("RGB")
    if mode == _FIT or image.size == size:
        return np.asarray(_stretched(image, size))
    scales = size[0] / image.width, size[1] / image.height
    scale = min(scales) if mode == _FILL else max(scales)
    inner = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    pictures.refuse_too_long(image.size, inner, size)
    stretched = _stretched(image, inner)
    if mode != _FILL:
        left, upper = (max(0, (inner[axis] - size[axis]) // 2) for axis in (0, 1))
        return np.asarray(stretched.crop((left, upper, left + size[0], upper + size[1])))
    filled = Image.new("RGB", size, _border_colour(np.asarray(image)))
    left, upper = (max(0, (size[axis] - inner[axis]) // 2) for axis in (0, 1))
    filled.paste(stretched, (left, upper))
    return np.asarray(filled)


def _border_colour(image: Pixels) -> tuple[int, int, int]:
    borders = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    red, green, blue = np.median(borders, axis=0).astype(np.uint8).tolist()
    return red, green, blue


def _stretched(image: Image.Image, size: Size) -> Image.Image:
    if image.size == size:
        return image
    if _FEWEST < len(image.getcolors(_MANY) or ()) < _MANY:
        how = Image.Resampling.NEAREST
    elif size[0] * size[1] < image.width * image.height:
        how = Image.Resampling.BOX
    else:
        how = Image.Resampling.BICUBIC
    return image.resize(size, how)
