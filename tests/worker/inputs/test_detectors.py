"""What a YOLO in an ONNX file finds, and the masks that ADetailer makes of it."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from imagefleet import errors
from imagefleet.files.safetensors import identify
from imagefleet.job.passes.adetailer import Detail
from imagefleet.validation import JSONDict
from tiny_detectors import write_detector
from worker.inputs import detectors

PICTURE = np.zeros((128, 256, 3), np.uint8)


def detail(**fields: Any) -> Detail:
    return Detail(ad_model="face", ad_dilate_erode=0, **fields)


def find(path: Path, name: str, confidence: float = 0.3) -> detectors.Boxes:
    return detectors.find(identify(path), name, PICTURE, confidence)


def test_boxes_are_the_pictures_surest_first_and_none_is_there_twice(tmp_path):
    # The network sees 64x64: the picture at a quarter, 16 rows down.
    found = [
        (16, 24, 8, 8, 0.5),
        (48, 32, 16, 16, 0.9),
        (48.5, 32, 16, 16, 0.8),  # the same again
        (16, 40, 8, 8, 0.2),
    ]
    path = write_detector(tmp_path / "face.onnx", found)
    boxes = find(path, "face")
    assert boxes.round(4).tolist() == [
        [160, 32, 224, 96, 0.9, 0],
        [48, 16, 80, 48, 0.5, 0],
    ]
    assert len(find(path, "face", 0.1)) == 3


@pytest.mark.parametrize(
    ("found", "is_clean", "expected"),
    [
        # Of two classes: ultralytics' suppression of overlaps moves their boxes apart.
        (
            [(48, 32, 16, 16, 0.9, 0.1), (48.5, 32, 16, 16, 0.2, 0.8)],
            False,
            [[160, 32, 224, 96, 0.9, 0], [162, 32, 226, 96, 0.8, 1]],
        ),
        # Of YOLO 10 and later: what it gives twice is found twice, as in ultralytics.
        (
            [(40, 24, 56, 40, 0.9, 0), (40, 24, 56, 40, 0.8, 0), *[[0] * 6] * 5],
            True,
            [[160, 32, 224, 96, 0.9], [160, 32, 224, 96, 0.8]],
        ),
    ],
)
def test_boxes_of_two_classes_or_of_a_network_that_cleans_them_all_stay(
    found: list[Any], is_clean: bool, expected: list[list[float]], tmp_path
):
    path = write_detector(tmp_path / "face.onnx", found, is_clean=is_clean)
    columns = len(expected[0])
    assert find(path, "face")[:, :columns].round(4).tolist() == expected


def test_a_network_of_outlines_is_refused_and_not_read_as_one_of_classes(tmp_path):
    """ADetailer's `person_yolov8n-seg`: behind a box's classes are numbers of its outline."""
    path = write_detector(tmp_path / "person.onnx", [(16, 24, 8, 8, 0.5)])
    model = onnx.load(path)
    model.graph.output.append(model.graph.output[0])
    model.graph.output[1].name = "protos"
    node = onnx.helper.make_node("Identity", ["output0"], ["protos"])
    model.graph.node.append(node)
    onnx.save(model, path)
    with pytest.raises(errors.JobError, match="finds outlines"):
        find(path, "person")


def test_without_onnxruntime_the_job_fails_and_not_the_worker(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    (tmp_path / "a.onnx").touch()
    with pytest.raises(errors.JobError, match="this worker has not"):
        find(tmp_path / "a.onnx", "a")


def test_a_file_that_is_no_yolo_is_the_jobs_error(tmp_path):
    (tmp_path / "x.onnx").write_bytes(b"\x08nothing")
    with pytest.raises(errors.JobError, match="'x' is no ONNX file"):
        find(tmp_path / "x.onnx", "x")
    path = write_detector(tmp_path / "y.onnx", [(1, 1, 1, 1)])
    with pytest.raises(errors.JobError, match="'y' is no YOLO"):
        find(path, "y")


def test_a_file_that_was_evicted_since_it_was_fetched_fails_no_job(tmp_path):
    path = write_detector(tmp_path / "x.onnx", [(16, 24, 8, 8, 0.5)])
    fetched = identify(path)
    path.unlink()
    with pytest.raises(errors.UnsettledFileError):
        detectors.find(fetched, "x", PICTURE, 0.3)


BOXES = np.array([[10, 10, 30, 30, 0.9], [40, 8, 44, 12, 0.8], [60, 0, 120, 60, 0.7]])


def test_a_mask_is_a_box_with_both_its_borders():
    masks = detectors.masks(detail(), BOXES, (128, 64))
    assert [int((mask > 0).sum()) for mask in masks] == [21 * 21, 5 * 5, 61 * 61]
    assert masks[0][10, 10] == masks[0][30, 30] == 255
    assert masks[0][9, 10] == masks[0][31, 30] == 0


@pytest.mark.parametrize(
    ("fields", "areas"),
    [
        ({"ad_mask_k": 2}, [61 * 61, 21 * 21]),
        (
            {"ad_mask_k": 2, "ad_mask_filter_method": "Confidence"},
            [21 * 21, 5 * 5],
        ),
        ({"ad_mask_min_ratio": 0.01}, [21 * 21, 61 * 61]),
        ({"ad_mask_max_ratio": 0.01}, [5 * 5]),
    ],
)
def test_parts_are_chosen_by_their_area_or_confidence(
    fields: JSONDict, areas: list[int]
):
    masks = detectors.masks(detail(**fields), BOXES, (128, 64))
    assert [int((mask > 0).sum()) for mask in masks] == areas


@pytest.mark.parametrize(
    ("side", "box"),
    [(4, (9, 9, 32, 32)), (3, (9, 9, 31, 31)), (-4, (12, 12, 29, 29))],
)
def test_a_mask_grows_and_shrinks_as_opencvs(side: int, box: tuple[int, ...]):
    """`cv2.dilate` with a square of 4 reaches two pixels back and one on, from its anchor."""
    unit = Detail(ad_model="face", ad_dilate_erode=side)
    (mask,) = detectors.masks(unit, BOXES[:1], (128, 64))
    rows, columns = np.nonzero(mask)
    found = columns.min(), rows.min(), columns.max(), rows.max()
    assert tuple(map(int, found)) == box


def test_an_offset_moves_a_mask_up_and_to_the_right():
    (mask,) = detectors.masks(
        detail(ad_x_offset=3, ad_y_offset=2), BOXES[:1], (128, 64)
    )
    rows, columns = np.nonzero(mask)
    assert (int(rows.min()), int(columns.min())) == (8, 13)
