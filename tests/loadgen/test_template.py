import re
from pathlib import Path

import pytest

from imagefleet import errors
from imagefleet.job.message import images_of
from loadgen import template
from loadgen.sources import TemplateSource

TEMPLATES = [
    path
    for path in sorted((Path(__file__).parents[2] / "templates").iterdir())
    if path.suffix in template.SUFFIXES
]


def write(folder: Path, text: str, name: str = "t.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_comments_layout_count_and_seed_do_not_change_the_content(
    tmp_path,
):
    first = write(tmp_path, "prompt: a\ncount: 3", "a.yaml")
    second = write(tmp_path, "# hello\nseed: 5\nprompt:   a\ncount: 9", "b.yaml")

    assert template.read_template(first)[1] == template.read_template(second)[1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "prompt: a\nnegativ_prompt: b",
            "negativ_prompt: unknown key; did you mean 'negative_pr",
        ),
        ("prompt: a\nlists: {noun: []}", "lists.noun: the list is empty"),
        ("count: 3", "prompt: is required"),
        (
            "prompt: a\nlists: {noun: [cat, {txt: dog}]}",
            "lists.noun[1].txt: unknown key",
        ),
        ("prompt: a\nlists: {noun: [{text: x, weight: 0}]}", "lists.noun[0].weight"),
        ("prompt: a\nlists: {noun: [{text: x, weight: .nan}]}", "lists.noun[0].weight"),
        ("prompt: a\nlists: {noun: [{text: x, strength: 2}]}", "is for LoRAs"),
        ("prompt: a\nlists: {noun: [{lora: ../x}]}", "lists.noun[0].lora"),
        (
            "prompt: a\nlists: {noun: [{lora: x, strength: 35}]}",
            "lists.noun[0].strength",
        ),
        (
            "prompt: a\nlists: {noun: [{lora: x, strength: [2, 1]}]}",
            "[lowest, highest]",
        ),
        (
            "prompt: a\nlists: {noun: ['<lora:x:99>']}",
            "lists.noun[0].text: <lora:x:99>",
        ),
        ("prompt: a\nlists: {noun: [cat, no]}", "lists.noun[1]: YAML reads yes, no"),
        ("prompt: a\nlists: {'a b': [x]}", "lists.a b"),
        (
            "prompt: a\njob: {stesp: 5}",
            "job: stesp: unknown key; did you mean 'steps'?",
        ),
        ("prompt: a\njob: {steps: 500}", "job: steps:"),
        ("prompt: a\njob: {id: x}", "id is filled in for each job"),
        ("prompt: a\njob: {restore_faces: true}", "restore_faces is not supported"),
        ("- prompt: a", "a template is a mapping"),
        ("", "a template is a mapping"),
        ("prompt: [a", "is not valid yaml"),
        ("prompt: \x00", "is not valid yaml"),
    ],
)
def test_an_error_is_one_sentence_that_names_the_place(
    tmp_path, text: str, sentence: str
):
    with pytest.raises(errors.SetupError) as caught:
        template.read_template(write(tmp_path, text))

    assert sentence in caught.value.message
    assert "t.yaml" in caught.value.message
    assert "\n" not in caught.value.message


def test_invalid_toml_and_missing_files_are_setup_errors(tmp_path):
    with pytest.raises(errors.SetupError, match="is not valid toml"):
        template.read_template(write(tmp_path, "prompt = ", "t.toml"))
    (tmp_path / "latin.toml").write_bytes(b'prompt = "\xff"')
    with pytest.raises(errors.SetupError, match="is not valid toml"):
        template.read_template(tmp_path / "latin.toml")
    with pytest.raises(errors.SetupError, match="cannot be read: No such file"):
        template.read_template(tmp_path / "none.yaml")


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_the_shipped_templates_are_valid(path: Path):
    source = TemplateSource(path)
    source.check()

    assert source.count


def test_the_templates_of_the_documentation_are_valid(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "loading.md").read_text(
        encoding="utf-8"
    )
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (drawn,) = (TemplateSource(write(tmp_path, block)) for block in blocks)

    drawn.check()
    assert drawn.count == 1000


def test_a_message_of_a_template_may_ask_for_several_images(tmp_path):
    source = TemplateSource(write(tmp_path, "prompt: a\ncount: 3\njob: {n_iter: 1000}"))
    source.check()
    assert [images_of(body) for body in source.bodies()] == [1000] * 3
