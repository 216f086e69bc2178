"""Single files of each family are found out, and hold what the folder holds."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import key_names
from families import tiny_families
from imagefleet import errors
from worker.engine.families import reading
from worker.engine.families.table import REFINER, SD1, SD2, SDXL, X4_UPSCALER
from worker.engine.lora import original_names
from worker.engine.lora.file import adaptable_layers
from worker.files import check

pytestmark = pytest.mark.slow

Weights = dict[str, torch.Tensor]

Files = Mapping[str, Path]

_OPEN_CLIP = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm": "ln_final",
    "encoder.layers": "transformer.resblocks",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}


def open_clip(folder: Path, prefix: str, *, layers: int) -> Weights:
    """A text encoder's weights as OpenCLIP has them, with *layers* more that are not read."""
    (file,) = folder.glob("*.safetensors")
    weights = {
        key.removeprefix("text_model."): each for key, each in load_file(file).items()
    }
    found = {}
    for key, weight in weights.items():
        if key == "text_projection.weight":
            found["text_projection"] = weight.T.contiguous()
        elif "self_attn.q_proj" in key:
            parts = [weights[key.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            name = key.replace("self_attn.q_proj.", "attn.in_proj_")
            found[name.replace("encoder.layers", "transformer.resblocks")] = torch.cat(
                parts
            )
        elif not any(f"self_attn.{part}_proj" in key for part in "kv"):
            name = key
            for ours, theirs in _OPEN_CLIP.items():
                name = name.replace(ours, theirs)
            found[name] = weight
    count = 1 + max(int(key.split(".")[2]) for key in found if "resblocks" in key)
    for extra in range(count, count + layers):
        for key in [key for key in found if "resblocks.0." in key]:
            found[key.replace("resblocks.0.", f"resblocks.{extra}.")] = found[key] + 1
    found["logit_scale"] = torch.tensor(1.0)
    return {f"{prefix}{key}": weight for key, weight in found.items()}


def unet_of(folder: Path, unet: torch.nn.Module) -> Weights:
    """A UNet's weights with the keys of its original release."""
    names = original_names.original_names(adaptable_layers(unet))
    names["class_embedding"] = "label_emb"
    (file,) = (folder / "unet").glob("*.safetensors")
    weights = {}
    for key, weight in load_file(file).items():
        path, kind = key.rsplit(".", 1)
        weights[
            f"model.diffusion_model.{names.get(path) or norm_name(path, names)}.{kind}"
        ] = weight
    return weights


def x4_file(folder: Path, unet: torch.nn.Module) -> Weights:
    """All of a tiny x4 upscaler, with the low-resolution model's buffers, which are not read."""
    text = open_clip(folder / "text_encoder", "cond_stage_model.model.", layers=1)
    others = {"low_scale_model.betas": torch.ones(1000)}
    return unet_of(folder, unet) | key_names.vae_layout(folder) | text | others


def sdxl_file(folder: Path, unet: torch.nn.Module) -> Weights:
    """All of a tiny SDXL with the keys of its original release."""
    weights = unet_of(folder, unet)
    one = key_names.original_layout(folder)
    text = "cond_stage_model.transformer."
    for key, weight in one.items():
        if key.startswith(text):
            weights[key.replace(text, "conditioner.embedders.0.transformer.")] = weight
        elif key.startswith("first_stage_model."):
            weights[key] = weight
    return weights | open_clip(
        folder / "text_encoder_2", "conditioner.embedders.1.model.", layers=0
    )


def norm_name(path: str, names: Mapping[str, str]) -> str:
    """Of a norm, which no LoRA changes: by the layer beside it."""
    outer = {"conv_norm_out": "out.0"}
    if path in outer:
        return outer[path]
    parent, leaf = path.rsplit(".", 1)
    beside = {"norm1": ("conv1", "in_layers.0"), "norm2": ("conv2", "out_layers.0")}
    if ".resnets." in path:
        conv, own = beside[leaf]
        return names[f"{parent}.{conv}"].rsplit(".", 2)[0] + f".{own}"
    inner = next(name for name in names if name.startswith(f"{parent}."))
    return f"{names[inner].removesuffix(inner.removeprefix(parent))}.{leaf}"


@pytest.fixture(scope="module")
def files(family_folder, family_checkpoint, tmp_path_factory) -> Files:
    folder = tmp_path_factory.mktemp("files")
    paths = {name: folder / f"{name}.safetensors" for name in ("sd2", "sdxl")}
    second = family_folder("sd2")
    text = "cond_stage_model.transformer."
    weights = {
        key: each
        for key, each in key_names.original_layout(second).items()
        if not key.startswith(text)
    }
    weights |= open_clip(second / "text_encoder", "cond_stage_model.model.", layers=1)
    save_file(weights, paths["sd2"])
    save_file(
        sdxl_file(family_folder("sdxl"), family_checkpoint("sdxl").unet), paths["sdxl"]
    )
    return paths


@pytest.mark.parametrize("family", ["sd2", "sdxl"])
def test_a_single_file_is_the_folders_checkpoint(
    family: str, files: Files, family_folder, family_checkpoint
):
    folder = family_checkpoint(family)
    file = family_checkpoint(family, path=files[family], config=family_folder(family))
    assert file.family is folder.family
    assert file.weight_sums == folder.weight_sums
    assert len(file.tokenizer) == 49_408


def test_the_built_in_configurations_are_the_published_ones():
    """By their counts of weights, in millions."""
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    with torch.device("meta"):
        networks = [
            UNet2DConditionModel.from_config(SD1.unet_config),
            AutoencoderKL.from_config(SD1.vae_config),
            CLIPTextModel(CLIPTextConfig(**SD1.text_encoders[0].config)),
            UNet2DConditionModel.from_config(SD2.unet_config),
            CLIPTextModel(CLIPTextConfig(**SD2.text_encoders[0].config)),
            UNet2DConditionModel.from_config(SDXL.unet_config),
            CLIPTextModelWithProjection(CLIPTextConfig(**SDXL.text_encoders[1].config)),
            UNet2DConditionModel.from_config(X4_UPSCALER.unet_config),
            AutoencoderKL.from_config(X4_UPSCALER.vae_config),
            UNet2DConditionModel.from_config(REFINER.unet_config),
        ]
    sizes = [sum(each.numel() for each in network.parameters()) for network in networks]
    expected = [859.5, 83.7, 123.1, 865.9, 340.4, 2567.5, 694.7, 473.4, 55.3, 2259.5]
    assert [round(size / 1e6, 1) for size in sizes] == expected


def test_an_x4_upscaler_in_one_file_is_the_folders(tmp_path, family_checkpoint):
    """Without schedulers' configurations beside it, it has the published noise."""
    folder = tiny_families.build_upscaler(tmp_path / "folder")
    whole = family_checkpoint("x4", path=folder)
    path = tmp_path / "x4.safetensors"
    save_file(x4_file(folder, whole.unet), path)
    for part in ("scheduler", "low_res_scheduler"):
        shutil.rmtree(folder / part)
    (folder / "model_index.json").unlink()
    file = family_checkpoint("x4", path=path, config=folder)
    assert file.family is whole.family is X4_UPSCALER
    assert file.weight_sums == whole.weight_sums
    assert file.prediction_type == whole.prediction_type == "v_prediction"
    assert file.image_noise.max_level == whole.image_noise.max_level == 350
    torch.testing.assert_close(
        file.alphas_cumprod, whole.alphas_cumprod, rtol=0, atol=0
    )
    noise_of = [each.image_noise.scheduler.alphas_cumprod for each in (file, whole)]
    torch.testing.assert_close(*noise_of, rtol=0, atol=0)
    assert check.family(path) == "SD x4 upscaler"


def with_marks(path: Path, source: Path, *names: str) -> Path:
    save_file({**load_file(source), **{name: torch.empty(0) for name in names}}, path)
    return path


@pytest.fixture
def config(family_folder, tmp_path) -> Any:
    """A configuration folder without a scheduler's."""

    def make(family: str) -> Path:
        folder = tmp_path / f"config-{family}"
        for part in family_folder(family).iterdir():
            if part.is_dir() and part.name != "scheduler":
                (folder / part.name).mkdir(parents=True)
                (folder / part.name / "config.json").write_bytes(
                    (part / "config.json").read_bytes()
                )
        return folder

    return make


def test_a_file_says_that_it_predicts_v_and_ends_in_pure_noise(
    files: Files, config, family_checkpoint, tmp_path
):
    settings = {"config": config("sdxl")}
    plain = family_checkpoint("sdxl", path=files["sdxl"], **settings)
    assert plain.prediction_type == "epsilon"
    assert plain.alphas_cumprod[-1] > 0.004
    marked = with_marks(tmp_path / "v.safetensors", files["sdxl"], "v_pred", "ztsnr")
    found = family_checkpoint("sdxl", path=marked, **settings)
    assert found.prediction_type == "v_prediction"
    assert found.alphas_cumprod[-1] == pytest.approx(4.8973451890853435e-08)
    torch.testing.assert_close(found.alphas_cumprod[0], plain.alphas_cumprod[0])


def test_a_files_own_mark_goes_before_the_scheduler_of_the_folder_around_it(
    files: Files,
    family_folder,
    family_checkpoint,
    tmp_path,
):
    """As that of the folder that it was converted to, which says epsilon unless told otherwise."""
    settings = {"config": family_folder("sdxl")}
    scheduler = settings["config"] / "scheduler" / "scheduler_config.json"
    assert '"epsilon"' in scheduler.read_text()
    marked = with_marks(tmp_path / "v.safetensors", files["sdxl"], "v_pred", "ztsnr")
    found = family_checkpoint("sdxl", path=marked, **settings)
    assert found.prediction_type == "v_prediction"
    # AUTOMATIC1111's .yaml, which is the user's own word, goes before the mark.
    stated = family_checkpoint(
        "sdxl", path=marked, prediction_type="epsilon", **settings
    )
    assert stated.prediction_type == "epsilon"


def test_a_folder_says_the_same_in_its_schedulers_configuration(tmp_path):
    scheduler = {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}
    assert reading.alphas_cumprod(tmp_path, scheduler, ())[-1] < 1e-7
    assert reading.prediction_type(tmp_path, scheduler, None, ()) == "v_prediction"


def test_what_an_unmarked_sd2_predicts_shows_in_its_answer(
    files: Files, config, family_checkpoint, tmp_path
):
    settings = {"config": config("sd2")}
    assert (
        family_checkpoint("sd2", path=files["sd2"], **settings).prediction_type
        == "epsilon"
    )
    weights = load_file(files["sd2"])
    weights["model.diffusion_model.out.2.bias"] -= 2
    path = tmp_path / "v.safetensors"
    save_file(weights, path)
    assert (
        family_checkpoint("sd2", path=path, **settings).prediction_type
        == "v_prediction"
    )


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        ("conditioner.embedders.1.", "is no checkpoint"),
        ("model.diffusion_model.label_emb.0.0.bias", "cannot be loaded"),
    ],
)
def test_a_file_that_lacks_a_part_is_refused(
    lost: str,
    reason: str,
    files: Files,
    family_folder,
    family_checkpoint,
    tmp_path,
):
    path = tmp_path / "part.safetensors"
    weights = load_file(files["sdxl"])
    save_file(
        {key: each for key, each in weights.items() if not key.startswith(lost)}, path
    )
    with pytest.raises(errors.SetupError, match=reason):
        family_checkpoint("sdxl", path=path, config=family_folder("sdxl"))


def test_a_unet_with_another_familys_text_encoders_is_refused(
    family_folder,
    family_checkpoint,
    files: Files,
    tmp_path,
):
    weights = {
        key.replace("conditioner.embedders.0.", "cond_stage_model."): each
        for key, each in load_file(files["sdxl"]).items()
        if "embedders.1" not in key
    }
    path = tmp_path / "mixed.safetensors"
    save_file(weights, path)
    with pytest.raises(errors.SetupError, match="is no checkpoint of Stable Diffusion"):
        family_checkpoint("sd1", path=path, config=family_folder("sdxl"))
    assert SD1.networks == ("text_encoder",)
