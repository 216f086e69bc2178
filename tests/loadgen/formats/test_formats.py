"""Files of jobs in every format: the same jobs, whichever way they are written down."""

import gzip
import io
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

import signers
from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.signing import SigningKey
from imagefleet.validation import JSONDict
from loadgen import file_source, sources
from loadgen.file_source import FileSource
from loadgen.formats import json_array
from loadgen.rejects import Report

JOBS: list[JSONDict] = [
    {
        "prompt": 'a "red" house, with a\nline break',
        "steps": 12,
        "id": "one",
        "cfg_scale": 7.5,
    },
    {
        "prompt": "ein grünes Haus",
        "campaign": "spring",
        "metadata": {"sku": "001", "n": [1]},
    },
    {"prompt": " white space ", "negative_prompt": "blurry", "model": "m1", "seed": 7},
    {"prompt": "a", "verify": True, "output": {"format": "webp"}, "save_images": False},
]


def as_cell(value: Any) -> str:
    if isinstance(value, dict):
        value = json.dumps(value)
    if isinstance(value, bool):
        value = str(value).upper()  # as spreadsheets write it
    text = "" if value is None else str(value).replace('"', '""')
    return f'"{text}"' if set(text) & set('",;\t\n') else text


def as_csv(jobs: list[JSONDict], delimiter: str = ",") -> bytes:
    names = list(dict.fromkeys(name for job in jobs for name in job))
    rows = [names, *([as_cell(job.get(name)) for name in names] for job in jobs)]
    return "".join(delimiter.join(row) + "\r\n" for row in rows).encode("utf-8-sig")


def as_parquet(jobs: list[JSONDict]) -> bytes:
    names = list(dict.fromkeys(name for job in jobs for name in job))
    out = io.BytesIO()
    table = pa.table({name: [job.get(name) for job in jobs] for name in names})
    parquet.write_table(table, out, row_group_size=2)
    return out.getvalue()


CONTENTS: dict[str, Callable[[list[JSONDict]], bytes]] = {
    "jobs.jsonl": lambda jobs: "".join(json.dumps(job) + "\n" for job in jobs).encode(),
    "jobs.json": lambda jobs: json.dumps(jobs, ensure_ascii=False, indent=2).encode(),
    "jobs.csv": as_csv,
    "jobs.tsv": lambda jobs: as_csv(jobs, "\t"),
    "jobs.parquet": as_parquet,
}
NAMES = [*CONTENTS, "jobs.jsonl.gz", "jobs.json.gz", "jobs.csv.gz"]


def write(folder: Path, name: str, jobs: list[JSONDict]) -> Path:
    content = CONTENTS[name.removesuffix(".gz")](jobs)
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def opened(path: Path, **options: Any) -> FileSource:
    source = sources.open_source(str(path), **options)
    assert isinstance(source, FileSource)
    return source


def source_of(
    folder: Path, name: str, content: str | bytes, **options: Any
) -> FileSource:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return opened(path, **options)


def jobs_of(source: FileSource) -> list[Job]:
    return [read_job(body, "unused") for body in source.bodies() if body]


# Between tabs no cell has a line break.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "jobs.tsv"])
def test_every_format_gives_the_same_jobs(tmp_path, name: str):
    source = opened(write(tmp_path, name, JOBS))
    source.check()

    expected = [Job.model_validate(job) for job in JOBS]
    found = jobs_of(source)
    without_id = {"id", "seed"}
    assert source.count == len(JOBS)
    assert [job.model_dump(exclude=without_id) for job in found] == [
        job.model_dump(exclude=without_id) for job in expected
    ]
    assert (found[0].id, found[2].seed) == ("one", 7)
    assert len({job.id for job in found}) == len(JOBS)


@pytest.mark.parametrize("name", NAMES)
def test_every_format_has_its_jobs_in_order(tmp_path, name: str):
    source = opened(
        write(tmp_path, name, [{"prompt": f"{number}"} for number in range(9)])
    )

    whole = list(source.bodies())
    assert [json.loads(body or "")["prompt"] for body in whole] == [
        f"{n}" for n in range(9)
    ]
    assert list(opened(tmp_path / name, count=4).bodies()) == whole[:4]


def test_the_same_bytes_in_another_format_are_other_jobs(tmp_path):
    text = "prompt\na\nb\n"
    table = source_of(tmp_path, "a.csv", text)
    prompts = source_of(tmp_path, "a.txt", text)

    assert [job.prompt for job in jobs_of(table)] == ["a", "b"]
    assert [job.prompt for job in jobs_of(prompts)] == ["prompt", "a", "b"]
    assert {job.id for job in jobs_of(table)}.isdisjoint(
        job.id for job in jobs_of(prompts)
    )


