"""The check that an image has the torch it was built for, and the versions it is built with."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

#: As torch._C._cuda_getArchFlags() lists them for 2.11.0+cu128.
ALL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.fixture
def script(repository: Path) -> Path:
    return repository / "deploy" / "check_torch.py"


@pytest.fixture
def check_torch(script: Path, load_file: Callable[[Path], Any]) -> Any:
    return load_file(script)


@pytest.mark.parametrize(
    ("wanted", "cuda", "architectures"),
    [
        ("12.8", "12.8", ALL),
        ("13", "13.0", [*ALL, "compute_120"]),
        ("13", "13.2", ALL),
        ("none", None, []),
    ],
)
def test_a_torch_as_asked_for_is_accepted(
    wanted: str, cuda: str | None, architectures: list[str], check_torch
):
    assert check_torch.problem(wanted, cuda, architectures) is None


@pytest.mark.parametrize(
    ("wanted", "cuda", "architectures", "problem"),
    [
        ("12.8", "13.0", ALL, "it is for CUDA 13.0, not 12.8"),
        ("12.8", None, [], "it is for CPUs, not for CUDA 12.8"),
        ("12.8", "12.8", ALL[:-1], "it has no code for sm_120"),
        ("12.8", "12.8", [], f"it has no code for {', '.join(ALL)}"),
        ("13", "12.8", ALL, "it is for CUDA 12.8, not 13"),
        ("1", "12.8", ALL, "it is for CUDA 12.8, not 1"),
        ("none", "13.0", ALL, "it is for CUDA 13.0, not for CPUs"),
    ],
)
def test_a_wrong_torch_is_named(
    wanted: str,
    cuda: str | None,
    architectures: list[str],
    problem: str,
    check_torch,
):
    assert check_torch.problem(wanted, cuda, architectures) == problem


@pytest.mark.slow
def test_the_torch_of_this_machine_is_read(script: Path):
    wanted = torch.version.cuda or "none"
    other = "none" if torch.version.cuda else "12.8"
    right, wrong = (
        subprocess.run(
            [sys.executable, script, each], capture_output=True, text=True, check=False
        )
        for each in (wanted, other)
    )
    assert (right.returncode, right.stderr) == (0, "")
    assert wrong.returncode == 1
    assert f"torch {torch.__version__} is the wrong one" in wrong.stderr


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line[:1].isalnum()]
    return {
        name: version for name, _, version in (line.partition("==") for line in lines)
    }


def test_the_constraints_for_cuda_12_8_replace_torch_alone(repository: Path):
    ours, others = (
        pins(repository / name) for name in ("constraints-cu128.txt", "constraints.txt")
    )
    assert ours.keys() & others.keys() == {"torch"}
    assert ours["torch"].endswith("+cu128")


def test_the_workers_libraries_accept_both_versions_of_torch(repository: Path):
    with (repository / "pyproject.toml").open("rb") as file:
        extra = tomllib.load(file)["project"]["optional-dependencies"]["worker"]
    versions = [
        pins(repository / name)["torch"]
        for name in ("constraints-cu128.txt", "constraints.txt")
    ]
    asked = [
        (name, requirement)
        for name in ("imagefleet", *(Requirement(each).name for each in extra))
        for requirement in map(Requirement, metadata.requires(name) or [])
        if requirement.name == "torch"
    ]
    assert {"imagefleet", "accelerate", "peft", "diffusers"} <= {
        name for name, _ in asked
    }
    refused = [
        f"{name}: {requirement}, not {version}"
        for name, requirement in asked
        for version in versions
        if version not in requirement.specifier
    ]
    assert refused == []
