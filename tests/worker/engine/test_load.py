import os
import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from imagefleet import errors
from imagefleet.files import contents
from worker import process
from worker.engine import device, load, phases
from worker.engine.checkpoint import load_checkpoint
from worker.engine.slots import memory
from worker.files import check
from worker.models.checkpoints import Checkpoint
from worker.settings import WorkerSettings

CPU = torch.device("cpu")

Pretend = Callable[..., None]


def test_without_torch_the_error_says_what_to_install(monkeypatch, checkpoint: Path):
    for name in ("worker.engine.slots.engine", "worker.engine.checkpoint"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delattr("worker.engine.slots.engine")
    monkeypatch.delattr("worker.engine.checkpoint")
    with pytest.raises(errors.SetupError, match=r"pip install \.\[worker\]"):
        load.load_engine(load.EngineSettings(checkpoint))


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("merged", "3 images at once"),
        (
            "reloaded",
            "1 image at once; layers are copied from the host's memory for other LoRAs",
        ),
    ],
)
def test_a_loaded_engine_says_what_fits(
    checkpoint: Path,
    caplog,
    weights: memory.SlotWeights,
    said: str,
):
    caplog.set_level("INFO")
    load.load_engine(
        load.EngineSettings(checkpoint, "cpu", slots=3, slot_weights=weights)
    )
    assert [each for each in caplog.messages if each.startswith("draws")] == [
        f"draws {said}"
    ]


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:99"])
def test_an_unknown_device_is_a_setup_error(checkpoint: Path, name: str):
    with pytest.raises(errors.SetupError, match=name):
        load.load_engine(load.EngineSettings(checkpoint, name))