@pytest.mark.parametrize("name", ["jobs.jsonl", "jobs.txt", "jobs.csv"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_a_file_in_utf_16_is_refused_with_the_remedy(
    tmp_path, name: str, encoding: str
):
    text = '{"prompt": "a"}\n' if name == "jobs.jsonl" else "prompt\na\n"
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    with pytest.raises(errors.SetupError, match="is UTF-16: save it as UTF-8, `iconv"):
        source_of(tmp_path, name, f"{mark}{text}".encode(encoding)).check()


def test_rows_that_end_in_cr_alone_are_rows(tmp_path):
    text = 'id,prompt\ra,"a ""big"" cat"\rb,"two\rlines"\rc,dog'
    source = source_of(tmp_path, "jobs.csv", text)
    source.check()
    assert [job.prompt for job in jobs_of(source)] == [
        'a "big" cat',
        "two\nlines",
        "dog",
    ]
    large = "prompt\r" + "".join(f"a cat of {number}\r" for number in range(100_000))
    assert source_of(tmp_path, "large.csv", large).count == 100_000


@pytest.mark.parametrize(
    ("mark", "delimiter", "cell"), [("", ";", "a, cat"), ("\ufeff", ",", "a; cat")]
)
def test_excels_line_for_the_delimiter_is_none_of_the_rows(
    tmp_path, mark: str, delimiter: str, cell: str
):
    rows = [f"id{delimiter}prompt", f"x{delimiter}{cell}", f"y{delimiter}a (cat:900)"]
    text = "\r\n".join([f"{mark}sep={delimiter}", *rows, ""])
    source = source_of(tmp_path, "jobs.csv", text, report=Report(skips=True))
    assert [job.prompt for job in jobs_of(source)] == [cell]
    assert source.report.shown[0].place == "row 3, line 4"


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        (
            '--prompt "photo of sunset" --steps 12 --seed 5 --width 64 --height 64',
            {"prompt": "photo of sunset", "steps": 12, "seed": 5, "width": 64},
        ),
        (
            '--negative_prompt "people, cars" --sampler_name "Euler a" --prompt a red  cat',
            {
                "prompt": "a red cat",
                "negative_prompt": "people, cars",
                "sampler_name": "Euler a",
            },
        ),
        (
            "masterpiece, 1girl --n low quality, blurry --w 512 --h 768 --d 1 --l 7.5 --s 28",
            {
                "prompt": "masterpiece, 1girl",
                "negative_prompt": "low quality, blurry",
                "width": 512,
                "height": 768,
                "seed": 1,
                "cfg_scale": 7.5,
                "steps": 28,
            },
        ),
        ("a house -- at night", {"prompt": "a house -- at night"}),
        ("a {{red}} house, {blue}", {"prompt": "a {{red}} house, {blue}"}),
    ],
)
def test_options_of_a_line_of_text_are_read(tmp_path, line: str, fields: JSONDict):
    (job,) = jobs_of(source_of(tmp_path, "prompts.txt", line))
    assert {name: getattr(job, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a cat --ar 16:9 --v 5", "unknown option --ar; known: --n, --w"),
        ("--promt x", "unknown option --promt; did you mean 'prompt'?"),
        ("--steps 5", "it has options, but no --prompt"),
        ("--prompt a --steps", "the option --steps has no value"),
        ('--prompt "a', "its options cannot be read: No closing quotation"),
        (
            "a {red|blue} house",
            "'{red|blue}' is of dynamic prompts: make it a template",
        ),
        ("a house in __season__", "'__season__' is of dynamic prompts"),
        ("a cat --s many", "steps: "),
    ],
)
def test_a_line_whose_options_are_none_of_a_job_is_refused(
    tmp_path, line: str, said: str
):
    with pytest.raises(errors.SetupError) as caught:
        source_of(tmp_path, "prompts.txt", line).check()
    assert said in str(caught.value)


