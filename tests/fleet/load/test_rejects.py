"""`imagefleet load` and the rows that are no jobs: named, counted and kept to be mended."""

import json
from pathlib import Path

import pytest

from cli import console
from imagefleet.validation import JSONDict
from in_process import Imagefleet, assert_refused

ROWS = """\
id,prompt,steps,sampler_name,metadata.note
r1,a fox,20,,
r2,a fox,many,,
r3,a fox,900,,
r4,a fox,20,Euler b,
r6,a (fox:900),,,
r7,a fox,20,,
,,,,
r8,a fox,20,,secret
r9,<lora:../x:1>,,,
""".splitlines()


def write(folder: Path, rows: list[str] = ROWS) -> None:
    (folder / "jobs.csv").write_text("".join(f"{row}\n" for row in rows))


def rejects(folder: Path) -> list[JSONDict]:
    return [
        json.loads(line) for line in (folder / "rejects.jsonl").read_text().splitlines()
    ]


def test_every_refused_row_is_kept_with_what_is_wrong_and_counts_add_up(
    in_process: Imagefleet, tmp_path
):
    write(tmp_path)
    result = in_process(
        "load", "jobs.csv", "--skip-invalid", "--rejects", "rejects.jsonl", "--json"
    )

    assert result.returncode == console.EXIT_DONE, result.stderr
    told = json.loads(result.stdout)
    counts = [told[name] for name in ("total", "sent", "invalid", "empty")]
    assert counts == [9, 3, 5, 1]
    found = [job["failure"] for job in rejects(tmp_path)]
    assert [(each["line"], each.get("field")) for each in found] == [
        (3, "steps"),
        (4, "steps"),
        (5, "sampler_name"),
        (6, "prompt"),
        (10, "prompt"),
    ]
    assert [found[at]["value"] for at in (0, 1, 4)] == ["many", "900", "<lora:../x:1>"]
    assert "row 4 is skipped: steps: " in result.stderr
    assert "(id r3, value 900)" in result.stderr
    assert "showing 5 of 5; all are in rejects.jsonl" in result.stderr


def test_refused_rows_that_are_mended_are_loaded_as_jobs_that_never_failed(
    in_process: Imagefleet, tmp_path
):
    write(tmp_path, [*ROWS[:6]])
    in_process("load", "jobs.csv", "--skip-invalid", "--rejects", "rejects.jsonl")
    mended = (tmp_path / "rejects.jsonl").read_text()
    for wrong, right in {"many": "20", "900": "1", "Euler b": "Euler a"}.items():
        mended = mended.replace(wrong, right)
    (tmp_path / "mended.jsonl").write_text(mended)

    told = json.loads(in_process("load", "mended.jsonl", "--json").stdout)
    assert (told["sent"], told["mended"], told["total"]) == (4, 0, 4)


def test_a_refused_file_keeps_its_rows_and_shows_ten_of_them(
    in_process: Imagefleet, tmp_path
):
    write(
        tmp_path,
        ["id,prompt,steps", *(f"i{number},a,x{number}" for number in range(16))],
    )
    result = in_process("load", "jobs.csv", "--rejects", "rejects.jsonl", "--json")

    assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert json.loads(result.stdout) == {"finished": False, "invalid": 16}
    assert "nothing was sent" in result.stderr
    assert "showing 10 of 16; all are in rejects.jsonl" in result.stderr
    assert "error: row 11: steps: should be a valid integer" in result.stderr
    assert "(id i9, value x9)" in result.stderr
    assert "(id i10, " not in result.stderr
    assert [job["id"] for job in rejects(tmp_path)] == [
        f"i{number}" for number in range(16)
    ]


@pytest.mark.parametrize(
    "arguments", [["--check"], ["--dry-run"], ["--dry-run", "--skip-invalid"]]
)
def test_a_load_that_is_only_tried_keeps_all_refused_rows_too(
    in_process: Imagefleet, tmp_path, arguments: list[str]
):
    write(tmp_path, ["prompt,steps", *("a,x" for _ in range(12))])
    in_process("load", "jobs.csv", "--rejects", "rejects.jsonl", *arguments)

    assert len(rejects(tmp_path)) == 12
    assert not (tmp_path / "imagefleet-data").exists()


def test_a_load_that_resumes_keeps_what_was_refused_before(
    in_process: Imagefleet, tmp_path
):
    write(tmp_path, ["prompt,steps", "a,x", "a,5", "a,y", "a,5"])
    load = (
        "load",
        "jobs.csv",
        "--skip-invalid",
        "--rejects",
        "rejects.jsonl",
        "--json",
    )
    in_process(*load, "--count", "2")
    told = json.loads(in_process(*load).stdout)

    assert (told["sent"], told["invalid"]) == (1, 2)
    assert [job["failure"]["line"] for job in rejects(tmp_path)] == [2, 4]


