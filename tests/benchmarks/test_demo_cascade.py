"""The training of the demo's cascade: what it learns from, that it continues, and what it writes.

A few steps, on a CPU: that the cascade draws well is measured (`demo_world/cascade/measure.py`).
"""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from demo_world import captions
from demo_world.cascade import losses, measure, networks, pictures, stage, train
from demo_world.cascade.losses import StageLoss
from worker.engine import contract
from worker.engine.pixel import checkpoint
from worker.engine.pixel.parts import StagePreparer

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")

STEPS = {"base": 3, "sr": 2}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    # Two threads on a busy machine wait for each other: 5x slower.
    torch.set_num_threads(1)


def run(folder: Path, *more: str) -> None:
    """Trains both stages for `STEPS`, or goes on with it."""
    options = [
        "--out",
        str(folder),
        "--state",
        str(folder / "state.pt"),
        "--processes",
        "0",
    ]
    options += ["--pictures", "6", "--base-batch", "2", "--sr-batch", "2"]
    for name, steps in STEPS.items():
        options += [f"--{name}-steps", str(steps), f"--{name}-seconds", "600"]
    train.main([*options, *more])


def steps_of(folder: Path) -> dict[str, int]:
    state = torch.load(folder / "state.pt", weights_only=True)
    return {name: each["step"] for name, each in state.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cascade")
    run(folder)
    return folder


def test_both_stages_are_trained_to_their_limits_and_fit_the_repository(
    trained: Path,
) -> None:
    assert steps_of(trained) == STEPS
    sizes = [
        each.stat().st_size for name in STEPS for each in (trained / name).rglob("*.*")
    ]
    assert sum(sizes) <= 8_000_000
    kinds = set()
    for path in trained.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            kinds |= {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    assert kinds == {"F16"}


def test_a_signal_ends_it_after_the_step_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = 0
    take_step = stage.StageTraining._step

    def interrupted(self: Any, *given: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:  # the first of the second stage
            signal.raise_signal(signal.SIGTERM)
        return take_step(self, *given)

    monkeypatch.setattr(stage.StageTraining, "_step", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    run(tmp_path)
    assert steps_of(tmp_path) == {"base": 3, "sr": 1}
    assert "stopped: the same command continues" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before

    run(tmp_path)

    assert steps_of(tmp_path) == STEPS
    assert steps == 5  # nothing was done twice


def test_the_stages_can_be_written_from_the_state_alone(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "Pictures", None)  # nothing is drawn for that
    train.main(
        ["--only-save", "--state", str(trained / "state.pt"), "--out", str(tmp_path)]
    )

    for name in STEPS:
        weights = sorted(
            path.relative_to(trained / name) for path in _weights(trained / name)
        )
        assert len(weights) == 2
        for path in weights:
            assert (tmp_path / name / path).read_bytes() == (
                trained / name / path
            ).read_bytes()


def _weights(folder: Path) -> list[Path]:
    return list(folder.rglob("*.safetensors"))


def test_what_is_written_is_the_moving_average(trained: Path) -> None:
    state = torch.load(trained / "state.pt", weights_only=True)["base"]
    live = state["unet"]["conv_in.weight"]
    _, averages = state["average"]
    (average,) = [each for each in averages if each.shape == live.shape]
    with safe_open(
        trained / "base/unet/diffusion_pytorch_model.safetensors", "pt"
    ) as file:
        written = file.get_tensor("conv_in.weight")

    assert torch.equal(written, average.half())
    assert not torch.equal(written, live.half())


def test_the_workers_engine_draws_with_both_stages_and_the_judge_reads_them(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = tmp_path / "sheet.png"
    options = [
        "--model",
        str(trained),
        "--captions",
        "3",
        "--steps",
        "2",
        "--sr-steps",
        "2",
    ]
    measure.main(
        [*options, "--sheet", str(sheet), "--sheet-images", "2", "--device", "cpu"]
    )

    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["captions"] == 3
    assert figures["object_accuracy"] == 0  # three steps teach nothing
    with Image.open(sheet) as image:
        small = np.asarray(image)[:176, :176]
    # The base's pixels, each 11 on a side.
    assert np.array_equal(
        small, small[::11, ::11].repeat(11, axis=0).repeat(11, axis=1)
    )


def test_the_judge_finds_what_a_program_drew_in_the_cascades_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    measure.main(["--drawn", "--captions", "20"])

    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["object_accuracy"] >= 0.95
    assert figures["colour_accuracy"] >= 0.9


def test_the_second_stage_is_trained_on_what_the_engine_gives_it(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    blocks = torch.from_numpy(image).permute(2, 0, 1).repeat_interleave(4, 1)
    drawn = blocks.repeat_interleave(4, 2)[None]
    loaded = checkpoint.load_checkpoint(trained / "sr", CPU, torch.float32)
    enlarged = StagePreparer(loaded)._read_image(contract.InitImage(image, 0.25))
    assert enlarged is not None
    assert loaded.image_noise is not None
    monkeypatch.setattr(losses.torch, "rand", lambda *_, **__: torch.full((1,), 0.5))
    monkeypatch.setattr(losses.torch, "randn_like", torch.zeros_like)

    loss = StageLoss("sr", networks.make_scheduler("sr"), CPU)
    _, given, levels = loss._prepare(drawn)

    assert enlarged.level == 250
    assert levels is not None
    assert levels.tolist() == [250]
    share = loaded.image_noise.scheduler.alphas_cumprod[250].sqrt()
    torch.testing.assert_close(given, share * enlarged.image[None])


@pytest.mark.parametrize("name", ["base", "sr"])
def test_the_loss_is_none_for_a_true_prediction_at_the_least_variance(
    name: networks.StageName,
) -> None:
    scheduler = networks.make_scheduler(name)
    alphas = scheduler.alphas_cumprod
    drawn = torch.randint(0, 256, (8, 3, 64, 64), dtype=torch.uint8)
    side = networks.SIDES[name]
    target = torch.nn.functional.adaptive_avg_pool2d(drawn.float(), side) / 127.5 - 1

    def oracle(x: torch.Tensor, timesteps: torch.Tensor, **_: Any) -> Any:
        alpha = alphas[timesteps][:, None, None, None]
        noise = (x[:, :3] - alpha.sqrt() * target) / (1 - alpha).sqrt()
        predicted = (
            noise
            if name == "base"
            else alpha.sqrt() * noise - (1 - alpha).sqrt() * target
        )
        share = -torch.ones_like(noise)
        return type("Output", (), {"sample": torch.cat([predicted, share], dim=1)})

    loss = StageLoss(name, scheduler, CPU)
    of_prediction, of_variance = loss(oracle, drawn, torch.zeros(8, 77, 96))

    assert float(of_prediction) < 1e-3
    assert abs(float(of_variance)) < 1e-3


def test_the_variance_is_best_where_it_covers_the_estimates_error() -> None:
    loss = StageLoss("base", networks.make_scheduler("base"), CPU)
    timesteps = torch.full((4,), 500)
    missed = torch.full((4, 3, 16, 16), 0.1)
    shares = torch.linspace(-1, 1, 201)
    bounds = [float(loss._variance(timesteps, missed, share)) for share in shares]
    best = shares[int(np.argmin(bounds))]
    small, large = loss._small_log[500], loss._large_log[500]
    log = float((best + 1) / 2 * (large - small) + small)
    expected = float(small.exp()) + (0.1 * float(loss._of_image[500])) ** 2

    assert log == pytest.approx(np.log(expected), abs=0.01)


def test_its_captions_are_words_of_the_tokenizer_and_never_spelled() -> None:
    tokenizer = networks.build_tokenizer()
    known = captions.world_words()
    for _, text in pictures.held_out_scenes(100, seed=1):
        pieces = tokenizer.tokenize(text)
        assert {piece for piece in pieces if piece != ","} <= {
            f"▁{word}" for word in known
        }


def test_pictures_of_a_seed_are_the_same_in_any_process() -> None:
    (images, texts), (again, same_texts) = [
        pictures.draw_block(1, 7, 3) for _ in range(2)
    ]

    assert images.shape == (3, 64, 64, 3)
    assert np.array_equal(images, again)
    assert texts == same_texts
    assert len(texts) == 3 * pictures.CAPTIONS_EACH
