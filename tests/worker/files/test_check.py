"""A wrong `--model` is refused with what to do, before torch, the network or the weights."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from header_files import LORA, REFINER, file_of
from imagefleet import errors
from imagefleet.files import kinds
from worker.files import addresses, check
from worker.settings import WorkerSettings

NO_VAE = (
    "model.diffusion_model.input_blocks.0.0.weight",
    "cond_stage_model.transformer.x",
)

WHOLE = file_of(data=b"weights")

MakeSettings = Callable[..., WorkerSettings]


@pytest.fixture
def make_settings(tmp_path) -> MakeSettings:
    def make(model: str, **changes: Any) -> WorkerSettings:
        return WorkerSettings(model=model, storage=f"local:{tmp_path}", **changes)

    return make


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder that looks like a checkpoint in diffusers format."""
    made = tmp_path / "model"
    for part in ("unet", "vae", "text_encoder"):
        (made / part).mkdir(parents=True)
        (made / part / "config.json").write_text("{}")
        (made / part / "model.safetensors").write_bytes(file_of("x", data=b"."))
    (made / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    return made


def refusal(path: Path) -> str:
    with pytest.raises(errors.SetupError) as refused:
        check.check_path(path)
    assert str(path) in refused.value.message
    assert "\n" not in refused.value.message
    return refused.value.message


# Single files


def test_a_single_file_of_sd1_passes(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of())
    (tmp_path / "another.vae.safetensors").write_bytes(
        file_of("decoder.conv_in.weight")
    )
    check.check_path(path)


@pytest.mark.parametrize("suffix", [".vae.pt", ".vae.ckpt", ".vae.safetensors"])
def test_a_vae_beside_the_file_is_not_left_out_without_a_word(suffix: str, tmp_path):
    path = tmp_path / "dream.v8.safetensors"
    path.write_bytes(file_of())
    beside = tmp_path / f"dream.v8{suffix}"
    beside.write_bytes(b"")
    with pytest.raises(
        errors.SetupError, match="Move it away; --vae gives it"
    ) as refused:
        check.check_path(path)
    assert str(beside) in refused.value.message


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (
            REFINER,
            "is an SDXL refiner checkpoint; imagefleet generates with checkpoints of",
        ),
        (LORA, "is a LoRA for Stable Diffusion 1.x; `imagefleet files add lora`"),
        (NO_VAE, "without its VAE; use the version"),
    ],
)
def test_another_kind_is_named_with_what_to_do(
    names: tuple[str, ...], reason: str, tmp_path
):
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(*names))
    assert reason in refusal(path)


@pytest.mark.parametrize("name", ["model.ckpt", "model.pt", "model.BIN"])
def test_a_pickle_comes_with_the_command_that_converts_it(name: str, tmp_path):
    (tmp_path / name).write_bytes(b"\x80\x02")
    assert "python -c 'import torch" in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"PK\x03\x04" + bytes(100), "a pickle"),
        (b"\x80\x02}q\x00" + bytes(100), "a pickle"),
        (b"<!DOCTYPE html><html>Log in</html>", "a web page"),
        (b"\xef\xbb\xbf\n <html>", "a web page"),
        (b'{"error": "Unauthorized"}', "JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"\x1f\x8b" + bytes(100), "compressed"),
        (bytes(257) + b"ustar\x0000" + bytes(300), "a .tar archive"),
        (bytes(1024), "a .tar archive"),
        (b"", "not a readable .safetensors file"),
        (b"anything else at all", "not a readable .safetensors file"),
        ((100).to_bytes(8, "little") + b'{"a"', "is cut off: it has 12 bytes"),
        ((5).to_bytes(8, "little") + b"{not}", "its header is not one"),
        (WHOLE[:-1], f"it has {len(WHOLE) - 1} of {len(WHOLE)} bytes"),
    ],
)
def test_what_is_no_safetensors_file_is_called_what_it_is(
    content: bytes, reason: str, tmp_path
):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert reason in refusal(path)


# Paths that do not exist, and hub ids


