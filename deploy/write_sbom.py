"""Writes an image's SBOM, a list of what is in it, in CycloneDX 1.6 as JSON.

cyclonedx-bom lists the Python packages with their licences; Python itself and Debian's packages are
added to its document.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

ENVIRONMENT = "/opt/imagefleet/bin/python"


def main(image: str, folder: str) -> None:
    """Writes sbom.json into *folder*."""
    document = python_packages()
    document["metadata"]["component"] = {
        "type": "container",
        "bom-ref": image,
        "name": image,
        "version": version_of("imagefleet", document),
    }
    document["components"] += [python(), *debian_packages()]
    Path(folder).mkdir(parents=True)
    Path(folder, "sbom.json").write_text(json.dumps(document, indent=1))


def python_packages() -> dict[str, Any]:
    tool = Path(sys.executable).with_name("cyclonedx-py")
    options = [
        "--spec-version",
        "1.6",
        "--output-format",
        "JSON",
        "--output-reproducible",
    ]
    # Its check of every address takes most of the time. The tests check the whole document.
    options.append("--no-validate")
    listed = subprocess.run(
        [tool, "environment", *options, ENVIRONMENT], check=True, capture_output=True
    )
    document: dict[str, Any] = json.loads(listed.stdout)
    return document


def version_of(name: str, document: dict[str, Any]) -> str:
    (version,) = (
        each["version"] for each in document["components"] if each["name"] == name
    )
    return str(version)


def python() -> dict[str, Any]:
    """The interpreter, which is Debian's or of the base image."""
    program = "import platform; print(platform.python_version())"
    version = subprocess.run(
        [ENVIRONMENT, "-c", program], check=True, capture_output=True, text=True
    ).stdout.strip()
    return {
        "type": "platform",
        "bom-ref": f"python@{version}",
        "name": "python",
        "version": version,
        "licenses": [{"license": {"id": "PSF-2.0"}}],
    }


def debian_packages() -> list[dict[str, Any]]:
    query = (
        "dpkg-query",
        "--show",
        "--showformat",
        "${Package} ${Version} ${Architecture}\\n",
    )
    lines = subprocess.run(
        query, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    packages = []
    for name, version, architecture in map(str.split, lines):
        address = f"pkg:deb/debian/{name}@{quote(version)}?arch={architecture}"
        packages.append(
            {
                "type": "library",
                "bom-ref": address,
                "name": name,
                "version": version,
                "purl": address,
            }
        )
    return packages


if __name__ == "__main__":
    main(*sys.argv[1:])
