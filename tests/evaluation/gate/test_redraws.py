"""Redraws by the demo's checkpoint in which nothing is wrong: the gate passes each."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cli import console
from evaluation.gate import draw, jobs, sides
from imagefleet.files import demo

Imagefleet = Callable[..., Any]  # the fixture of conftest.py

SETS, PICTURES = 20, 5

pytestmark = pytest.mark.slow


def test_twenty_of_twenty_redraws_in_another_order_and_other_company_pass(
    in_process: Imagefleet, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    captions = (demo.find_checkpoint() / "captions.txt").read_text().splitlines()
    numbers = random.Random(0)
    names = [f"{number}-{place}" for number in range(SETS) for place in range(PICTURES)]
    lines = [
        {"id": name, "prompt": numbers.choice(captions), "seed": seed}
        for seed, name in enumerate(names)
    ]
    file = tmp_path / "jobs.jsonl"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    asked = jobs.of_file(file, len(lines), 4)
    setup = draw.Setup(
        demo.find_checkpoint(), "cpu", demo.find_checkpoint() / "loras", None
    )
    for folder, slots in (("a", "slots=4"), ("b", "slots=3")):
        engine = sides.read(slots)
        assert isinstance(engine, sides.Engine)
        draw.draw(asked, engine, setup, tmp_path / folder, lambda: None)
        numbers.shuffle(asked)

    identical = 0
    for number in range(SETS):
        for side in "ab":
            (tmp_path / f"{side}-{number}").mkdir()
            for path in (tmp_path / side).glob(f"{number}-*.png"):
                path.rename(tmp_path / f"{side}-{number}" / path.name)
        ended = in_process("gate", f"./a-{number}", f"./b-{number}", "--json")
        found = json.loads(ended.stdout)
        assert (ended.returncode, found["pairs"]) == (console.EXIT_DONE, PICTURES), (
            found
        )
        identical += found["identical"]
    assert identical < SETS * PICTURES, "nothing was drawn otherwise"
