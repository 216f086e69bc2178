"""The table of file kinds: no two share a place, and each file is of one kind alone."""

import io

import pytest

from header_files import SD1, file_of, lora_of, shaped
from imagefleet import errors
from imagefleet.files import contents, kinds, safetensors
from imagefleet.files.contents import TEXT_STATES_FORMAT
from imagefleet.files.kinds import KINDS

FILES = {
    "model": (file_of(*SD1), "SD 1.x"),
    "lora": (lora_of(), "SD 1.x LoRA"),
    "embedding": (shaped(emb_params=[1, 1024]), "SD 2.x embedding, 1 vector"),
    "controlnet": (
        shaped(**{"control_model.input_hint_block.0.weight": [16, 3, 3, 3]}),
        "a ControlNet",
    ),
    "upscaler": (shaped(**{"model.0.weight": [64, 3, 3, 3]}), "an upscaler"),
    "vae": (shaped(**{"decoder.conv_in.weight": [512, 4, 3, 3]}), "a VAE"),
    "text": (
        file_of("states", format=TEXT_STATES_FORMAT, encoder="t5-v1_1-xxl"),
        "t5-v1_1-xxl",
    ),
}


def header(data: bytes) -> safetensors.Header:
    return safetensors.read_header(io.BytesIO(data))


def test_no_two_kinds_share_a_folder_and_every_kind_with_a_header_is_tried_here():
    assert len({kind.folder for kind in KINDS.values()}) == len(KINDS)
    assert FILES.keys() == {
        name for name, kind in KINDS.items() if ".safetensors" in kind.suffixes
    } - {"judge"}  # of any tensors


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_described_as_its_own_kind_and_refused_as_any_other(
    name: str,
):
    data, description = FILES[name]
    found = header(data)
    assert kinds.check(KINDS[name], "a.safetensors", found) == description
    for other in KINDS.keys() - {name}:
        with pytest.raises(
            errors.SetupError, match=rf"`imagefleet files add {name}` stores it"
        ):
            kinds.check(KINDS[other], "a.safetensors", found)


def test_a_network_of_no_known_architecture_may_be_an_upscaler_alone():
    found = header(shaped(odd=[3, 3]))
    assert contents.identify(found).use is None
    assert kinds.accepts(kinds.UPSCALER, contents.identify(found))
    with pytest.raises(errors.SetupError, match="is no known kind of model"):
        kinds.check(kinds.LORA, "a.safetensors", found)


def test_names_are_listed_without_their_suffix_but_of_models_judges_and_kernels():
    names = {
        name: kind.listed_name(f"a.b{kind.suffixes[0]}") for name, kind in KINDS.items()
    }
    assert names.pop("model") == "a.b.safetensors"
    assert names.pop("judge") == "a.b.safetensors"
    assert names.pop("kernels") == "a.b.kernels"
    assert set(names.values()) == {"a.b"}
