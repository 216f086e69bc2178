"""The lock files: that they are fresh, complete, and hold a hash of each package."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from imagefleet.validation import JSONDict

#: As the images have it.
ENVIRONMENT = {
    "python_version": "3.11",
    "python_full_version": "3.11.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}

LOCKS = (
    "light",
    "worker",
    "upscalers",
    "torch-none",
    "torch-12.8",
    "torch-13",
    "build",
    "sbom",
)

#: What the constraints of CUDA 12.8 say otherwise.
OTHER_VERSIONS = {"setuptools", "torch", "triton", "cuda-bindings"}


def lines_of(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture
def locks(repository: Path) -> dict[str, dict[str, str]]:
    """The versions in each lock file, by package."""
    folder = repository / "deploy" / "locks"
    return {
        name: dict(
            line.split(" ")[0].split("==") for line in lines_of(folder / f"{name}.txt")
        )
        for name in LOCKS
    }


@pytest.fixture
def project(repository: Path) -> JSONDict:
    parsed: JSONDict = tomllib.loads((repository / "pyproject.toml").read_text())[
        "project"
    ]
    return parsed


def needed(requirements: list[str]) -> dict[str, list[Requirement]]:
    """What is asked for of each package, directly or not, by the metadata installed here."""
    found: dict[str, list[Requirement]] = {}
    left = [(Requirement(each), "") for each in requirements]
    seen: set[str] = set()
    while left:
        requirement, extra = left.pop()
        if requirement.marker and not requirement.marker.evaluate(
            {**ENVIRONMENT, "extra": extra}
        ):
            continue
        name = canonicalize_name(requirement.name)
        found.setdefault(name, []).append(requirement)
        for wanted in {"", *requirement.extras}:
            if f"{name}[{wanted}]" not in seen:
                seen.add(f"{name}[{wanted}]")
                requires = metadata.distribution(name).requires or []
                left += [(Requirement(each), wanted) for each in requires]
    return found


def test_every_line_is_a_version_with_the_hash_of_its_file_and_no_address(
    repository: Path,
):
    folder = repository / "deploy" / "locks"
    assert {path.stem for path in folder.glob("*.txt")} == set(LOCKS)
    for name in LOCKS:
        wrong = [
            line
            for line in lines_of(folder / f"{name}.txt")
            if not re.fullmatch(
                r"[a-z0-9.-]+==[0-9][\w.+]*( --hash=sha256:[0-9a-f]{64})+", line
            )
        ]
        assert wrong == []


def test_the_locks_have_the_versions_of_the_constraints(
    repository: Path, locks: dict[str, dict[str, str]]
):
    pinned = {
        canonicalize_name(name): version
        for name, _, version in (
            line.partition("==") for line in lines_of(repository / "constraints.txt")
        )
    }
    for name, versions in locks.items():
        other = {
            package: (version, pinned[package])
            for package, version in versions.items()
            if package in pinned and version != pinned[package]
        }
        assert other.keys() <= OTHER_VERSIONS, (name, other)
        assert (
            name == "torch-12.8"
            or not other
            or other == {"torch": ("2.13.0+cpu", "2.13.0")}
        )
    cuda = {
        canonicalize_name(line.partition("==")[0]): line.partition("==")[2]
        for line in lines_of(repository / "constraints-cu128.txt")
        if "==" in line
    }
    assert cuda.items() <= locks["torch-12.8"].items()


@pytest.mark.parametrize(
    ("extras", "files"),
    [
        (("azure-identity", "broker"), ("light",)),
        (
            ("azure-identity", "broker", "detectors", "worker"),
            ("worker", "torch-none"),
        ),
    ],
)
def test_an_image_has_all_that_the_project_asks_for_and_nothing_else(
    extras: tuple[str, ...],
    files: tuple[str, ...],
    project: JSONDict,
    locks: dict[str, dict[str, str]],
):
    asked = [*project["dependencies"]]
    for extra in extras:
        asked += project["optional-dependencies"][extra]
    locked = {name: version for file in files for name, version in locks[file].items()}
    wanted = needed(asked)
    fix = "run deploy/locks/write.py"
    assert wanted.keys() - locked.keys() == set(), fix
    # PyTorch's builds ask for this one, which is in every virtual environment anyway.
    assert locked.keys() - wanted.keys() <= {"setuptools"}, fix
    unfit = {
        name: f"{requirement} and {locked[name]}"
        for name, requirements in wanted.items()
        for requirement in requirements
        if not requirement.specifier.contains(locked[name], prereleases=True)
    }
    assert unfit == {}, fix


def test_nothing_is_installed_into_an_image_without_its_hash(repository: Path):
    text = (repository / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(
        r"^[^#\n]*\binstall (--(?:no-deps|yes)[^&\n]*)", text, re.MULTILINE
    )
    pip = [line for line in installs if "--yes" not in line]
    assert len(pip) == 7
    own = [line for line in pip if "--require-hashes" not in line]
    assert [re.sub(" +", " ", line) for line in own] == [
        "--no-deps --no-build-isolation --prefix=/project/installed ."
    ]


def test_pip_refuses_a_file_with_another_hash(tmp_path):
    """A package that somebody replaced at the index, or on the way."""
    (tmp_path / "imagefleet-0.1.0-py3-none-any.whl").write_bytes(b"somebody else's")
    (tmp_path / "lock.txt").write_text(f"imagefleet==0.1.0 --hash=sha256:{'0' * 64}\n")
    refused = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--require-hashes",
            "--no-index",
            "--find-links",
            tmp_path,
            "--target",
            tmp_path / "installed",
            "--requirement",
            tmp_path / "lock.txt",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 1
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert not (tmp_path / "installed").exists()