def test_text_is_a_prompt_per_line_without_comments(tmp_path):
    text = (
        "\ufeff# my prompts\na red house, (sunset:1.2)\r\n\n  # more\n  a blue one  \n"
    )
    source = source_of(tmp_path, "prompts.txt", text)
    source.check()

    assert [job.prompt for job in jobs_of(source)] == [
        "a red house, (sunset:1.2)",
        "a blue one",
    ]
    assert (source.count, source.comments, source.empty) == (5, 2, 1)


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "txt"])
def test_standard_input_takes_every_format_compressed_or_not(
    stdin: Callable[[bytes], None], form: str
):
    content = {
        "jsonl": b'{"prompt":"a"}\n{"prompt":"b"}',
        "json": b'[{"prompt":"a"},{"prompt":"b"}]',
        "csv": b"prompt\na\nb\n",
        "txt": b"a\nb\n",
    }[form]
    for data in (content, gzip.compress(content)):
        stdin(data)
        source = sources.open_source("-", form=form)
        assert isinstance(source, FileSource)
        assert [job.prompt for job in jobs_of(source)] == ["a", "b"]


def test_a_campaign_is_given_to_jobs_without_one(tmp_path):
    """A file of prompts has no other way to name it."""
    text = "prompt,campaign\na,\nb,spring\n"
    plain = jobs_of(source_of(tmp_path, "a.csv", text))
    jobs = jobs_of(source_of(tmp_path, "a.csv", text, campaign="autumn"))

    assert [job.campaign for job in jobs] == ["autumn", "spring"]
    assert jobs[0].id != plain[0].id, "another job"
    assert [job.id for job in jobs] == [
        job.id for job in jobs_of(opened(tmp_path / "a.csv", campaign="autumn"))
    ]

    (tmp_path / "t.yaml").write_text("prompt: a\ncount: 1")
    (tmp_path / "own.yaml").write_text("prompt: a\ncount: 1\njob: {campaign: spring}")
    for name, campaign in (("t.yaml", "autumn"), ("own.yaml", "spring")):
        source = sources.open_source(str(tmp_path / name), campaign="autumn")
        assert [json.loads(body or "")["campaign"] for body in source.bodies()] == [
            campaign
        ]


def test_a_format_may_be_named(tmp_path):
    source = source_of(tmp_path, "prompts.list", "a\nb\n", form="txt")

    assert [job.prompt for job in jobs_of(source)] == ["a", "b"]
    with pytest.raises(
        errors.SetupError, match=r"must end in .*--format jsonl\|json\|csv"
    ):
        sources.open_source(str(tmp_path / "prompts.list"))
    with pytest.raises(
        errors.SetupError, match=r"should be jsonl\|json\|csv\|txt\|parquet"
    ):
        sources.open_source(str(tmp_path / "prompts.list"), form="xls")


@pytest.mark.parametrize(
    "name", ["jobs.jsonl", "jobs.json", "jobs.csv", "jobs.parquet"]
)
def test_what_failed_export_noted_is_dropped(tmp_path, name: str):
    job = {"prompt": "a", "steps": 12, "id": "one"}
    noted = opened(
        write(tmp_path, name, [job | {"failure": {"error": "X", "reason": "y"}}])
    )

    noted.check()
    assert [job.id for job in jobs_of(noted)] == ["one"]
    assert '"failure"' not in str(list(noted.bodies()))


def test_a_signed_job_is_valid_without_what_failed_export_noted(tmp_path):
    key = SigningKey.create(tmp_path / "key.pem")
    signed = json.loads(Job(prompt="a", id="a").to_message(signers.signer(key))) | {
        "failure": {"error": "X"}
    }
    (body,) = source_of(tmp_path, "fix.jsonl", json.dumps(signed)).bodies()

    assert read_job(body or "", "m", signers.trusted(key)).id == "a"


