import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from imagefleet import errors
from pixel import tiny_cascade
from worker.engine.families import prompts
from worker.engine.flow import encoders
from worker.engine.pixel import text_stage, text_states

pytestmark = pytest.mark.slow

NAME = tiny_cascade.ENCODER
WIDTH = 32


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As if it were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        text_stage.importlib.util,
        "find_spec",
        lambda name: None if name == package else find(name),
    )


def write(folder: Path, prompt: str, encoder: str, states: torch.Tensor) -> Path:
    path = folder / f"{text_states.stem(prompt, encoder)}.safetensors"
    path.write_bytes(text_states.content(prompt, encoder, states))
    return path


@pytest.fixture(scope="module")
def text(stage) -> text_stage.TextStage:
    return text_stage.TextStage(stage("base"), torch.device("cpu"), torch.float32)


PLAIN = ["", "A red house ", "a" * 200, "über"]


@pytest.mark.parametrize(
    "prompt",
    [
        *PLAIN,
        "(word:1.3), a b",
        "A <b>house</b> &amp; www.houses.com/1 #123 “home” img_01.png",
        "a%20b+c",
        "plan.pdf",
    ],
)
def test_states_are_those_of_diffusers_pipeline(prompt: str, text, pipeline):
    expected, _ = pipeline("base").encode_prompt(prompt, clean_caption=True)
    assert torch.equal(text.encode([prompt]), expected)


def test_a_caption_is_cleaned_of_what_a_page_has_around_it():
    prompt = "<a href='x'>A House</a> by www.houses.com/a , “new” free shipping"
    assert text_stage.clean_caption(prompt) == 'a house by , "new"'
    assert text_stage.clean_caption("about.txt") == "about. txt", "and no warning"


def test_an_encoder_that_was_trained_with_plain_captions_reads_them_as_they_are(
    stage, tmp_path, pipeline, make_engine, monkeypatch
):
    hide(monkeypatch, "bs4")
    shutil.copytree(stage("base"), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "text_encoder" / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "clean_caption": False})
    )
    text = text_stage.TextStage(tmp_path, torch.device("cpu"), torch.float32)
    prompt = "A (red) house.png"
    expected, _ = pipeline("base").encode_prompt(prompt, clean_caption=False)
    assert torch.equal(text.encode([prompt]), expected)
    make_engine(folder=tmp_path)


def test_without_what_cleans_prompts_no_encoder_is_loaded(
    stage, without_encoder: Path, make_engine, monkeypatch
):
    hide(monkeypatch, "bs4")
    with pytest.raises(errors.SetupError, match=r"is not installed.*\[t5\]"):
        encoders.name_of(stage("base"))
    with pytest.raises(errors.SetupError, match="is not installed"):
        make_engine()
    make_engine(folder=without_encoder)


def test_a_prompt_among_others_has_the_states_that_it_has_alone(text):
    prompts = ["a red house", "", "two dogs"]
    together = text.encode(prompts)
    assert together.shape == (3, text_states.TOKENS, WIDTH)
    for prompt, states in zip(prompts, together, strict=True):
        assert torch.allclose(states, text.encode([prompt])[0], atol=1e-5)


def test_a_file_has_the_states_in_float16_under_the_name_of_prompt_and_encoder(
    tmp_path, text
):
    (states,) = text.encode(["A red house"])
    path = write(tmp_path, "A red house", NAME, states)
    assert path.stem == text_states.stem(" a red HOUSE", NAME), (
        "as the encoder takes it"
    )
    assert path.stem != text_states.stem("a red house", "another encoder")
    assert torch.equal(
        text_states.read(path, "a red house", NAME, WIDTH), states.half()
    )


@pytest.mark.parametrize(
    ("prompt", "encoder", "width"),
    [
        ("another", NAME, WIDTH),
        ("a red house", "another", WIDTH),
        ("a red house", NAME, 64),
    ],
)
def test_states_of_another_prompt_encoder_or_width_are_refused(
    prompt: str, encoder: str, width: int, tmp_path, text
):
    path = write(tmp_path, "a red house", NAME, text.encode(["a red house"])[0])
    with pytest.raises(
        errors.JobError, match=r"does not have the text states|are damaged"
    ):
        text_states.read(path, prompt, encoder, width)


def test_damaged_states_are_refused(tmp_path, text):
    states = text.encode(["a"])[0]
    states[3, 4] = float("nan")
    with pytest.raises(errors.JobError, match="or not finite"):
        text_states.read(write(tmp_path, "a", NAME, states), "a", NAME, WIDTH)
    other = tmp_path / "other.safetensors"
    save_file({"states": torch.zeros(77, WIDTH)}, other)
    with pytest.raises(errors.JobError, match="does not have the text states"):
        text_states.read(other, "a", NAME, WIDTH)


@pytest.mark.parametrize("content", [b"", b"\x10", b"PK\x03\x04 a pickle"])
def test_a_file_that_cannot_be_read_is_read_again_later(content: bytes, tmp_path):
    path = tmp_path / "cut-off.safetensors"
    path.write_bytes(content)
    with pytest.raises(errors.TransientError, match="cannot be read"):
        text_states.read(path, "a", NAME, WIDTH)
    with pytest.raises(errors.TransientError, match="cannot be read"):
        text_states.read(tmp_path / "missing", "a", NAME, WIDTH)


def test_a_folder_without_a_text_encoder_is_refused(without_encoder: Path):
    assert text_stage.encoder_name(without_encoder) == NAME
    assert not prompts.has_encoder(without_encoder, "t5")
    with pytest.raises(errors.SetupError, match="has no weights of a T5 encoder"):
        encoders.name_of(without_encoder)


def test_an_encoder_without_a_name_is_deepfloyds(tmp_path):
    assert text_stage.encoder_name(tmp_path) == "t5-v1_1-xxl"


def test_a_tokenizer_that_another_library_has_to_convert_is_refused_by_name(
    stage, tmp_path, monkeypatch
):
    hide(monkeypatch, "sentencepiece")
    shutil.copytree(stage("base"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer" / "tokenizer.json").rename(
        tmp_path / "tokenizer" / "spiece.model"
    )
    with pytest.raises(errors.SetupError, match=r"has no tokenizer\.json.*pip install"):
        text_stage.TextStage(tmp_path, torch.device("cpu"), torch.float32)
