"""`imagefleet files add detector`: ONNX files, of which no header tells anything."""

import json

from in_process import Imagefleet, assert_refused
from tiny_detectors import write_detector


def test_a_detector_is_stored_listed_and_removed_by_its_name(
    in_process: Imagefleet, tmp_path
):
    write_detector(tmp_path / "face_yolov8n.onnx", [(1, 1, 1, 1, 1)])
    done = in_process("files", "add", "detector", "face_yolov8n.onnx", "--json")
    (row,) = json.loads(done.stdout)["files"]
    assert (row["blob"], row["content"]) == (
        "detectors/face_yolov8n.onnx",
        "ONNX network",
    )
    assert "face_yolov8n" in in_process("files", "list", "detector").stdout
    job = {"ad_model": "face_yolov8n.pt"}, {"ad_model": "hand"}
    scripts = {"ADetailer": {"args": list(job)}}
    line = json.dumps({"prompt": "a", "alwayson_scripts": scripts})
    (tmp_path / "jobs.jsonl").write_text(line)
    told = json.loads(in_process("load", "jobs.jsonl", "--check", "--json").stdout)
    assert [each["name"] for each in told["missing"]] == ["hand"]
    gone = in_process("files", "remove", "detector", "face_yolov8n", "--yes")
    assert gone.returncode == 0, gone.stderr


def test_a_folder_of_judges_gives_its_onnx_files_too(in_process: Imagefleet, tmp_path):
    (tmp_path / "own").mkdir()
    write_detector(tmp_path / "own" / "taste.onnx", [(1, 1, 1, 1, 1)])
    assert in_process("files", "add", "judge", "own").stdout == "taste\n"


def test_what_is_no_onnx_file_is_refused_with_the_way_to_one(
    in_process: Imagefleet, tmp_path
):
    (tmp_path / "face.onnx").write_bytes(b"PK\x03\x04")
    said = "is no ONNX file: `yolo export format=onnx"
    assert_refused(in_process("files", "add", "detector", "face.onnx"), said)