def test_a_missing_path_is_named_and_a_hub_id_comes_with_the_download(
    tmp_path,
):
    assert refusal(tmp_path / "gone.safetensors").endswith("does not exist")
    assert (
        "`hf download prompthero/openjourney --local-dir ./model`, and then"
        in refusal(Path("prompthero/openjourney"))
    )
    moved = refusal(Path("runwayml/stable-diffusion-v1-5"))
    assert (
        "hf download stable-diffusion-v1-5/stable-diffusion-v1-5 --local-dir" in moved
    )


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (
            "https://huggingface.co/Lykon/dreamshaper-8",
            "a whole repository is downloaded by `hf download OWNER/NAME",
        ),
        (
            "https://huggingface.co/o/n/blob/main/a.safetensors",
            "an address with /resolve/ in the place of /blob/",
        ),
        ("https://huggingface.co/models", "is a web page, not a file"),
        (
            "https://civitai.com/models/4384/dreamshaper",
            "/api/download/models/NUMBER downloads",
        ),
        (
            "https://www.civitai.com/models/4384?modelVersionId=128713",
            "--model https://civitai.com/api/download/models/NUMBER downloads",
        ),
        ("https://example.com/a/model.ckpt?token=secret", "a pickle"),
        ("https://example.com/", "must end in .safetensors"),
        ("http://[bad", "not a valid address"),
        ("http://example.org/model.safetensors", "plain http"),
        ("https://example.org/..%2Fa.safetensors", "cannot be fetched"),
        ("store:a.ckpt", "must end in .safetensors"),
        ("store:../a.tar", "cannot be fetched"),
    ],
)
def test_a_page_or_a_pickle_is_refused_by_its_address(
    address: str, reason: str, make_settings: MakeSettings
):
    with pytest.raises(errors.SetupError) as refused:
        check.check(make_settings(address))
    assert reason in refused.value.message
    assert "secret" not in refused.value.message


@pytest.mark.parametrize(
    "address",
    [
        "https://civitai.com/api/download/models/128713?type=Model&format=SafeTensor",
        "https://huggingface.co/o/n/resolve/main/a.safetensors?download=true",
        "https://bucket.s3.amazonaws.com/models/1b2c?X-Amz-Signature=0",
        "store:models/a.safetensors",
    ],
)
def test_addresses_of_files_pass_without_a_request(
    address: str, make_settings: MakeSettings
):
    check.check(make_settings(address))


def test_a_renewed_signature_is_the_same_model_and_another_parameter_is_not():
    def folder(text: str) -> str:
        address = addresses.read_address(text, None, "")
        assert address is not None
        return address.folder_name(None)

    start = "https://civitai.com/api/download/models/1?size=pruned"
    assert folder(f"{start}&token=a") == folder(f"{start}&token=b")
    assert folder(start) != folder(start.replace("pruned", "full"))
    signed = "https://x.blob.core.windows.net/c/file?sv=2024&sp=r&se=2026&sig={}"
    assert folder(signed.format("a")) == folder(signed.format("b"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"config": Path("nowhere")}, "--config 'nowhere' is not a folder"),
        ({"model_sha256": "0" * 64}, "this is a path"),
    ],
)
def test_a_setting_that_does_not_fit_the_model_is_named(
    changes: dict[str, Any], reason: str, make_settings: MakeSettings
):
    with pytest.raises(errors.SetupError, match=reason):
        check.check(make_settings("model.safetensors", **changes))


# Folders


def test_a_folder_in_diffusers_format_passes(folder: Path):
    check.check_path(folder)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        (
            "model_index.json",
            {"_class_name": "StableDiffusionXLInstructPix2PixPipeline"},
            "a checkpoint that edits pictures",
        ),
        (
            "model_index.json",
            {"_class_name": "FluxPipeline"},
            "a checkpoint of FluxPipeline",
        ),
        (
            "unet/config.json",
            {"cross_attention_dim": 1280},
            "an SDXL refiner checkpoint",
        ),
        (
            "unet/config.json",
            {"addition_embed_type": "text_time"},
            "text_encoder_2/config.json",
        ),
        (
            "scheduler/scheduler_config.json",
            {
                "_class_name": "EDMDPMSolverMultistepScheduler",
                "prediction_type": "epsilon",
            },
            "of other noise (EDMDPMSolverMultistepScheduler)",
        ),
    ],
)
def test_a_folder_of_another_architecture_is_named(
    file: str, content: dict[str, object], reason: str, folder: Path
):
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(json.dumps(content))
    assert reason in refusal(folder)


def test_sdxls_refiner_is_a_model_that_jobs_name_beside_their_own(
    folder: Path, tmp_path
):
    unet = {"cross_attention_dim": 1280, "addition_embed_type": "text_time"}
    (folder / "unet" / "config.json").write_text(json.dumps(unet))
    (folder / "text_encoder").rename(folder / "text_encoder_2")
    file = tmp_path / "refiner.safetensors"
    file.write_bytes(file_of(*REFINER))
    for path in (folder, file):
        check.check_path(path, kinds.OTHER_MODEL)
        assert check.family(path) == "SDXL refiner"
        assert "is an SDXL refiner checkpoint; imagefleet" in refusal(path)
    (folder / "text_encoder_2" / "config.json").unlink()
    with pytest.raises(errors.SetupError, match="it has no text_encoder_2/config"):
        check.check_path(folder, kinds.OTHER_MODEL)


def test_an_inpainting_checkpoint_is_one_of_its_family(folder: Path):
    (folder / "model_index.json").write_text(
        '{"_class_name": "StableDiffusionInpaintPipeline"}'
    )
    (folder / "unet" / "config.json").write_text(
        '{"in_channels": 9, "cross_attention_dim": 768}'
    )
    check.check_path(folder)
    assert check.family(folder) == "SD 1.x"