@pytest.mark.parametrize(
    ("name", "content", "sentences"),
    [
        (
            "a.csv",
            "prompt,steps\na,5\nb,many\n",
            ["row 3: steps: should be a valid integer"],
        ),
        ("a.csv", 'prompt,steps\n"a\nb",5\nc,0\n', ["row 3, line 4: steps:"]),
        ("a.csv", "prompt\na, b\nc\n", ["row 2: cell 2 has no column"]),
        ("a.csv", "prompt,metadata\na,{x}\n", ["row 2: metadata: is not JSON"]),
        ("a.csv", "prompt,then\na,[x\n", ["row 2: then: is not JSON"]),
        ("a.csv", b"prompt\na\n\xe9\nb\n", ["row 3: not UTF-8"]),
        ("a.csv", "prompt,steps\n,5\n", ["row 2: prompt: is required"]),
        (
            "a.csv",
            "prompt,restore_faces\na,FALSE\nb,TRUE\n",
            ["row 3: restore_faces is not"],
        ),
        ("a.txt", "a\n<hypernet:x:1>\n", ["line 2: prompt: "]),
        ("a.txt", b"a\n\xff\n", ["line 2: not UTF-8"]),
        (
            "a.json",
            '[{"prompt":"a"},\n 7,\n{"prmpt":"b"}]',
            ["job 2: ", "job 3: "],
        ),
    ],
)
def test_an_invalid_job_is_reported_by_its_place_or_skipped(
    tmp_path, name: str, content: str | bytes, sentences: list[str]
):
    with pytest.raises(errors.SetupError) as caught:
        source_of(tmp_path, name, content).check()
    reported = caught.value.message.splitlines()[1:]
    assert len(reported) == len(sentences)
    for line, sentence in zip(reported, sentences, strict=True):
        assert line.startswith(sentence)

    skipped: list[str] = []
    report = Report(skips=True, on_rejected=lambda row: skipped.append(row.place))
    bodies = list(source_of(tmp_path, name, content, report=report).bodies())
    assert [sentence.split(":")[0] for sentence in sentences] == skipped
    assert sum(body is None for body in bodies) == len(sentences)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (
            "a.csv",
            "prompt,stesp\na,5\n",
            "'stesp' is no field of a job; did you mean 'steps'?",
        ),
        ("a.csv", "prompt,sku\na,5\n", "name it 'metadata.sku'"),
        ("a.csv", "prompt,steps,Steps\na,5,5\n", "the column 'steps' is there twice"),
        (
            "a.csv",
            "a red house\na blue one\n",
            "no column 'prompt' among 'a red house'",
        ),
        ("a.csv", "id,steps\na,5\n", "no column 'prompt'"),
        ("a.csv", 'prompt\n"a\n', "row 2, which begins in line 2: unexpected end"),
        ("a.csv", "prompt\na\n".encode("utf-16"), "it is UTF-16"),
        ("a.json", '[{"prompt":"a"},]', "not valid JSON: "),
        (
            "a.json",
            '[\n{"prompt":"a"}\n{"prompt":"b"}]',
            "Expecting ',' delimiter in line 3",
        ),
        ("a.json", '[\n{"prompt":"a"},\n{"prompt": b}]', "Expecting value in line 3"),
        ("a.json", '[{"prompt":"a"}', "Expecting ',' delimiter in line 1"),
        ("a.json", '[{"prompt":"a"}] x', "Extra data in line 1"),
        ("a.json", '{"prompt":"a"}\n{"prompt":"b"}', "--format jsonl"),
        ("a.json", '"a"', "neither an array of jobs nor a job"),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.json", b'[{"prompt":\n"\xff"}]', "it is not UTF-8, in line 2"),
        ("a.parquet", "not parquet", "not a Parquet file"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"prompt":"a"}\n' * 99, mtime=0)[:-12],
            "damaged or incomplete",
        ),
        (
            "a.csv.gz",
            gzip.compress(b"prompt\n" * 9, mtime=0)[:10] + b"\xff" * 20,
            "cannot be read",
        ),
    ],
)
def test_a_file_that_is_not_of_its_format_is_one_sentence(
    tmp_path, name: str, content: str | bytes, sentence: str
):
    with pytest.raises(errors.SetupError) as caught:
        source_of(tmp_path, name, content)

    assert sentence in caught.value.message
    assert name in caught.value.message
    assert "\n" not in caught.value.message


def test_a_table_may_have_empty_rows_short_rows_and_columns_without_a_name(
    tmp_path,
):
    source = source_of(tmp_path, "a.csv", "Prompt , steps,,\na,5,,\n\n,,,\nb\n")

    assert [(job.prompt, job.steps) for job in jobs_of(source)] == [("a", 5), ("b", 20)]
    assert [body is None for body in source.bodies()] == [False, True, True, False]


def test_the_delimiter_is_the_one_that_gives_the_first_row_field_names(
    tmp_path,
):
    german = "prompt;cfg_scale;metadata.sku\na, b;7,5;001\n"
    (job,) = jobs_of(source_of(tmp_path, "a.csv", german))

    assert (job.prompt, job.cfg_scale, job.metadata) == ("a, b", 7.5, {"sku": "001"})


def test_a_cell_may_hold_the_further_stages_of_a_job(tmp_path):
    text = 'prompt,then\na,"[{""steps"": 9}, {}]"\nb,\n'
    first, second = jobs_of(source_of(tmp_path, "a.csv", text))

    assert (first.then, second.then) == (({"steps": 9}, {}), ())


def test_a_file_with_a_header_alone_or_nothing_has_no_jobs(tmp_path):
    for name, content in (
        ("a.csv", "prompt\n"),
        ("a.csv", ""),
        ("a.json", "[ ]"),
        ("a.json", ""),
    ):
        source = source_of(tmp_path, name, content)
        assert (source.count, list(source.bodies())) == (0, [])


