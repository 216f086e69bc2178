"""Every program of `benchmarks/` runs, with little to do: each makes a figure of the documents."""

import asyncio
import contextlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fleet import main, serve
from gateway.settings import GatewaySettings
from imagefleet.validation import JSONDict
from klein import measure as klein

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

TINY = "--tiny --device cpu --out figures.json"

#: The programs and the arguments with which they take seconds.
PROGRAMS = {
    "likeness.py": "--jobs 2 --steps 2",
    "families/measure.py": f"{TINY} --folder models --rows sd2 --seconds 1",
    "scoring/few_steps.py": (
        "--captions 2 --device cpu --threads 1 --picture a.png --curves . --out a.json"
    ),
    "details.py": "--jobs 2 --pairs 1 --slots 2 --out figures.json",
    "gpus.py": "--tiny --counts 1 --seconds 3 --warm 1 --jobs 100",
    "library/gateway.py": "--pairs 1 --images 100 --seconds 1 --pictures 2 --out figures.json",
    "fleet_sim.py": "--warm-up",
    "klein/measure.py": f"{TINY} --folder models --seconds 1",
    "ladder/measure.py": "--tiny --dollars-per-hour 1 --seconds 0.5 --out a.json --picture a.svg",
    "library/measure.py": f"{TINY} --pairs 1 --slots 2",
    "library/strangers.py": "--seconds 8 --kinds polls --out figures.json",
    "pixel/measure.py": f"{TINY} --folder models",
    "scoring/speed.py": "--images 20 --processes 1",
    "stages/img2img.py": f"{TINY} --folder models --seconds 1 --kinds img2img",
}

#: Programs with tests of their own, by these.
ELSEWHERE = {
    "bundles/measure.py": "benchmarks/test_bundles.py",
    "engine.py": "benchmarks/test_documented_commands.py",
    "kept/judged.py": "benchmarks/test_kept.py",
    "kept/verify.py": "benchmarks/test_kept.py",
    "latency.py": "evaluation/bench/test_bench.py",  # `bench latency`, twice
    "first_minute/measure.py": "benchmarks/test_first_minute.py",
    "first_minute/row.py": "benchmarks/test_first_minute.py",  # `measure.py` starts it
    "rows/engine.py": "benchmarks/test_documented_commands.py",  # `engine.py` starts it
    "library/attacks.py": "benchmarks/test_programs.py",  # `strangers.py` starts it
    "packs.py": "benchmarks/test_packs.py",
    "overlap.py": "benchmarks/test_documented_commands.py",
    "scoring/fid_clip.py": "benchmarks/test_kept.py",
    "scoring/gate.py": "evaluation/gate/test_power.py",
    "scoring/reference.py": "benchmarks/test_programs.py",
    "store.py": "benchmarks/test_documented_commands.py",
}


class Pool(contextlib.nullcontext[None]):
    """A process of its own imports torch anew; what it is sent and returns is the same here."""

    def apply(self, *call: Any) -> Any:
        function, given, named = pickle.loads(pickle.dumps(call))
        return pickle.loads(pickle.dumps(function(*given, **named)))

    def __enter__(self) -> Any:
        return self


def start_here(
    command: Sequence[str], **_: Any
) -> contextlib.nullcontext[SimpleNamespace]:
    """The command in this process: it has ended at the second look."""
    out = StringIO()
    noted = StringIO()
    with (
        pytest.MonkeyPatch.context() as patched,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(noted),
    ):
        patched.setattr(sys, "argv", ["imagefleet", *command[3:]])
        with pytest.raises(SystemExit) as ended:
            main.main()
    for each in (out, noted):
        each.seek(0)
    looks = iter((None, 0))
    run = SimpleNamespace(pid=os.getpid(), poll=looks.__next__, stdout=out)
    run.stderr = noted
    run.returncode = ended.value.code or 0
    return contextlib.nullcontext(run)


async def serve_here(*command: str, env: dict[str, str], **_: Any) -> SimpleNamespace:
    """`imagefleet serve` in this loop: a process of its own imports torch anew."""
    names = [each.removeprefix("--") for each in command[4::2]]
    told = dict(zip(names, command[5::2], strict=True))
    told["storage"] = env["IMAGEFLEET_STORAGE"]
    settings = GatewaySettings(**told)
    task = asyncio.create_task(inspect.unwrap(serve.command)(settings))
    return SimpleNamespace(
        returncode=None,
        terminate=task.cancel,
        wait=lambda: asyncio.gather(task, return_exceptions=True),
    )


#: What of the programs makes their work little beside their arguments.
LITTLE: dict[str, JSONDict] = {
    "details.py": {"STEPS": 4},
    "gpus.py": {
        "multiprocessing": SimpleNamespace(
            get_context=lambda _: SimpleNamespace(Pool=Pool)
        )
    },
    "library/gateway.py": {
        "asyncio": SimpleNamespace(
            **{**vars(asyncio), "create_subprocess_exec": serve_here}
        ),
        "MANY": 50,
    },
    "scoring/speed.py": {
        "subprocess": SimpleNamespace(Popen=start_here, PIPE=None),
        "PICTURES": 20,
    },
    "library/measure.py": {"ROUNDS": 2},
    "stages/img2img.py": {"IMG2IMG_STEPS": 4},
}


@pytest.mark.usefixtures("few_steps", "groups_here")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs_with_little_to_do(program: str, run: Callable[..., str]):
    printed = run(program, *PROGRAMS[program].split(), **LITTLE.get(program, {}))

    assert printed
    assert "nan" not in printed.lower().split()


def test_the_demos_reference_is_made_with_the_networks_that_read_it(
    tmp_path, monkeypatch, load_file: Callable[[Path], Any]
):
    program = load_file(ROOT / "benchmarks" / "scoring" / "reference.py")
    monkeypatch.setattr(program, "PICTURES", 4)
    made = tmp_path / "reference.npz"
    lines = tmp_path / "captions.txt"
    arguments = ["--captions", str(lines), "--reference", str(made)]
    monkeypatch.setattr(sys, "argv", ["reference.py", *arguments])

    program.main()

    assert len(lines.read_text().splitlines()) == 4
    shipped = np.load(ROOT / "evaluation" / "score" / "demo" / "reference.npz")
    with np.load(made) as found, shipped:
        assert found.keys() == shipped.keys()
        assert len(found["features"]) == len(found["clip_features"]) == 4
        for name in ("extractor", "clip_extractor"):
            assert found[name] == shipped[name]


def test_no_program_is_left_out():
    programs = {
        str(path.relative_to(ROOT / "benchmarks"))
        for path in (ROOT / "benchmarks").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }

    assert programs == PROGRAMS.keys() | ELSEWHERE.keys()
    assert all((ROOT / "tests" / test).exists() for test in ELSEWHERE.values())


def test_every_figure_of_klein_comes_from_a_row_that_is_measured():
    rows = dict.fromkeys(klein.ROWS, SimpleNamespace(get=lambda _: 2.0))
    figures = klein.summarise(rows)
    assert None not in figures.values()
    assert {f"klein_{name}" for name in ("demo_right", "capped_7")} <= figures.keys()
