"""Measures the seconds of 1, 2, 4 and 512 images at once, for SD1.5 and SD2, on one card.

    python benchmarks/latency.py [--seconds 20] [--out benchmarks/results/latency.json]

Both families are drawn by `imagefleet bench latency`, each in a process of its own, with diffusers
eager beside it in the same one. A card of 24 GB takes some ten minutes, most of them for kernels.
`--tiny` tries it on a CPU with the demo's model, with meaningless figures.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ("sd1", "sd2")


def measured(family: str, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "fleet.entry", "bench", "latency"]
        command += ["--json-file", str(report), "--seconds", str(arguments.seconds)]
        if arguments.tiny:
            command += ["--device", "cpu", "--steps", "2", "--slots", "4"]
        else:
            command += ["--family", family]
        subprocess.run(command, check=True, cwd=ROOT)
        found: dict[str, Any] = json.loads(report.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tiny", action="store_true")
    default = ROOT / "benchmarks" / "results" / "latency.json"
    parser.add_argument("--out", type=Path, default=default)
    arguments = parser.parse_args()
    first, second = (measured(family, arguments) for family in FAMILIES)
    text = json.dumps({**first, FAMILIES[1]: second}, indent=2)
    arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
