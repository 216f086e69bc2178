import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from imagefleet import errors
from imagefleet.job.message import read_job
from loadgen import sources
from loadgen.file_source import FileSource
from loadgen.rejects import Report
from loadgen.sources import TemplateSource

TEMPLATE = """
prompt:
  - "photo of a {noun} and a {noun:2}, {style}, {lora}"
  - {text: "{noun}, {{braces}}", weight: 3}
negative_prompt: "bad {noun}"
count: 5000
seed: 3
lists:
  noun: [cat, dog, {text: fox, weight: 2}]
  style: [anime, "oil on {ground}"]
  ground: [canvas, wood]
  lora: [{lora: forest, strength: [0.2, 0.6], text: magic}, {lora: ink}]
job: {steps: 15, campaign: spring, metadata: {noun: "{noun}", number: 7}}
"""

PROMPTS = [
    "fox, {braces}",
    "fox, {braces}",
    "photo of a fox and a fox, anime, <lora:ink:1.00>",
]
IDS = [
    "1fe89a611998ffee4fcae0db",
    "3d0887266ef3df488609f6d6",
    "f024ad58d719cb787f2747ef",
]


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "t.yaml"
    path.write_text(TEMPLATE)
    return path


def template(path: Path, text: str) -> TemplateSource:
    path.write_text(text)
    return TemplateSource(path, count=50)


def test_the_jobs_of_a_template_never_change(path: Path):
    """Other values here would mean other jobs for everyone's templates."""
    jobs = [
        json.loads(body) for body in itertools.islice(TemplateSource(path).bodies(), 3)
    ]

    assert [job["prompt"] for job in jobs] == PROMPTS
    assert [job["id"] for job in jobs] == IDS


def test_another_seed_or_another_content_gives_other_jobs(path: Path):
    here = TemplateSource(path)
    reseeded = TemplateSource(path, seed=4)
    path.write_text(TEMPLATE.replace("steps: 15", "steps: 16"))
    edited = TemplateSource(path)

    ids = [json.loads(source.body(0))["id"] for source in (here, reseeded, edited)]
    assert len(set(ids)) == 3
    assert len({here.identity, reseeded.identity, edited.identity}) == 3


def test_a_placeholder_has_one_value_in_a_job_and_its_second_draw_another(
    path: Path,
):
    source = template(
        path,
        "prompt: '{n}/{n}/{n:2}'\nnegative_prompt: '{n}'\nlists: {n: [a, b, c, d, e, f, g, h]}\n"
        "job: {metadata: {n: '{n}'}}",
    )
    jobs = [read_job(body, "unused") for body in source.bodies()]

    for job in jobs:
        first, again, _ = job.prompt.split("/")
        assert first == again == job.negative_prompt == job.metadata["n"]
    assert any(job.prompt.split("/")[0] != job.prompt.split("/")[2] for job in jobs)


def test_weights_are_how_often_an_entry_is_drawn(path: Path):
    source = TemplateSource(path)
    jobs = [json.loads(body) for body in source.bodies()]
    nouns = Counter(job["metadata"]["noun"] for job in jobs)

    assert 0.22 < nouns["cat"] / 5000 < 0.28
    assert 0.47 < nouns["fox"] / 5000 < 0.53


def test_a_lora_has_a_strength_in_its_range_and_its_trigger_words(path: Path):
    source = template(
        path,
        "prompt: a {lora}\nlists: {lora: [{lora: forest, strength: [0.2, 0.6], text: magic}]}",
    )
    jobs = [json.loads(body)["prompt"] for body in source.bodies()]
    strengths = {float(prompt.split(":")[2].split(">")[0]) for prompt in jobs}

    assert all(
        prompt.startswith("a <lora:forest:0.") and prompt.endswith(">, magic")
        for prompt in jobs
    )
    assert len(strengths) > 10
    assert 0.2 <= min(strengths) < max(strengths) <= 0.6


def test_doubled_braces_are_braces(path: Path):
    assert json.loads(template(path, "prompt: '{{a}} }}'").body(0))["prompt"] == "{a} }"


