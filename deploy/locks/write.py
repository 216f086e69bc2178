"""Writes the lock files: every package that the images install, with the hash of its file.

    pip install uv
    python deploy/locks/write.py

The versions are those of constraints.txt, the files those for Python 3.11 on linux/amd64. The files
name no index: pip takes a package from wherever it is set up to, and refuses one with another hash.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]

PYTHON = "3.11"
PLATFORM = "x86_64-manylinux_2_28"

#: Extras of pyproject.toml that both images have.
LIGHT_EXTRAS = ("azure-identity", "broker")

#: PyTorch's builds for CPUs and for CUDA 12.8 are on its own index alone, whose links end in these
#: (#sha256=...). What they need is what PyPI's build of the same version needs, less CUDA 13.
TORCH_FILES = {
    "2.13.0+cpu": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
    "2.11.0+cu128": "c9a7ca4c74fae10a58e6175b4b2cea953f9322bb6562bbf339ad6a05f52190ad",
}
TORCH_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")
CUDA_PARTS = (
    "cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx"
)

#: Of the extra `upscalers`, less torchvision: spandrel is imported without it
#: (`worker.engine.passes.upscaling`).
UPSCALERS = ("spandrel", "einops")

#: What builds the project's wheel, and what writes the SBOM; neither is in an image.
BUILD = ("hatchling",)
SBOM = ("cyclonedx-bom==7.5.0",)

HEAD = "# Written by deploy/locks/write.py.\n"


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    light = [
        *project["dependencies"],
        *(each for name in LIGHT_EXTRAS for each in extras[name]),
    ]
    newest = pins("constraints.txt")
    cuda = pins("constraints-cu128.txt")
    others = {name: pin for name, pin in newest.items() if name != "torch"}

    torch_13 = resolve(["torch"], newest)
    torch_cpu = resolve([*TORCH_NEEDS, "setuptools"], others) | torch_file("2.13.0+cpu")
    toolkit = cuda.pop("cuda-toolkit").replace("==", f"[{CUDA_PARTS}]==")
    torch_12 = resolve(
        [*TORCH_NEEDS, "setuptools<82", toolkit, *(cuda.keys() - {"torch"})],
        others | {name: pin for name, pin in cuda.items() if name != "torch"},
    ) | torch_file("2.11.0+cu128")
    with_torch = torch_13.keys() | torch_cpu.keys()
    worker = {
        name: line
        for name, line in resolve(
            [*light, *extras["worker"], *extras["detectors"]], newest
        ).items()
        if name not in with_torch
    }
    for name, lines in (
        ("light", resolve(light, newest)),
        ("worker", worker),
        ("upscalers", resolve(UPSCALERS, newest, "--no-deps")),
        ("torch-none", torch_cpu),
        ("torch-12.8", torch_12),
        ("torch-13", torch_13),
        ("build", resolve(BUILD, newest)),
        ("sbom", resolve(SBOM, newest)),
    ):
        text = HEAD + "".join(f"{lines[each]}\n" for each in sorted(lines))
        (FOLDER / f"{name}.txt").write_text(text)


def pins(name: str) -> dict[str, str]:
    """The pinned requirements of a constraints file, by package."""
    lines = (ROOT / name).read_text().splitlines()
    return {
        line.partition("==")[0]: line for line in lines if re.match(r"[A-Za-z]", line)
    }


def torch_file(version: str) -> dict[str, str]:
    return {"torch": f"torch=={version} --hash=sha256:{TORCH_FILES[version]}"}


def resolve(
    requirements: Iterable[str], constraints: dict[str, str], *options: str
) -> dict[str, str]:
    """The lines of a lock file, by package."""
    with tempfile.TemporaryDirectory() as folder:
        asked, constrained, lock = (
            Path(folder, name)
            for name in ("asked.in", "constraints.txt", "pylock.toml")
        )
        asked.write_text("\n".join(requirements))
        constrained.write_text("\n".join(constraints.values()))
        subprocess.run(
            [
                *(
                    "uv",
                    "pip",
                    "compile",
                    "--quiet",
                    "--no-sources",
                    "--format",
                    "pylock.toml",
                ),
                *("--python-version", PYTHON, "--python-platform", PLATFORM),
                *("--constraints", constrained, "--output-file", lock, asked),
                *options,
            ],
            check=True,
            cwd=folder,  # away from the project's own settings
            stdout=subprocess.DEVNULL,
        )
        packages = tomllib.loads(lock.read_text())["packages"]
    return {each["name"]: _line(each) for each in packages}


def _line(package: dict[str, Any]) -> str:
    # With --python-platform these are the wheels that fit; a source is taken where there is none.
    files = package.get("wheels") or [package["sdist"]]
    hashes = sorted({each["hashes"]["sha256"] for each in files})
    return " ".join(
        [
            f"{package['name']}=={package['version']}",
            *(f"--hash=sha256:{each}" for each in hashes),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
