"""Text states: as diffusers makes them, in files of half the size, and on small cards."""

import shutil
from pathlib import Path

import pytest
import torch

from drawing import difference, draw
from imagefleet import errors
from imagefleet.files.kinds import TEXT
from worker.engine.flow import encoders, text
from worker.engine.flow.families import KLEIN
from worker.engine.pixel import text_states
from worker.node import start_up
from worker.stages import encode

pytestmark = pytest.mark.slow

PROMPTS = ["A red house", "a red house", "", "two dogs " * 40]


def place(folder: Path, *, may_stay: bool) -> text.ChatEncoder:
    device = torch.device("cpu")
    made = text.ChatEncoder(folder, KLEIN.text, device, torch.float32)
    made.place(may_stay=may_stay)
    return made


@pytest.fixture
def encoder(klein) -> text.ChatEncoder:
    return place(klein(), may_stay=True)


@pytest.fixture
def without_encoder(klein, tmp_path) -> Path:
    folder = tmp_path / "tiny-klein"
    shutil.copytree(klein(), folder)
    (folder / "text_encoder" / "model.safetensors").unlink()
    shutil.rmtree(folder / "tokenizer")
    return folder


def test_states_are_those_of_diffusers_alone_and_in_company(
    encoder: text.ChatEncoder, pipeline
):
    together = encoder.encode(PROMPTS)
    assert together.shape == (4, 512, 48)
    for prompt, states in zip(PROMPTS, together, strict=True):
        theirs, _ = pipeline().encode_prompt(prompt, torch.device("cpu"))
        assert (states - theirs[0]).abs().max() < 1e-5
        assert (states - encoder.encode([prompt])[0]).abs().max() < 1e-5
    assert (together[0] - together[1]).abs().max() > 1e-3, "capitals matter"


def test_an_encoder_whose_layers_come_and_go_says_the_same(
    encoder: text.ChatEncoder, klein
):
    streamed = place(klein(), may_stay=False)
    assert torch.equal(streamed.encode(PROMPTS), encoder.encode(PROMPTS))
    assert torch.equal(streamed.encode(PROMPTS), encoder.encode(PROMPTS))


def test_a_layer_of_the_encoder_leaves_the_gpu_even_if_it_fails(klein, monkeypatch):
    moved = []
    monkeypatch.setattr(text, "_enter", lambda held, *_: moved.append(id(held)))
    streamed = place(klein(), may_stay=False)
    streamed._encoder.layers[1].mlp = None
    with pytest.raises(TypeError):
        streamed.encode(PROMPTS)
    assert moved[::2] == moved[1::2]


def test_a_file_of_states_has_a_byte_a_number_and_a_scale_a_token(
    encoder: text.ChatEncoder, klein, tmp_path
):
    name = encoders.name_of(klein())
    (states,) = encoder.encode(PROMPTS[:1])
    path = tmp_path / f"{text_states.stem(PROMPTS[0], name)}.safetensors"
    path.write_bytes(text_states.content(PROMPTS[0], name, states))
    assert path.stat().st_size < states.numel() + 512 * 4 + 1_000
    read = text_states.read(path, PROMPTS[0], name, 48, 512)
    largest = states.abs().amax(dim=1, keepdim=True)
    assert ((read - states).abs() <= largest / 250).all()
    with pytest.raises(errors.JobError, match="does not have the text states"):
        text_states.read(path, PROMPTS[1], name, 48, 512)


def test_kleins_states_have_room_in_a_file_of_the_storage():
    name = f"Qwen3-4B 2560{text_states.CHAT_MARK}9-18-27"
    content = text_states.content("a", name, torch.randn(512, 7680))
    assert len(content) <= TEXT.max_bytes


def test_a_model_without_encoder_draws_from_stored_states(
    make_engine,
    request_of,
    encoder: text.ChatEncoder,
    without_encoder: Path,
    tmp_path,
):
    (expected,) = draw(make_engine(), request_of())
    engine = make_engine(without_encoder)
    assert engine.text_encoder is not None
    prompt = request_of().prompt
    paths = []
    for each in (prompt, ""):
        (states,) = encoder.encode([each])
        stem = text_states.stem(each, engine.text_encoder)
        paths.append(tmp_path / f"{stem}.safetensors")
        paths[-1].write_bytes(text_states.content(each, engine.text_encoder, states))
    (image,) = draw(engine, request_of(text_states=tuple(paths)))
    assert difference(image, expected) <= 8
    with pytest.raises(errors.JobError, match=r"text states .* files make text"):
        engine.prepare(request_of())


@pytest.mark.parametrize("has_encoder", [True, False])
def test_a_node_with_klein_proves_itself_by_a_plain_image(
    make_engine, without_encoder: Path, has_encoder: bool
):
    engine = make_engine(None if has_encoder else without_encoder)
    (image,) = draw(engine, start_up.plain_request(engine, seed=0))
    encode.refuse_one_colour(image)
