"""Captions of three formats are the same captions, and draw their words as they are."""

import gzip
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evaluation.sweep import manifest
from evaluation.sweep.source import CaptionFile, prompt_of
from imagefleet import errors
from imagefleet.job.prompt import read_prompt
from imagefleet.validation import JSONDict

CAPTIONS = ["A red house.", "Two dogs (brown) play", "A red house."]


def annotations(captions: list[str]) -> JSONDict:
    """As COCO's files have them, some keys before and some behind."""
    return {
        "info": {"year": 2014, "annotations": "not these"},
        "images": [{"id": number, "file_name": f"{number}.jpg"} for number in range(3)],
        "annotations": [
            {"image_id": number // 2, "id": number, "caption": caption}
            for number, caption in enumerate(captions)
        ],
        "licenses": [],
    }


def lines(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


FILES = {
    "c.txt": "# of a test\n" + "\n\n".join(CAPTIONS),
    "c.jsonl": lines(
        {"caption": CAPTIONS[0], "id": 7}, {"prompt": CAPTIONS[1]}, CAPTIONS[2]
    ),
    "c.ndjson": lines(*({"text": f" {caption}\n"} for caption in CAPTIONS)),
    "c.json": json.dumps(annotations(CAPTIONS), indent=1),
}


@pytest.mark.parametrize("name", [*FILES, *(f"{name}.gz" for name in FILES)])
def test_every_format_gives_the_same_captions_with_the_same_hash(tmp_path, name: str):
    content = FILES[name.removesuffix(".gz")].encode()
    (tmp_path / name).write_bytes(
        gzip.compress(content) if name.endswith(".gz") else content
    )

    found = CaptionFile(tmp_path / name)

    assert list(found.read()) == CAPTIONS
    assert found.facts == manifest.digest(CAPTIONS)


def test_the_first_captions(tmp_path):
    path = tmp_path / "captions_val2014.json"
    path.write_text(json.dumps(annotations(["a", "b", "c", "d", "e"])))

    assert list(CaptionFile(path, count=3).read()) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("c.doc", "", r"must end in \.json, \.jsonl"),
        ("c.txt", "# nothing\n", "c.txt holds no captions"),
        ("none.txt", None, "none.txt cannot be read: No such file"),
        (
            "c.jsonl",
            '"a"\n{"caption": 3}',
            "line 2: there is no caption, a text under 'caption'",
        ),
        ("c.jsonl", '{"title": "a"}', "line 1: there is no caption"),
        ("c.jsonl", "a", "line 1: it is not valid JSON"),
        ("c.jsonl", '"\\ud800"', "line 1: the caption has half of a surrogate pair"),
        ("c.json", '["a"]', "no object with the array 'annotations'"),
        ("c.json", '{"images": []}', "no object with the array 'annotations'"),
        (
            "c.json",
            '{"annotations": [{"caption": "a"}], ',
            "not valid JSON: Expecting property name",
        ),
        ("c.json", '{"annotations": [{"caption": "a"} 3]}', "Expecting ',' delimiter"),
        (
            "c.json",
            '{"annotations": [{"text": "a"}]}',
            "annotation 1: there is no caption",
        ),
        ("c.txt.gz", "plain\n", None),
    ],
)
def test_what_is_no_file_of_captions_is_named_with_its_place(
    tmp_path, name: str, content: str | None, sentence: str | None
):
    if content is not None:
        (tmp_path / name).write_text(content)
    if sentence is None:
        assert CaptionFile(tmp_path / name).facts.count == 1
        return
    with pytest.raises(errors.SetupError, match=sentence):
        CaptionFile(tmp_path / name)


@example("a [dog|cat] and (red:1.3) AND more")
@example("the clock shows 10:30")
@example("<lora:x:1> <hypernet:y>")
@example(r"a \(b\) \\ [x:y:0.5]")
@example("BREAK in #2")
@example(" ")
@settings(max_examples=40)
@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1))
def test_a_caption_is_drawn_as_its_words_whatever_signs_it_has(caption: str):
    read = read_prompt(prompt_of(caption), comments=False)

    parts = [part for section in read.sections for part in section]
    drawn = "".join(part.text for part in parts)
    words = caption.replace("AND", "and").replace("BREAK", "break")
    drawn = drawn.replace("AND", "and").replace("BREAK", "break")
    assert drawn.rstrip() == words.rstrip()
    assert {part.weight for part in parts} == ({1.0} if words.rstrip() else set())
    assert (read.loras, read.weights) == ((), (1.0,))
