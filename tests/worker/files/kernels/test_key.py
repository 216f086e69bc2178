"""What compiled kernels are good for: what changes the key, and what does not."""

import importlib.util
import json
import struct
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path

import pynvml
import pytest

from kernel_files import KEY
from worker.files import addresses
from worker.files.kernels import archive, cache

ROOT = Path(__file__).parents[4]
DEMO = ROOT / "demo_model"


@pytest.fixture
def driver(monkeypatch) -> None:
    """NVML as with an H200."""
    for name, answer in {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByIndex": "the card",
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlSystemGetDriverVersion": "580.95.05",
    }.items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def shapes_as_file(path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """A safetensors file of float16 zeros, of which only the header is read."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2
        for side in shape:
            size *= side
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    content = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(content)) + content)
    return path


def test_the_key_is_one_plain_name_that_any_storage_takes():
    assert KEY.name == (
        "h200-sm90-driver580-cuda12.8-torch2.11.0-triton3.6.0-diffusers0.42.1-py3.11-x86_64"
        "-engine0123abcd-unet4567cdef"
    )
    odd = replace(KEY, gpu="NVIDIA GeForce RTX 4090 Laptop GPU (x/..\\ü)")
    assert odd.name.startswith("geforce-rtx-4090-laptop-gpu-x-..-sm90")
    for each in (KEY, odd):
        assert addresses.STEM.fullmatch(each.name)
        assert len(f"{each.name}{archive.SUFFIX}.part.json") < 200


@pytest.mark.parametrize("field", [each.name for each in fields(archive.Key)])
def test_whatever_differs_gives_another_name(field: str):
    other = replace(KEY, **{field: "9.9"})
    assert other.name != KEY.name
    assert KEY.differences(other) == [f"{field} 9.9"]


def test_the_versions_are_those_that_torch_says_without_importing_it():
    found = cache._torch_versions()
    assert found is not None
    assert found[0] == metadata.version("torch").partition("+")[0]
    if "+" in metadata.version("torch"):
        label = metadata.version("torch").partition("+")[2]
        assert (label == "cpu") == (found[1] is None)


@pytest.mark.usefixtures("driver")
def test_the_key_of_a_machine_with_a_gpu(monkeypatch):
    monkeypatch.setattr(cache, "_torch_versions", lambda: ("2.11.0", "12.8"))
    found = cache.find_key(DEMO, "auto")
    assert found is not None
    assert (found.gpu, found.capability, found.driver) == ("NVIDIA H200", "9.0", "580")
    assert found.diffusers == metadata.version("diffusers")
    assert found == cache.find_key(DEMO, "cuda:0")


@pytest.mark.usefixtures("driver")
def test_a_cpu_has_no_key():
    assert cache.find_key(DEMO, "cpu") is None


def test_a_machine_without_a_driver_has_no_key(monkeypatch):
    def fails() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    assert cache.find_key(DEMO, "auto") is None


def test_without_torch_there_is_no_key(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert cache._torch_versions() is None


def test_any_change_of_the_engines_source_is_another_engine(tmp_path):
    (tmp_path / "slots").mkdir()
    (tmp_path / "slots" / "step.py").write_text("x = 1")
    before = cache.hash_sources(tmp_path)
    (tmp_path / "slots" / "notes.txt").write_text("no source")
    assert cache.hash_sources(tmp_path) == before
    (tmp_path / "slots" / "step.py").write_text("x = 2")
    assert cache.hash_sources(tmp_path) != before


def test_fine_tunes_of_a_model_share_kernels_in_either_format(tmp_path):
    shapes = {"conv_in.weight": (320, 4, 3, 3), "mid.weight": (1280, 1280)}
    single = {f"model.diffusion_model.{name}": shape for name, shape in shapes.items()}
    one = shapes_as_file(
        tmp_path / "one.safetensors", {**single, "first_stage_model.x": (3,)}
    )
    renamed = {
        name.replace("conv_in", "input_blocks.0.0"): each
        for name, each in single.items()
    }
    two = shapes_as_file(tmp_path / "two.safetensors", renamed)
    for name in ("diffusion_pytorch_model", "diffusion_pytorch_model.fp16"):
        shapes_as_file(tmp_path / "folder" / "unet" / f"{name}.safetensors", shapes)

    hashes = {cache.hash_unet(each) for each in (one, two, tmp_path / "folder")}
    assert len(hashes) == 1

    wider = {**single, "model.diffusion_model.mid.weight": (1536, 1536)}
    another = shapes_as_file(tmp_path / "another.safetensors", wider)
    assert cache.hash_unet(another) not in hashes
