"""Detectors in ONNX files: what a YOLO finds in a picture, as masks.

Pictures are brought to the network's size, its boxes cleaned of overlaps, and masks made of them as
ultralytics and ADetailer do it (`ultralytics/utils/ops.py`, `adetailer/mask.py`).
"""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageDraw

from imagefleet.errors import JobError
from imagefleet.files.safetensors import Identity, whole
from imagefleet.job.passes.adetailer import Detail
from imagefleet.job.sizes import Size
from worker.engine.contract import Pixels
from worker.inputs.img2img import Mask

#: [boxes, 6]: left, upper, right, lower in pixels, confidence and class; the surest first.
Boxes = NDArray[np.float64]

#: The grey of what a picture lacks to the network's size.
_GREY = 114

#: Boxes of a class that share more than this of their area are of one thing.
_OVERLAP = 0.7

#: Pixels by which boxes of two classes are moved apart.
_APART = 7680

#: Of a network whose input may have any size.
_USUAL_SIDE = 640

#: Rows of a network that does not: place, size and the confidence of each class.
_LEAST = 5

#: Columns of a network that cleans its boxes itself: corners, confidence, class.
_CLEANED = 6


@functools.lru_cache(8)
def session(file: Identity, what: str) -> Any:
    """The network of a file; raises JobError if it is none, or without onnxruntime.

    Raises UnsettledFileError for a file that was replaced or evicted since.
    """
    try:
        import onnxruntime
    except ImportError:
        raise JobError(
            f"{what} needs onnxruntime, which this worker has not: pip install '.[detectors]'"
        ) from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    with whole(file):
        try:
            return onnxruntime.InferenceSession(
                file[0], options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # noqa: BLE001 - onnxruntime's own errors share no class
            raise JobError(f"{what} is no ONNX file: {str(error)[:200]}") from None


def find(file: Identity, name: str, pixels: Pixels, confidence: float) -> Boxes:
    """The boxes of what a detector is at least so sure of; raises JobError if it is no YOLO."""
    network = session(file, f"the detector {name!r}")
    (given,) = network.get_inputs()[:1]
    sides = [side if isinstance(side, int) else _USUAL_SIDE for side in given.shape[2:]]
    if len(sides) != len("hw"):
        raise JobError(f"the detector {name!r} takes no pictures")
    if len(network.get_outputs()) > 1:
        raise JobError(
            f"the detector {name!r} finds outlines: only those of boxes are supported"
        )
    height, width = sides
    # The picture is brought to the middle of the network's input.
    scale = min(width / pixels.shape[1], height / pixels.shape[0])
    wide = round(pixels.shape[1] * scale)
    high = round(pixels.shape[0] * scale)
    small = Image.fromarray(pixels).resize((wide, high), Image.Resampling.BILINEAR)
    left = (width - wide) // 2
    upper = (height - high) // 2
    whole = Image.new("RGB", (width, height), (_GREY, _GREY, _GREY))
    whole.paste(small, (left, upper))
    image = np.asarray(whole, np.float32).transpose(2, 0, 1)[None] / 255
    try:
        output = np.asarray(network.run(None, {given.name: image})[0], np.float64)
    except Exception as error:  # noqa: BLE001 - onnxruntime's own errors share no class
        raise JobError(
            f"the detector {name!r} does not take the picture: {str(error)[:200]}"
        ) from None
    boxes = _boxes(output, name)
    boxes = boxes[boxes[:, 4] > confidence]
    boxes = _without_overlaps(boxes[np.argsort(-boxes[:, 4], kind="stable")])
    places = (boxes[:, :4] - [left, upper] * 2) / scale
    boxes[:, :4] = places.clip(0, pixels.shape[1::-1] * 2)
    return boxes


def _boxes(output: NDArray[np.float64], name: str) -> Boxes:
    """The boxes of an output, [1, 4 + classes, boxes] or, cleaned already, [1, boxes, 6]."""
    if output.ndim != len("bcn") or output.shape[0] != 1 or output.shape[1] < _LEAST:
        raise JobError(f"the detector {name!r} is no YOLO of ultralytics'")
    if output.shape[2] == _CLEANED and output.shape[1] > _CLEANED:
        # A class for each, so that all stay.
        return np.column_stack([output[0, :, :5], np.arange(output.shape[1])])
    middles, sides, scores = np.split(output[0], [2, 4])
    near = middles - sides / 2
    found = [near, near + sides, scores.max(axis=0), scores.argmax(axis=0)]
    return np.vstack(found).T


def _without_overlaps(boxes: Boxes) -> Boxes:
    """The boxes without those that mostly cover a surer one of their class."""
    kept: list[int] = []
    found = boxes
    boxes = boxes[:, :4] + _APART * boxes[:, 5:]
    areas = _areas(boxes)
    for at, box in enumerate(boxes):
        others = boxes[kept]
        sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
        shared = sides.clip(0).prod(axis=1)
        if not (shared > _OVERLAP * (areas[at] + areas[kept] - shared)).any():
            kept.append(at)
    return found[kept]


def _areas(boxes: Boxes) -> Boxes:
    areas: Boxes = (boxes[:, 2:4] - boxes[:, :2]).prod(axis=1)
    return areas


def masks(detail: Detail, boxes: Boxes, size: Size) -> list[Mask]:
    """The mask of each part that is drawn again, of a picture of *size* (width, height)."""
    areas = _areas(boxes)
    shares = areas / (size[0] * size[1])
    is_kept = (shares >= detail.ad_mask_min_ratio) & (
        shares <= detail.ad_mask_max_ratio
    )
    places = np.flatnonzero(is_kept)
    if detail.ad_mask_k:
        values = areas if detail.ad_mask_filter_method == "Area" else boxes[:, 4]
        # Of two alike, as numpy's order reversed has them.
        places = places[np.argsort(values[places])[::-1]][: detail.ad_mask_k]
    found = (_mask(detail, boxes[at], size) for at in places)
    return [mask for mask in found if mask.any()]


def _mask(detail: Detail, box: NDArray[np.float64], size: Size) -> Mask:
    image = Image.new("L", size, 0)
    corners = [(float(box[0]), float(box[1])), (float(box[2]), float(box[3]))]
    ImageDraw.Draw(image).rectangle(corners, fill=255)
    # The y of an offset grows upwards, and what leaves the picture comes in at the other side.
    mask = np.asarray(ImageChops.offset(image, detail.ad_x_offset, -detail.ad_y_offset))
    if detail.ad_dilate_erode > 0:
        return dilated(mask, detail.ad_dilate_erode)
    if detail.ad_dilate_erode < 0:
        return 255 - dilated(255 - mask, -detail.ad_dilate_erode)
    return mask


def dilated(mask: Mask, side: int) -> Mask:
    """The largest of each pixel's square of *side*, as OpenCV's `dilate` with its usual anchor."""
    before = side // 2
    for axis in (0, 1):
        widths = [(0, 0), (0, 0)]
        widths[axis] = (before, side - 1 - before)
        wide = np.pad(mask, widths)
        length = mask.shape[axis]
        parts = [wide.take(range(at, at + length), axis) for at in range(side)]
        mask = np.maximum.reduce(parts)
    return mask