NESTED = json.dumps({f"l{n}": [f"{{l{n + 1}}}"] for n in range(60)})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "prompt: a {nuon}\nlists: {noun: [cat]}",
            "prompt: there is no list for {nuon}; lists: noun",
        ),
        ("prompt: a {noun}", "there is no list for {noun}; lists: none"),
        (
            "prompt: a\njob: {metadata: {x: '{y}'}}",
            "job.metadata.x: there is no list for {y}",
        ),
        (
            "prompt: '{a}'\nlists: {a: ['{b}'], b: ['{a:2}']}",
            "circular lists: a -> b -> a",
        ),
        (f"prompt: '{{l0}}'\nlists: {NESTED}", "nested more than 50 deep"),
        ("prompt: 'a { b'", "expected '}' before end of string near 'a { b'"),
        ("prompt: 'a } b'", "Single '}' encountered"),
        ("prompt: 'a {b c}'", "there is no list for {b c}"),
        (
            "prompt: '<lora:{n}:1>'\nlists: {n: [x, {text: ../y, weight: 0.0001}]}",
            "'../y'",
        ),
        ("prompt: '{n}'\nlists: {n: [x, '" + "y" * 65_530 + "']}", "65,536"),
    ],
)
def test_a_template_that_generates_invalid_jobs_is_refused_before_the_first(
    path: Path, text: str, sentence: str
):
    with pytest.raises(errors.SetupError) as caught:
        template(path, text).check()

    assert sentence in caught.value.message
    assert "t.yaml" in caught.value.message


def test_a_template_without_a_count_asks_for_one(path: Path):
    path.write_text("prompt: a")

    with pytest.raises(errors.SetupError, match="--count"):
        TemplateSource(path)


def lines(tmp_path: Path, text: str | bytes, **options: object) -> FileSource:
    path = tmp_path / "jobs.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return FileSource(path, **options)  # type: ignore[arg-type]


def test_lines_without_an_id_get_one_that_is_the_same_each_time(tmp_path):
    text = '{"prompt":"a"}\n{"prompt":"a"}\n{"prompt":"b","id":"mine"}\n'
    first = [read_job(body, "x").id for body in lines(tmp_path, text).bodies() if body]
    again = [read_job(body, "x").id for body in lines(tmp_path, text).bodies() if body]

    assert first == again
    assert len(set(first)) == 3
    assert first[2] == "mine"


def test_empty_lines_carriage_returns_and_a_byte_order_mark_are_accepted(
    tmp_path,
):
    source = lines(tmp_path, b'\xef\xbb\xbf{"prompt":"a"}\r\n\r\n  \n{"prompt":"b"}')
    source.check()

    bodies = list(source.bodies())
    assert source.count == len(bodies) == 4
    assert [body is None for body in bodies] == [False, True, True, False]


def test_the_same_standard_input_twice_makes_new_jobs(
    stdin: Callable[[bytes], None],
):
    ids = set()
    for _ in range(2):
        stdin(b'{"prompt":"a"}\n{"prompt":"a"}')
        bodies = sources.open_source("-").bodies()
        ids |= {read_job(str(body), "x").id for body in bodies}

    assert len(ids) == 4


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("jobs.doc", {}, "must end in"),
        ("jobs.jsonl", {"seed": 1}, "--seed is for templates"),
        ("t.yaml", {"report": Report(skips=True)}, "--skip-invalid is for files"),
        ("t.yaml", {"unique": True}, "--unique is for files"),
        ("t.yaml", {"balance": "model"}, "--balance is for files"),
        ("none.jsonl", {}, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_a_source_is_refused(
    name: str, options: dict[str, object], sentence: str
):
    with pytest.raises(errors.SetupError, match=sentence):
        sources.open_source(name, **options)  # type: ignore[arg-type]


def test_defaults_are_those_of_jobs_that_have_none_and_of_other_ids(path: Path):
    jobs = path.with_suffix(".jsonl")
    jobs.write_text('{"prompt": "a"}\n{"prompt": "b", "steps": 7}\n')
    plain, read = (
        [
            read_job(body or "", "none")
            for body in FileSource(jobs, defaults=defaults).bodies()
        ]
        for defaults in (None, "a1111-1.10")
    )
    assert {job.id for job in plain}.isdisjoint(job.id for job in read)
    assert [(job.steps, job.sampler, job.randn_source) for job in read] == [
        (50, "euler", "GPU"),
        (7, "euler", "GPU"),
    ]
    drawn = read_job(next(TemplateSource(path, defaults="a1111-1.10").bodies()), "none")
    assert (drawn.steps, drawn.sampler) == (15, "euler")


def test_a_job_that_was_read_before_keeps_its_defaults(path: Path):
    message = read_job('{"prompt": "a"}', "one").to_message()
    jobs = path.with_suffix(".jsonl")
    jobs.write_text(message + "\n")
    (body,) = FileSource(jobs, defaults="a1111-1.10").bodies()
    assert read_job(body or "", "two").steps == 20