def test_a_gpu_always_has_its_number(monkeypatch):
    """Some of torch's functions reject `cuda` without a number."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert device.find_device("auto") == torch.device("cuda", 0)
    assert device.find_device("cuda") == torch.device("cuda", 0)
    assert device.find_device("cuda:1") == torch.device("cuda", 1)


@pytest.fixture
def gpu(monkeypatch) -> Pretend:
    """Makes torch one for *cuda* whose GPU works, or that says why none does."""

    def pretend(cuda: str | None, said: str = "", *, works: bool = False) -> None:
        def init() -> None:
            raise RuntimeError(said)

        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: works)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: int(works))
        monkeypatch.setattr(torch.cuda, "init", init)

    return pretend


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12080)."
BROKEN = "CUDA unknown error"


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_driver_too_old_is_named_and_the_cpu_not_taken_for_the_gpu(
    name: str, gpu: Pretend
):
    gpu("13.0", TOO_OLD)
    too_old = (
        r"(?s)torch for CUDA 13.0: .*too old \(found version 12080\).*Update the driver"
    )
    with pytest.raises(errors.SetupError, match=too_old):
        device.find_device(name)
    assert device.find_device("cpu").type == "cpu"


def test_on_a_rented_node_a_driver_too_old_is_the_nodes_fault(
    gpu: Pretend,
):
    gpu("13.0", TOO_OLD)
    with pytest.raises(errors.NodeError, match="too old"):
        device.free_gpu_bytes("auto")


def test_a_gpu_that_the_driver_lists_and_torch_cannot_open_is_broken(
    gpu: Pretend,
):
    gpu("13.0", BROKEN)
    with pytest.raises(errors.NodeError, match="torch finds no CUDA GPU"):
        device.check_listed_gpu()


@pytest.mark.parametrize(
    ("one_of_several", "fault"), [("0", errors.NodeError), (None, errors.SetupError)]
)
def test_a_worker_takes_such_a_gpu_for_broken_if_its_parent_chose_it(
    gpu: Pretend,
    checkpoint: Path,
    one_of_several: str | None,
    fault: type[Exception],
):
    gpu("13.0", BROKEN)
    settings = WorkerSettings(model=str(checkpoint), device="cuda")
    worker = SimpleNamespace(
        _settings=settings, _one_of_several=one_of_several, _kernels=None, _own_files={}
    )
    with pytest.raises(fault, match="CUDA GPU"):
        process._Worker._load_engine(worker, Checkpoint("tiny", settings))


@pytest.mark.parametrize(
    ("cuda", "said"), [(None, "Torch not compiled with CUDA"), ("13.0", TOO_OLD)]
)
def test_a_torch_or_driver_that_only_the_operator_can_change_is_not_the_gpus_fault(
    cuda: str | None, said: str, gpu: Pretend
):
    gpu(cuda, said)
    device.check_listed_gpu()
    with pytest.raises(errors.SetupError):
        device.find_device("cuda")


@pytest.mark.parametrize(
    "set_by_user", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]
)
def test_the_users_settings_of_torchs_allocator_stay(
    gpu: Pretend, monkeypatch, set_by_user: str | None
):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)
    if set_by_user:
        monkeypatch.setenv(set_by_user, "max_split_size_mb:128")
    gpu("13.0", works=True)
    device.find_device("cuda")
    found = [os.environ[name] for name in names if name in os.environ]
    assert found == [
        "max_split_size_mb:128" if set_by_user else "expandable_segments:True"
    ]


@pytest.mark.parametrize(
    ("cuda", "said"),
    [
        (None, "Torch not compiled with CUDA enabled"),
        ("13.0", "Found no NVIDIA driver on your system."),
        ("13.0", BROKEN),
    ],
)
def test_a_machine_without_a_gpu_hears_nothing_of_drivers(
    cuda: str | None, said: str, gpu: Pretend, caplog
):
    gpu(cuda, said)
    caplog.set_level("INFO")

    assert device.find_device("auto").type == "cpu"
    assert not caplog.messages


def test_auto_precision_is_float32_on_a_cpu(checkpoint: Path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    engine = load.load_engine(load.EngineSettings(checkpoint))
    assert engine.checkpoint.unet.dtype == torch.float32


@pytest.mark.parametrize("name", ["auto", "bfloat16"])
def test_a_gpu_without_bfloat16_is_refused_before_it_draws_in_it(
    name: device.Precision, monkeypatch
):
    gpu = torch.device("cuda", 0)
    capabilities = iter([(7, 5), (8, 0)])
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda _: next(capabilities)
    )
    assert device.find_dtype("float16", gpu, "bfloat16") == torch.float16
    with pytest.raises(errors.SetupError, match=r"bfloat16: .* or --precision float32"):
        device.find_dtype(name, gpu, "bfloat16")
    assert device.find_dtype(name, gpu, "bfloat16") == torch.bfloat16


@pytest.mark.slow
def test_the_programs_in_the_documents_convert_and_complete_checkpoints(
    single_file: Path, checkpoint: Path, tmp_path, monkeypatch
):
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    convert, complete, state_v, _of_embeddings = re.findall(
        r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    whole_path = Path("whole.safetensors")
    shutil.copy(single_file, "another.safetensors")
    weights = {
        key: weight
        for key, weight in load_file(single_file).items()
        if "first_stage" not in key
    }
    torch.save({"state_dict": weights, "epoch": 3}, "model.ckpt")

    for program in (convert, complete, state_v):
        exec(compile(program, "models.md", "exec"), {})

    assert contents.identify(
        check.read_header(Path("model.safetensors"))
    ).name.endswith("without its VAE")
    check.check_path(whole_path)
    load_checkpoint(whole_path, CPU, torch.float32, checkpoint)
    assert check.prediction_type(Path("model-v.safetensors")) == "v_prediction"

    prefix = "first_stage_model."
    whole = load_file(whole_path)
    vae = {
        key.removeprefix(prefix): weight + 0.01
        for key, weight in whole.items()
        if key.startswith(prefix)
    }
    save_file({**vae, "loss.logvar": torch.zeros(1)}, "model.vae.safetensors")
    shutil.copy("whole.safetensors", "model.safetensors")
    with pytest.raises(errors.SetupError, match="lies beside the checkpoint"):
        check.check_path(Path("model.safetensors"))
    Path("vaes").mkdir()
    own = Path("model.vae.safetensors").rename("vaes/model.vae.safetensors")
    settings = load.EngineSettings(
        whole_path, "cpu", config=checkpoint, slots=1, vae=own
    )
    drawn_with = load.load_engine(settings).checkpoint.vae.decoder.conv_in.weight
    assert (drawn_with == vae["decoder.conv_in.weight"]).all()


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(phases, "time", clock)
    monkeypatch.setattr(phases, "seconds", dict.fromkeys(phases.seconds, 0.0))
    return clock


def fail(clock: Clock) -> None:
    with phases.timed("move"):
        clock.now += 4
        raise OSError("full")


def test_a_second_is_counted_once_by_the_innermost_phase(clock: Clock):
    with phases.timed("load"):
        clock.now += 1
        with phases.timed("move"):
            clock.now += 2
        with pytest.raises(OSError, match="full"):
            fail(clock)
        clock.now += 8
    with phases.timed("load"):
        clock.now += 16
    assert phases.described() == "load 25.0 s, move 6.0 s"


def test_phases_of_several_threads_overlap(clock: Clock):
    def compile_beside() -> None:
        with phases.timed("trace"):
            clock.now += 2

    with phases.timed("load"):
        thread = threading.Thread(target=compile_beside)
        thread.start()
        thread.join()
    assert phases.described() == "load 2.0 s, trace 2.0 s"
