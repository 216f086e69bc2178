"""Draws the demo model's FID-CLIP curve: eight guidance scales, with intervals of 95 %.

    python benchmarks/scoring/fid_clip.py --folder curve [--captions 30000]

240,000 images of 64 x 64 by a worker, scored by the judge against as many pictures of its world.
What was interrupted goes on with the same command: all is kept in `--folder`. The figures go to
`--out`, the picture to `--picture`.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCALES = "1,2,3,4,5,7,9,12"


def run(*command: str) -> None:
    print("+", *command, flush=True)
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--captions", type=int, default=30_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="auto")
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=results / "fid-clip.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "fid-clip.svg")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    captions, reference = folder / "captions.txt", folder / "reference.npz"
    if not reference.exists():
        made = ["--captions", str(captions), "--reference", str(reference)]
        count = ["--count", str(arguments.captions)]
        run("benchmarks/scoring/reference.py", *made, *count)
    fleet = ["-m", "fleet.entry"]
    storage = ["--storage", f"local:{folder / 'storage'}"]
    swept = [f"cfg_scale={SCALES}", f"steps={arguments.steps}", "sampler_name=PLMS"]
    sets = [part for each in swept for part in ("--set", each)]
    run(*fleet, "sweep", str(captions), "--campaign", "curve", *sets, *storage)
    own = ["--model", "demo_model", "--device", arguments.device]
    run(*fleet, "worker", "--until-empty", *own, *storage)
    run(
        *(*fleet, "score", "curve", "--extractor", "demo", "--clip", "demo"),
        *("--reference", str(reference), "--device", arguments.device),
        *(
            "--state",
            str(folder / "score"),
            "--json-file",
            str(arguments.out.resolve()),
        ),
        *("--output", str(arguments.picture.resolve()), *storage),
    )


if __name__ == "__main__":
    main()
