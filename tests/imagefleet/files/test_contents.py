"""Each kind of file that people give for a checkpoint or a LoRA, told by its header."""

import io
import json
import re
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagefleet.files import contents, safetensors

Shapes = dict[str, list[int]]

UNET = "model.diffusion_model."
CROSS = f"{UNET}input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
CONV_IN = f"{UNET}input_blocks.0.0.weight"
TEXT = "cond_stage_model.transformer.text_model.encoder.layers.0.mlp.fc1.weight"
VAE = "first_stage_model.decoder.conv_in.weight"

SD1: Shapes = {
    CONV_IN: [320, 4, 3, 3],
    CROSS: [320, 768],
    TEXT: [3072, 768],
    VAE: [512, 4, 3, 3],
}
ATTENTION = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k"
KOHYA = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"


#: A layer whose shape says nothing about the family.
MID_BLOCK: Shapes = {"lora_unet_mid_block_attentions_0_proj_in.lora_up.weight": [4, 4]}


def header(shapes: Mapping[str, list[int]], **metadata: str) -> safetensors.Header:
    entries: dict[str, object] = {
        name: {"dtype": "F16", "shape": shape, "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    entries["__metadata__"] = {
        key.replace("__", "."): value for key, value in metadata.items()
    }
    return read(entries)


def read(entries: Mapping[str, object]) -> safetensors.Header:
    content = json.dumps(entries).encode()
    return safetensors.read_header(
        io.BytesIO(len(content).to_bytes(8, "little") + content)
    )


def without(*names: str, whole: Shapes = SD1) -> Shapes:
    return {name: shape for name, shape in whole.items() if name not in names}


@pytest.mark.parametrize(
    "shapes",
    [
        SD1,
        without(TEXT) | {TEXT.replace("text_model.", ""): [3072, 768]},
        SD1
        | {"cond_stage_model.transformer.text_model.embeddings.position_ids": [1, 77]},
        SD1
        | {
            f"model_ema.diffusion_modelinput_blocks{at}00weight": [320]
            for at in range(9)
        },
        SD1
        | {"model_ema.decay": [], "betas": [1000], "cond_stage_model.logit_scale": []},
        SD1 | {CROSS: [32, 32]},  # another size of the same architecture
    ],
    ids=[
        "plain",
        "no text_model",
        "position ids",
        "EMA beside",
        "training state",
        "tiny",
    ],
)
def test_checkpoints_of_stable_diffusion_1_are_accepted(shapes: Shapes):
    assert contents.identify(header(shapes)) is contents.SD1


SD2: Shapes = {
    CONV_IN: [320, 4, 3, 3],
    CROSS: [320, 1024],
    "cond_stage_model.model.positional_embedding": [77, 1024],
    VAE: [512, 4, 3, 3],
}
SDXL: Shapes = {
    CONV_IN: [320, 4, 3, 3],
    CROSS.replace("1.1", "4.1"): [640, 2048],
    "conditioner.embedders.0.transformer.text_model.embeddings.x": [77, 768],
    "conditioner.embedders.1.model.positional_embedding": [77, 1280],
    VAE: [512, 4, 3, 3],
}
REFINER: Shapes = {
    CONV_IN: [384, 4, 3, 3],
    CROSS.replace("1.1", "4.1"): [768, 1280],
    "conditioner.embedders.0.model.positional_embedding": [77, 1280],
    VAE: [512, 4, 3, 3],
}


@pytest.mark.parametrize(
    ("shapes", "kind"),
    [
        (SD2, contents.SD2),
        (SD2 | {CROSS: [32, 32]}, contents.SD2),
        (SDXL, contents.SDXL),
        (SDXL | {"v_pred": [], "ztsnr": []}, contents.SDXL),
        (SDXL | {f"{UNET}label_emb.0.0.weight": [1280, 2816]}, contents.SDXL),
        (SD1 | {CONV_IN: [320, 9, 3, 3]}, contents.SD1),
        (SD2 | {CONV_IN: [320, 9, 3, 3]}, contents.SD2),
        (SDXL | {CONV_IN: [320, 9, 3, 3]}, contents.SDXL),
        (SD2 | {CONV_IN: [256, 7, 3, 3]}, contents.X4_UPSCALER),
        (SDXL | {CROSS.replace("1.1", "4.1"): [32, 32]}, contents.SDXL),
        (REFINER, contents.REFINER),
        (REFINER | {CROSS.replace("1.1", "4.1"): [32, 32]}, contents.REFINER),
    ],
)
def test_checkpoints_of_other_families_are_accepted(
    shapes: Shapes, kind: contents.Content
):
    assert contents.identify(header(shapes)) is kind


@pytest.mark.parametrize(
    ("shapes", "name"),
    [
        (
            {name: shape for name, shape in SDXL.items() if "embedders.1" not in name},
            "an SDXL checkpoint without its text encoder",
        ),
        (SDXL | {CROSS: [320, 768], TEXT: [3072, 768]}, "mixed"),
        (SD1 | {CONV_IN: [320, 8, 3, 3]}, "edits pictures"),
        (SD2 | {f"{UNET}label_emb.0.0.weight": [1280, 2048]}, "unCLIP"),
        (
            SDXL | {"edm_mean": [1, 4, 1, 1], "edm_std": [1, 4, 1, 1]},
            "of another noise",
        ),
        (SDXL | {"scaled_fp8": [2]}, "quantised"),
        (without(VAE), "without its VAE"),
        (without(TEXT), "without its text encoder"),
        ({"model_ema.diffusion_modelout2weight": [4], VAE: [1], TEXT: [1]}, r"\(EMA\)"),
        (
            {
                CROSS: [320, 1024],
                "cond_stage_model.model.positional_embedding": [77, 1024],
            },
            "Stable Diffusion 2.x checkpoint",
        ),
        (
            without(VAE, whole=REFINER),
            "an SDXL refiner checkpoint without its VAE",
        ),
        (
            {
                CONV_IN: [384, 4, 3, 3],
                CROSS: [768, 1280],
                f"{UNET}label_emb.0.0.weight": [1536, 2560],
            },
            "SDXL refiner",
        ),
        (
            {f"{UNET}double_blocks.0.img_attn.qkv.weight": [9216, 3072]},
            "a Flux checkpoint",
        ),
        ({f"{UNET}cap_embedder.0.weight": [2560]}, "diffusion transformer"),
        ({"input_blocks.0.0.weight": [320, 4, 3, 3]}, "UNet of a checkpoint alone"),
        ({VAE: [512, 4, 3, 3]}, "a VAE"),
        ({VAE: [512, 16, 3, 3]}, "a VAE of another model"),
        ({TEXT: [3072, 768]}, "a text encoder"),
        ({"emb_params": [8, 768]}, "textual inversion"),
        ({"clip_g": [8, 1280], "clip_l": [8, 768]}, "textual inversion"),
        (
            {"text_encoders_0": [8, 768], "text_encoders_1": [8, 1280]},
            "textual inversion",
        ),
        ({"control_model.input_hint_block.0.weight": [16, 3, 3, 3]}, "a ControlNet"),
        ({"image_proj.proj.weight": [3072, 1024]}, "an IP-Adapter"),
        (
            {"body.0.rdb1.conv1.weight": [32, 64, 3, 3], "conv_first.weight": [64]},
            "an upscaler",
        ),
        ({"unet.conv_in.weight": [320, 4, 3, 3]}, "whole pipeline"),
        ({}, "an empty safetensors file"),
        ({"x": [3]}, "its first tensor is 'x'"),
    ],
)
def test_what_is_no_such_checkpoint_is_called_by_its_name(shapes: Shapes, name: str):
    kind = contents.identify(header(shapes))
    assert kind.use in {None, "embedding", "controlnet", "upscaler", "vae"}
    assert re.search(name, kind.name)
    assert kind.advice


@pytest.mark.parametrize(
    ("shapes", "metadata", "name"),
    [
        ({f"{KOHYA}.lora_down.weight": [32, 768]}, {}, "for Stable Diffusion 1.x"),
        ({f"{KOHYA}.lora_down.weight": [32, 32]}, {}, "for Stable Diffusion 1.x"),
        ({f"{KOHYA}.lora_down.weight": [32, 1024]}, {}, "for Stable Diffusion 2.x"),
        ({f"{KOHYA}.lora_down.weight": [32, 2048]}, {}, "for SDXL"),
        (
            {f"{KOHYA}.hada_w1_a": [320, 8], f"{KOHYA}.hada_w1_b": [8, 2048]},
            {},
            "for SDXL",
        ),
        ({"lora_te2_text_model_encoder_layers_0_mlp_fc1.alpha": []}, {}, "for SDXL"),
        (
            {
                "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.lora_A.weight": [
                    4,
                    768,
                ]
            },
            {},
            "for Stable Diffusion 1.x",
        ),
        ({f"unet.{ATTENTION}.lora.down.weight": [4, 2048]}, {}, "for SDXL"),
        (
            {"lora_te_text_model_encoder_layers_0_mlp_fc1.lokr_w1": [4, 4]},
            {},
            "Diffusion 1.x",
        ),
        (
            MID_BLOCK,
            {"ss_base_model_version": "sdxl_base_v1-0"},
            "for SDXL",
        ),
        (
            MID_BLOCK,
            {"modelspec__architecture": "stable-diffusion-xl-v1-base/lora"},
            "for SDXL",
        ),
        (
            MID_BLOCK,
            {"modelspec__architecture": "stable-diffusion-v1/lora"},
            "for Stable Diffusion 1.x",
        ),
        (
            {"lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": [4, 4]},
            {},
            "Flux",
        ),
        (
            {"transformer.single_transformer_blocks.0.attn.to_k.lora_A.weight": [4, 4]},
            {},
            "Flux",
        ),
    ],
)
def test_loras_are_told_apart_by_their_architecture(
    shapes: Shapes, metadata: dict[str, str], name: str
):
    kind = contents.identify(header(shapes, **metadata))
    assert kind.name.startswith("a LoRA")
    assert name in kind.name
    assert (kind is contents.SD1_LORA) == ("1.x" in name)
    assert (kind.use == "lora") == (name != "Flux")


def test_what_the_author_says_counts_where_the_names_tell_nothing():
    kind = contents.identify(header({"x": [1]}, modelspec__architecture="pixart-sigma"))
    assert "'pixart-sigma'" in kind.name
    assert (
        contents.identify(header(SD1, modelspec__architecture="flux-1-dev"))
        is contents.SD1
    )


@pytest.mark.parametrize(
    ("shapes", "metadata", "expected"),
    [
        (SD1, {}, None),
        (SD1, {"modelspec__prediction_type": "v"}, "v_prediction"),
        (SD1, {"modelspec__prediction_type": "epsilon"}, "epsilon"),
        (SD1, {"modelspec__prediction_type": "unheard of"}, None),
        (SD1 | {"v_pred": []}, {}, "v_prediction"),
    ],
)
def test_v_prediction_is_known_where_the_file_says_so(
    shapes: Shapes, metadata: dict[str, str], expected: str | None
):
    assert contents.prediction_type(header(shapes, **metadata)) == expected


@settings(max_examples=50)
@given(
    st.dictionaries(st.text(), st.lists(st.integers(0, 2**40), max_size=8)),
    st.dictionaries(st.text(), st.text()),
)
def test_no_header_raises(shapes: Shapes, metadata: dict[str, str]):
    shapes.pop("__metadata__", None)
    found = header(shapes, **metadata)
    assert contents.identify(found).name
    contents.prediction_type(found)


def shaped(shape: list[object]) -> dict[str, object]:
    return {"shape": shape, "data_offsets": [0, 0]}


@pytest.mark.parametrize(
    "entries",
    [
        {f"{number}": shaped([]) for number in range(50_001)},
        *({"a": shaped(shape)} for shape in ([1] * 9, [-1], [2**63], [True], [1.5])),
        {"a": {"shape": [1], "data_offsets": [4, 0]}},
        {"__metadata__": ["a list"]},
    ],
    ids=[
        "tensors",
        "dimensions",
        "negative",
        "huge",
        "boolean",
        "fraction",
        "backwards",
        "list",
    ],
)
def test_a_header_beyond_the_bounds_is_refused(entries: dict[str, object]):
    with pytest.raises(safetensors.MalformedError):
        read(entries)


def test_a_header_that_claims_gigabytes_is_not_read():
    class Watched(io.BytesIO):
        asked = 0

        def read(self, size: int | None = -1) -> bytes:
            self.asked += size or 0
            return super().read(size)

    file = Watched((2**40).to_bytes(8, "little") + b"{" * 1000)
    with pytest.raises(safetensors.MalformedError):
        safetensors.read_header(file)
    assert file.asked == 8