def test_missing_values_of_pandas_are_defaults(tmp_path):
    table = pa.table(
        {
            "prompt": ["a", "b"],
            "steps": pa.array([15.0, float("nan")]),
            "id": [1, 2],
            "metadata": [[("sku", "001")], None],
            "__index_level_0__": [0, 1],
        },
        schema=pa.schema(
            [
                ("prompt", pa.string()),
                ("steps", pa.float64()),
                ("id", pa.int64()),
                ("metadata", pa.map_(pa.string(), pa.string())),
                ("__index_level_0__", pa.int64()),
            ]
        ),
    )
    parquet.write_table(table, tmp_path / "a.parquet")

    found = jobs_of(opened(tmp_path / "a.parquet"))
    assert [(job.id, job.steps, job.metadata) for job in found] == [
        ("1", 15, {"sku": "001"}),
        ("2", 20, {}),
    ]


def test_without_pyarrow_a_sentence_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path, "jobs.parquet", JOBS)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)

    with pytest.raises(errors.SetupError, match=r"pip install '\.\[parquet\]'"):
        sources.open_source(str(path))


@pytest.mark.parametrize("name", ["jobs.csv", "jobs.jsonl.gz"])
def test_a_table_or_lines_are_never_in_memory_as_a_whole(tmp_path, name: str):
    jobs = [{"prompt": f"{number} " + "x" * 4_000} for number in range(4_000)]
    path = write(tmp_path, name, jobs)
    del jobs

    tracemalloc.start()
    try:
        source = opened(path)
        entries = file_source.find_format(path)
        with path.open("rb") as file:
            read = sum(1 for _ in entries.entries(file_source.decompressed(file)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert source.count == read == 4_000
    assert peak < 8e6  # of 16 MB


def test_an_array_beyond_any_size_is_refused_before_it_fills_the_memory(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(json_array, "MAX_BYTES", 1_000)

    with pytest.raises(errors.SetupError, match=r"more than 1,000 bytes.*jsonl"):
        source_of(tmp_path, "a.json.gz", gzip.compress(b"[" + b" " * 5_000 + b"]"))


@pytest.mark.parametrize("name", ["jobs.jsonl", "jobs.csv", "jobs.txt"])
def test_a_line_beyond_any_size_is_refused_before_it_fills_the_memory(
    tmp_path, name: str
):
    array = b"[" + b'{"prompt": "a cat"},' * 500_000
    (tmp_path / name).write_bytes(array)
    tracemalloc.start()
    try:
        with pytest.raises(
            errors.SetupError, match="line 1 has more than 1,048,576 bytes"
        ):
            opened(tmp_path / name)
        assert tracemalloc.get_traced_memory()[1] < len(array)
    finally:
        tracemalloc.stop()


def test_a_table_that_changes_while_it_is_loaded_is_an_error(tmp_path):
    source = source_of(tmp_path, "a.csv", "prompt\na\nb\n")
    (tmp_path / "a.csv").write_text("prompt\na\nc\nd\n")

    with pytest.raises(errors.SetupError, match="has changed while it was being read"):
        list(source.bodies())


def test_the_table_of_the_documentation_is_valid(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "loading.md").read_text(
        encoding="utf-8"
    )
    (table,) = re.findall(r"^```csv\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    first, second = jobs_of(source_of(tmp_path, "a.csv", table))

    assert (first.steps, first.cfg_scale, first.metadata) == (20, 7.5, {"sku": "00017"})
    assert (second.prompt, second.steps) == (
        'a "big" fish, <lora:outline-style:0.8>',
        20,
    )


def test_a_table_has_columns_for_images_and_the_second_pass(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text(
        "prompt,init_images,mask,denoising_strength,enable_hr,hr_scale,hr_prompt\n"
        'a,cats/a.png,cats/m.png,"0,5",,,\n'
        "b,,,0.6,TRUE,1.5,a dog\n"
        "c,,,,FALSE,3,x\n"
    )
    jobs = [
        read_job(body or "", "m") for body in sources.open_source(str(path)).bodies()
    ]
    assert (jobs[0].init_images, jobs[0].mask) == (("cats/a.png",), "cats/m.png")
    assert [job.denoising_strength for job in jobs] == [0.5, 0.6, 0.75]
    assert [job.enable_hr for job in jobs] == [False, True, False]
    assert (jobs[1].hr_scale, jobs[1].hr_prompt, jobs[2].hr_prompt) == (
        1.5,
        "a dog",
        "",
    )