def test_a_secret_in_a_refused_value_is_not_shown(in_process: Imagefleet, tmp_path):
    write(tmp_path, ["prompt,steps", "a,https://h/x?sig=0123456789"])
    result = in_process("load", "jobs.csv", "--rejects", "rejects.jsonl")

    assert "0123456789" not in result.stderr
    assert "0123456789" not in json.dumps(rejects(tmp_path)[0]["failure"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["jobs.csv", "--rejects", "jobs.csv"], "is the file of jobs itself"),
        (["t.yaml", "--rejects", "r.jsonl"], "--rejects is for files of jobs"),
        (["jobs.csv", "--rejects", "."], "cannot write .: Is a directory"),
        (
            ["jobs.csv", "--rejects", "r.csv"],
            "as JSON lines: let the name end in .jsonl",
        ),
        (["jobs.csv", "--rejects", "r.jsonl.gz"], "let the name end in .jsonl"),
    ],
)
def test_a_file_of_refused_rows_that_cannot_be_is_one_sentence(
    in_process: Imagefleet, tmp_path, arguments: list[str], sentence: str
):
    write(tmp_path)
    (tmp_path / "t.yaml").write_text("prompt: a\ncount: 1")
    assert_refused(in_process("load", *arguments), sentence)
    assert (tmp_path / "jobs.csv").stat().st_size > 0


def test_rows_in_a_quoted_cell_are_warned_of_once(in_process: Imagefleet, tmp_path):
    write(
        tmp_path,
        ["id,prompt", '1,"a', *(f"{n},a fish" for n in range(2, 9)), '9,b"', "10,c"],
    )
    result = in_process("load", "jobs.csv")

    assert (
        result.stderr.count("row 2: a quoted cell holds 7 lines that look like rows")
        == 1
    )
    assert "2 jobs sent" in result.stderr


@pytest.mark.parametrize(
    "arguments", [("load",), ("load", "--dry-run")], ids=["sent", "dry run"]
)
def test_what_differs_from_a1111_is_counted_in_the_summary(
    in_process: Imagefleet, tmp_path, arguments: tuple[str, ...]
):
    differs = {"prompt": "a fox", "scheduler": "Align Your Steps", "steps": 1}
    jobs = [differs, {**differs, "seed": 1}, {**differs, "steps": 2}]
    (tmp_path / "jobs.jsonl").write_text("".join(f"{json.dumps(j)}\n" for j in jobs))
    result = in_process(*arguments, "jobs.jsonl")
    assert "2 jobs may differ from AUTOMATIC1111's: one step of" in result.stderr
    if arguments == ("load",):
        told = json.loads(
            in_process("load", "jobs.jsonl", "--restart", "--json").stdout
        )
        assert told["differs"] == {"one_aligned_step": 2}


def test_what_differs_of_a_templates_jobs_is_counted(in_process: Imagefleet, tmp_path):
    text = "count: 3\nprompt: a fox\njob: {scheduler: Align Your Steps, steps: 1}\n"
    (tmp_path / "jobs.yaml").write_text(text)
    result = in_process("load", "jobs.yaml")
    assert "3 jobs may differ from AUTOMATIC1111's: one step of" in result.stderr


def test_lines_of_text_that_are_left_out_as_comments_are_counted(
    in_process: Imagefleet, tmp_path
):
    (tmp_path / "jobs.txt").write_text("a house\n#1 dad mug\n\n  # more\na dog\n")
    checked = in_process("load", "jobs.txt", "--check")
    assert "left out 2 lines that begin with #" in checked.stderr
    result = in_process("load", "jobs.txt")
    assert "left out 2 lines that begin with #" in result.stderr
    told = json.loads(in_process("load", "jobs.txt", "--restart", "--json").stdout)
    counts = [told[name] for name in ("total", "sent", "comments", "empty")]
    assert counts == [5, 2, 2, 1]


def test_a_check_names_ids_that_are_there_twice(in_process: Imagefleet, tmp_path):
    rows = ["id,prompt", "a,cat", "b,dog", "a,fox", "b,dog", "c,owl"]
    write(tmp_path, rows)
    result = in_process("load", "jobs.csv", "--check")
    assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
    said = "row 4: the id of default/a is an earlier job's, with another content"
    assert result.stderr.count("an earlier job's") == 1
    assert said in result.stderr
    told = json.loads(in_process("load", "jobs.csv", "--check", "--json").stdout)
    assert told["doubled"] == 1
    write(tmp_path, [*rows[:3], rows[-1]])
    assert in_process("load", "jobs.csv", "--check").returncode == console.EXIT_DONE