@pytest.mark.parametrize(
    ("width", "family"),
    [(768, "SD 1.x"), (1024, "SD 2.x"), (2048, "SDXL"), ([2048], "SD 1.x")],
)
def test_the_family_of_a_folder_is_told_by_its_unet(
    folder: Path, width: object, family: str
):
    (folder / "unet" / "config.json").write_text(
        json.dumps({"cross_attention_dim": width})
    )
    assert check.family(folder) == family
    (folder / "unet" / "config.json").write_text('{"addition_embed_type": "text_time"}')
    assert check.family(folder) == "SDXL"
    upscaler = {"cross_attention_dim": width, "num_class_embeds": 1000}
    (folder / "unet" / "config.json").write_text(json.dumps(upscaler))
    assert check.family(folder) == "SD x4 upscaler"


def test_a_damaged_folder_names_what_is_wrong(folder: Path):
    weights = folder / "vae" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(errors.SetupError, match=r"vae/model\.safetensors' is cut off"):
        check.check_path(folder)
    weights.rename(weights.with_suffix(".bin"))
    assert "only model.bin, a pickle" in refusal(folder)
    (folder / "vae" / "config.json").unlink()
    assert "it has no vae/config.json" in refusal(folder)
    (folder / "model_index.json").write_text("{")
    assert "is not JSON" in refusal(folder)


def test_a_folder_around_a_file_says_which_file_to_name(tmp_path):
    assert "it has no unet/config.json" in refusal(tmp_path)
    (tmp_path / "a.ckpt").touch()
    assert "a.ckpt is a pickle" in refusal(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(file_of(*LORA))
    assert "'b.safetensors' is a LoRA for Stable Diffusion 1.x" in refusal(tmp_path)
    (tmp_path / "c.safetensors").write_bytes(file_of())
    assert f"--model {tmp_path}/c.safetensors" in refusal(tmp_path)


# What the UNet predicts


def test_a_yaml_beside_the_file_tells_v_prediction(tmp_path):
    """As AUTOMATIC1111 has it."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(modelspec__prediction_type="epsilon"))
    assert check.prediction_type(path) == "epsilon"
    beside = path.with_suffix(".yaml")
    beside.write_text("model:\n  target: ldm\n  params:\n    parameterization: v\n")
    assert check.prediction_type(path) == "v_prediction"
    beside.write_text("model:\n  params:\n    image_size: 64\n")
    assert check.prediction_type(path) == "epsilon"
    assert check.prediction_type(tmp_path) is None


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ("VScaling", "v_prediction"),
        ("EpsScaling", "epsilon"),
        ("EDMScaling", None),
        ("", None),
    ],
)
def test_a_yaml_of_sdxl_tells_it_by_its_scaling(
    scaling: str, expected: str | None, tmp_path
):
    """As AUTOMATIC1111 has it, whose configurations of SDXL name no parameterization."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of())
    target = f"sgm.modules.diffusionmodules.denoiser_scaling.{scaling}"
    config = {"params": {"scaling_config": {"target": target}}}
    beside = {"model": {"params": {"denoiser_config": config}}}
    path.with_suffix(".yaml").write_text(json.dumps(beside))  # which is YAML, too
    assert check.prediction_type(path) == expected
    beside["model"]["params"]["denoiser_config"] = {"params": [config]}
    path.with_suffix(".yaml").write_text(json.dumps(beside))
    assert check.prediction_type(path) is None


@pytest.mark.parametrize(
    "content", ["model: [", "a: b\n" * 50_000, "!!python/object:os.system {}"]
)
def test_a_yaml_that_cannot_be_read_is_named(content: str, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of())
    path.with_suffix(".yaml").write_text(content)
    with pytest.raises(errors.SetupError, match=r"model\.yaml' beside the checkpoint"):
        check.prediction_type(path)


# The command


def test_the_command_refuses_a_wrong_model_before_it_imports_anything_heavy(
    tmp_path,
):
    (tmp_path / "sdxl.safetensors").write_bytes(file_of(*REFINER))
    (tmp_path / "a.ckpt").touch()
    (tmp_path / "folder").mkdir()
    models = (
        "gone",
        "runwayml/stable-diffusion-v1-5",
        "sdxl.safetensors",
        "a.ckpt",
        "folder",
    )
    program = """
import sys
from fleet import main
for model in sys.argv[1:]:
    sys.argv = ["imagefleet", "worker", "--model", model]
    try:
        main.main()
    except SystemExit as ended:
        print("exit", ended.code)
heavy = {"torch", "diffusers", "transformers", "numpy", "PIL", "azure.storage.blob"}
print("loaded", sorted(heavy & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", program, *models],
        cwd=tmp_path,
        env={**os.environ},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "exit 2\n" * len(models) + "loaded []\n"
    lines = result.stderr.splitlines()
    assert [json.loads(line)["severity"] for line in lines] == ["ERROR"] * len(models)
    assert not (tmp_path / "imagefleet-data").exists()
