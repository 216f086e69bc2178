import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from imagefleet import errors
from worker.engine.pixel import checkpoint as checkpoints
from worker.engine.pixel import schedules
from worker.files import check

pytestmark = pytest.mark.slow


@pytest.fixture
def copied(stage, tmp_path) -> Path:
    """A base stage to be damaged."""
    folder = tmp_path / "base"
    shutil.copytree(stage("base"), folder)
    return folder


def read(folder: Path) -> checkpoints.PixelCheckpoint:
    return checkpoints.load_checkpoint(folder, torch.device("cpu"), torch.float32)


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_stage_has_its_scheduler_and_its_sizes(stage):
    base = read(stage("base"))
    sr = read(stage("sr"))
    assert schedules.limit_of(base.noise).keywords["limit"] == 1.5
    assert schedules.limit_of(sr.noise).keywords["limit"] == 1.0
    assert base.image_noise is None
    assert len(sr.image_noise.scheduler.alphas_cumprod) == 1000
    assert (base.text_width, base.encoder) == (32, "tiny-t5")


@pytest.mark.parametrize("name", ["base", "sr"])
def test_the_check_before_torch_takes_a_stage_for_what_it_is(
    name: str, stage, without_encoder: Path
):
    check.check_path(stage(name))
    check.check_path(without_encoder)
    assert check.family(stage(name)).startswith("DeepFloyd IF")


def test_a_stage_without_its_unet_or_scheduler_is_refused(copied: Path):
    (copied / "scheduler" / "scheduler_config.json").unlink()
    with pytest.raises(
        errors.SetupError, match=r"has no scheduler/scheduler_config\.json"
    ):
        read(copied)
    (copied / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(errors.SetupError, match="has neither"):
        read(copied)
    with pytest.raises(errors.SetupError, match="unet"):
        check.check_path(copied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_channels": 3}, r"cannot be loaded|out_channels"),
        ({"class_embed_type": "timestep"}, r"lacks|class_embed_type"),
        (
            {"class_embeddings_concat": True},
            r"cannot be loaded|class_embeddings_concat",
        ),
        ({"sample_size": [16, 32]}, "sample_size is no number"),
    ],
)
def test_another_architecture_is_refused(changes, message: str, copied: Path):
    change(copied / "unet" / "config.json", **changes)
    with pytest.raises(errors.SetupError, match=message):
        read(copied)


def test_a_super_resolution_stage_needs_its_second_scheduler(stage, tmp_path):
    folder = tmp_path / "sr"
    shutil.copytree(stage("sr"), folder)
    shutil.rmtree(folder / "image_noising_scheduler")
    with pytest.raises(errors.SetupError, match="has no image_noising_scheduler"):
        read(folder)


def test_a_base_is_no_super_resolution_stage(copied: Path):
    change(copied / "model_index.json", _class_name="IFSuperResolutionPipeline")
    with pytest.raises(errors.SetupError, match="in_channels is 3"):
        read(copied)
