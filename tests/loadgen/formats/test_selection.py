"""`--unique` and `--balance`: which jobs of a file are loaded, and in which order."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from imagefleet import errors
from in_process import Imagefleet, as_it_was, built, in_process
from loadgen import sources
from loadgen.file_source import FileSource

__all__ = ["as_it_was", "built", "in_process"]


def opened(path: Path, jobs: list[Any], **options: Any) -> FileSource:
    path.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    source = sources.open_source(str(path), **options)
    assert isinstance(source, FileSource)
    return source


def prompts(source: FileSource) -> list[str]:
    return [json.loads(body)["prompt"] for body in source.bodies() if body]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.jsonl"


def test_a_prompt_that_repeats_is_loaded_once_as_it_came_first(path: Path):
    jobs = [
        {"prompt": "a fox", "seed": 1},
        {"prompt": "an owl", "seed": 2},
        {"prompt": " a  fox ", "seed": 3},
        {"prompt": "A fox", "seed": 4},
        {"prompt": "a fox", "seed": 5},
    ]

    source = opened(path, jobs, unique=True)

    kept = [json.loads(body) for body in source.bodies() if body]
    assert [job["seed"] for job in kept] == [1, 2, 4]
    assert (source.count, source.repeated, source.empty) == (5, 2, 0)


def test_jobs_have_the_same_ids_with_repeats_and_without(path: Path):
    jobs = [{"prompt": f"prompt {number % 3}", "seed": number} for number in range(9)]

    every = list(opened(path, jobs).bodies())
    kept = [body for body in opened(path, jobs, unique=True).bodies() if body]

    assert kept == every[:3]


def test_values_of_a_column_have_turns_until_each_has_no_more(path: Path):
    styles = ["oil", "oil", "oil", "ink", "ink", None, "oil"]
    jobs = [
        {"prompt": f"{number}", "metadata": {"style": style} if style else {}}
        for number, style in enumerate(styles)
    ]

    source = opened(path, jobs, balance="metadata.style")

    assert prompts(source) == ["0", "3", "5", "1", "4", "2", "6"]
    assert prompts(source) == ["0", "3", "5", "1", "4", "2", "6"], "the same again"
    assert prompts(opened(path, jobs, balance="metadata.style", count=3)) == [
        "0",
        "3",
        "5",
    ]


def test_a_field_of_the_job_is_a_column_and_goes_with_unique(path: Path):
    jobs = [
        {"prompt": prompt, "steps": steps}
        for prompt, steps in (("a", 1), ("b", 1), ("a", 1), ("c", 2))
    ]

    assert prompts(opened(path, jobs, balance="steps", unique=True)) == ["a", "c", "b"]


def test_a_column_that_no_row_has_is_refused(path: Path):
    source = opened(path, [{"prompt": "a"}], balance="metadata.stile")

    with pytest.raises(errors.SetupError, match="no line has the column"):
        list(source.bodies())


def test_rows_that_are_no_jobs_keep_their_places_in_what_is_said(path: Path):
    rows: list[Any] = [{"prompt": "a"}, {"prompt": "b", "stepz": 1}, {"prompt": "a"}]

    for options in ({"unique": True}, {"balance": "prompt"}):
        with pytest.raises(errors.SetupError, match="line 2 is not a valid job"):
            list(opened(path, rows, **options).bodies())


@pytest.mark.parametrize("options", [{"unique": True}, {"balance": "steps"}])
def test_memory_does_not_grow_with_the_length_of_prompts(
    path: Path, options: dict[str, Any]
):
    form = opened(path, [{"prompt": "a", "steps": 1}], **options)._form
    with path.open("w") as file:
        for number in range(20_000):
            job = {"prompt": f"{number} {'x' * 500}", "steps": number % 7 + 1}
            file.write(json.dumps(job) + "\n")

    tracemalloc.start()
    try:
        with path.open("rb") as stream:
            count = sum(1 for _ in form.entries(stream))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert count == 20_000
    assert peak < 4 * 2**20, "the prompts alone have 10 MB"


def test_load_says_how_many_repeats_were_left_out(
    in_process: Imagefleet, path: Path, tmp_path: Path
):
    path.write_text('{"prompt": "a"}\n' * 3 + '{"prompt": "b"}\n')

    to = ["--storage", f"local:{tmp_path / 'storage'}"]
    ended = in_process("load", str(path), "--unique", *to, "--json")
    told = json.loads(ended.stdout)
    shown = in_process("load", str(path), "--unique", *to, "--restart")

    assert (told["sent"], told["repeated"], told["empty"]) == (2, 2, 0)
    assert "left out 2 jobs whose prompt an earlier one has" in shown.stderr
