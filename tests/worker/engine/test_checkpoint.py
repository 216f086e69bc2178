import json
import shlex
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file

import key_names
import tiny_model
from drawing import difference, draw, make_request
from imagefleet import errors
from worker.engine import checkpoint as checkpoints
from worker.engine import contract, load
from worker.engine.families.table import SD1
from worker.files import check, model
from worker.settings import WorkerSettings


def load_checkpoint(
    model: Path, config: Path | None = None, prediction_type: str | None = None
) -> checkpoints.Checkpoint:
    cpu = torch.device("cpu")
    return checkpoints.load_checkpoint(
        model, cpu, torch.float32, config, prediction_type
    )


def assert_refused(reason: str, model: Path, config: Path | None = None) -> None:
    with pytest.raises(errors.SetupError, match=reason):
        load_checkpoint(model, config)


def load_engine(model: Path, config: Path | None = None) -> contract.Engine:
    settings = load.EngineSettings(model, "cpu", config=config, slots=1)
    return load.load_engine(settings)


@pytest.fixture
def copy(small_model: Path, tmp_path) -> Path:
    return Path(shutil.copytree(small_model, tmp_path / "copy"))


@pytest.fixture(scope="module")
def sums(checkpoint: Path, small_model: Path) -> dict[Path, object]:
    """The sums of the weights that both have as they are."""
    return {
        each: load_checkpoint(each).weight_sums for each in (checkpoint, small_model)
    }


def test_loading_touches_no_network(checkpoint: Path, single_file: Path, monkeypatch):
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a connection was tried")

    for weight_mode in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, weight_mode, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load_checkpoint(checkpoint)
    load_checkpoint(single_file, checkpoint)


def test_a_single_file_draws_the_same_as_the_folder(
    engine,
    checkpoint: Path,
    single_file: Path,
):
    single = load_engine(single_file, checkpoint)
    assert single.model_name == "tiny"
    (image,) = draw(single, make_request())
    assert difference(image, draw(engine, make_request())[0]) == 0


def test_a_single_file_finds_the_folder_of_its_own_name(
    checkpoint: Path, single_file: Path, tmp_path
):
    beside = tmp_path / "copy.safetensors"
    shutil.copytree(checkpoint, tmp_path / "copy")
    shutil.copy(single_file, beside)
    assert load_checkpoint(beside).name == "copy"


@pytest.fixture(scope="module")
def with_clips_vocabulary(tmp_path_factory) -> Path:
    """A tiny checkpoint in diffusers format, without a tokenizer."""
    folder = tmp_path_factory.mktemp("clip") / "tiny"
    return tiny_model.build_tiny_checkpoint(folder, clips_tokenizer=True)


def test_a_single_file_alone_is_enough(
    with_clips_vocabulary: Path, tmp_path, monkeypatch
):
    """Its tokenizer is the package's, its configuration SD1.5's: here with the tiny widths."""
    parts = {
        "unet": SD1.unet_config,
        "vae": SD1.vae_config,
        "text_encoder": SD1.text_encoders[0].config,
    }
    for part, built_in in parts.items():
        config = json.loads((with_clips_vocabulary / part / "config.json").read_text())
        for name, value in config.items():
            monkeypatch.setitem(built_in, name, value)
    path = tmp_path / "alone" / "dreams.safetensors"
    path.parent.mkdir()
    save_file(key_names.original_layout(with_clips_vocabulary), path)

    loaded = load_checkpoint(path)

    # All of SD1.5's levels are in it.
    assert loaded.weight_sums == load_checkpoint(with_clips_vocabulary).weight_sums
    assert loaded.name == "dreams"
    assert loaded.tokenizer("a red house").input_ids == [49406, 320, 736, 1212, 49407]
    assert loaded.prediction_type == "epsilon"


@pytest.mark.parametrize(
    "name", ["v1.5.safetensors", "dream.v2", "dream", "Dream.SafeTensors"]
)
def test_a_file_of_any_suffix_has_the_name_by_which_jobs_ask_its_worker_for_it(
    name: str, single_file: Path, checkpoint: Path, tmp_path
):
    """Or the worker would hand the jobs of its own model back forever."""
    path = tmp_path / name
    path.write_bytes(single_file.read_bytes())
    settings = WorkerSettings(model=path, storage=f"local:{tmp_path}")
    assert model.name_of(settings) == load_checkpoint(path, checkpoint).name


def test_a_folder_without_a_tokenizer_has_clips_if_its_vocabulary_fits(
    with_clips_vocabulary: Path, tmp_path
):
    assert len(load_checkpoint(with_clips_vocabulary).tokenizer) == 49_408
    path = tmp_path / "tiny.safetensors"
    save_file(key_names.original_layout(with_clips_vocabulary), path)
    assert len(load_checkpoint(path, with_clips_vocabulary).tokenizer) == 49_408


def test_a_config_folder_without_a_configuration_is_named(single_file: Path, tmp_path):
    assert_refused(r"nowhere' has no configuration", single_file, tmp_path / "nowhere")


Weights = dict[str, torch.Tensor]


def without_text_model(weights: Weights) -> Weights:
    return {
        key.replace("transformer.text_model.", "transformer."): weights[key]
        for key in weights
    }


def with_positions(weights: Weights, kind: torch.dtype) -> Weights:
    key = "cond_stage_model.transformer.text_model.embeddings.position_ids"
    return weights | {key: torch.arange(77).unsqueeze(0).to(kind)}


def with_averages(weights: Weights) -> Weights:
    unet = {
        key: key.split(".", 1)[1]
        for key in weights
        if key.startswith("model.diffusion_model")
    }
    flat = {key: f"model_ema.{name.replace('.', '')}" for key, name in unet.items()}
    averages = {name: weights[key] * 2 for key, name in flat.items()}
    others = {
        "model_ema.decay": torch.tensor(0.9999),
        "model_ema.num_updates": torch.tensor(7),
    }
    return weights | averages | others | {"betas": torch.zeros(1000)}


def in_mixed_precision(weights: Weights) -> Weights:
    kinds = (torch.float16, torch.bfloat16, torch.float32)
    return {key: weights[key].to(kinds[at % 3]) for at, key in enumerate(weights)}


@pytest.mark.parametrize(
    "change",
    [
        without_text_model,
        lambda weights: with_positions(weights, torch.int64),
        lambda weights: with_positions(weights, torch.float16),
        with_averages,
    ],
    ids=["no text_model", "integer positions", "float positions", "EMA beside"],
)
def test_variants_of_single_files_are_the_same_checkpoint(
    change: Callable[[Weights], Weights],
    tmp_path,
    checkpoint: Path,
    sums: dict[Path, object],
    capfd,
):
    path = tmp_path / "variant.safetensors"
    save_file(change(key_names.original_layout(checkpoint)), path)
    assert load_checkpoint(path, checkpoint).weight_sums == sums[checkpoint]
    assert "EMA" not in capfd.readouterr().err


def test_a_file_in_mixed_precision_is_read_in_one(tmp_path, checkpoint: Path):
    path = tmp_path / "mixed.safetensors"
    save_file(in_mixed_precision(key_names.original_layout(checkpoint)), path)
    networks = load_checkpoint(path, checkpoint).networks.values()
    found = {each.dtype for network in networks for each in network.parameters()}
    assert found == {torch.float32}


def test_v_prediction_holds_where_no_scheduler_says_otherwise(
    single_file: Path, checkpoint: Path, tmp_path
):
    config = Path(shutil.copytree(checkpoint, tmp_path / "config"))
    scheduler = config / "scheduler" / "scheduler_config.json"
    assert load_checkpoint(single_file, config).prediction_type == "epsilon"
    assert (
        load_checkpoint(single_file, config, "v_prediction").prediction_type
        == "v_prediction"
    )
    scheduler.write_text('{"prediction_type": "epsilon"}')
    assert (
        load_checkpoint(single_file, config, "v_prediction").prediction_type
        == "epsilon"
    )
    scheduler.write_text('{"prediction_type": "sample"}')
    assert_refused("predicts 'sample'", single_file, config)


def test_a_float16_variant_is_found(copy: Path):
    weights = copy / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_name("diffusion_pytorch_model.fp16.safetensors"))
    assert load_checkpoint(copy).unet.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_folder_of_half_precision_takes_no_more_memory_and_is_the_same_checkpoint(
    copy: Path, dtype: torch.dtype, monkeypatch
):
    def convert(to: torch.dtype) -> None:
        for path in copy.rglob("*.safetensors"):
            weights = load_file(path)
            save_file(
                {
                    key: each.to(dtype).to(to) if each.is_floating_point() else each
                    for key, each in weights.items()
                },
                path,
                {"format": "pt"},
            )

    read_dtypes = []

    def placements(*arguments: Any) -> Any:
        networks = arguments[1]
        read_dtypes.append(
            {
                each.dtype
                for network in networks.values()
                for each in network.parameters()
            }
        )
        return original(*arguments)

    original = checkpoints._placements
    monkeypatch.setattr(checkpoints, "_placements", placements)
    convert(torch.float32)
    whole = load_checkpoint(copy)
    convert(dtype)
    half = load_checkpoint(copy)

    assert read_dtypes == [{torch.float32}, {dtype}]
    assert half.unet.dtype == half.vae.dtype == half.text_encoder.dtype == torch.float32
    assert half.weight_sums == whole.weight_sums


def test_images_drawn_while_another_checkpoint_is_read_have_their_own_noise(
    copy: Path, monkeypatch
):
    """The default type is the whole process': in float16, torch's noise has other numbers."""
    set_to = []
    monkeypatch.setattr(torch, "set_default_dtype", set_to.append)
    for path in copy.rglob("*.safetensors"):
        save_file({key: each.half() for key, each in load_file(path).items()}, path)
    load_checkpoint(copy)
    assert not set_to


def test_weights_in_several_files_are_read_and_no_other_files(
    copy: Path, small_model: Path, sums: dict[Path, object]
):
    """SD1.5's own release has the same weights without their average beside the UNet's."""
    whole = copy / "unet" / "diffusion_pytorch_model.safetensors"
    weights = load_file(whole)
    whole.unlink()
    places = {}
    for number, key in enumerate(weights):
        places[key] = (
            f"diffusion_pytorch_model-{number % 2 + 1:05}-of-00002.safetensors"
        )
    for name in set(places.values()):
        save_file(
            {key: weights[key] for key in weights if places[key] == name},
            copy / "unet" / name,
        )
    index = whole.with_name(f"{whole.name}.index.json")
    index.write_text(json.dumps({"weight_map": places}))
    other = {key: torch.zeros_like(each) for key, each in weights.items()}
    save_file(other, whole.with_name("diffusion_pytorch_model.non_ema.safetensors"))
    assert load_checkpoint(copy).weight_sums == sums[small_model]

    index.unlink()
    assert_refused("nor an index of its parts", copy)


def test_key_names_of_older_folders_are_read(
    copy: Path, small_model: Path, sums: dict[Path, object]
):
    """As in SD1.5's own release: the VAE's attention, and the text encoder's extra level."""
    renamed = {
        "vae/diffusion_pytorch_model.safetensors": [
            (".to_q.", ".query."),
            (".to_k.", ".key."),
            (".to_v.", ".value."),
            (".to_out.0.", ".proj_attn."),
        ],
        "text_encoder/model.safetensors": [("", "text_model.")],
    }
    for name, pairs in renamed.items():
        weights = load_file(copy / name)
        for new, old in pairs:
            weights = {
                key.replace(new, old, 1): weight for key, weight in weights.items()
            }
        save_file(weights, copy / name, {"format": "pt"})
    assert load_checkpoint(copy).weight_sums == sums[small_model]


def test_a_model_that_does_not_exist_is_named(tmp_path):
    assert_refused(r"gone\.safetensors", tmp_path / "gone.safetensors")


def test_a_folder_without_a_tokenizer_names_it(copy: Path):
    shutil.rmtree(copy / "tokenizer")
    assert_refused("tokenizer", copy)


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_weights_that_are_cut_off_missing_or_of_another_shape_name_their_folder(
    copy: Path, part: str
):
    (file,) = (copy / part).glob("*.safetensors")
    whole = load_file(file)
    refused = rf"copy/{part}' cannot be loaded"
    lacking = {name: whole[name] for name in whole if name != max(whole)}
    bias = next(name for name in sorted(whole) if name.endswith("bias"))
    for weights, reason in (
        (lacking, f"{refused}: it lacks 1 of its weights"),
        (whole | {bias: torch.zeros(3)}, refused),
    ):
        save_file(weights, file, {"format": "pt"})
        assert_refused(reason, copy)
    file.write_bytes(file.read_bytes()[:-100])
    assert_refused(refused, copy)


@pytest.mark.parametrize("number", [float("nan"), float("-inf"), 1e6])
def test_weights_that_are_no_numbers_are_the_files_fault_not_the_nodes(
    number: float, copy: Path
):
    path = copy / "unet" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["conv_out.weight"][0, 0, 0, 0] = number
    save_file(weights, path)
    with pytest.raises(
        errors.SetupError, match=r"copy' is damaged: it .* in unet\.conv_out\.weight"
    ):
        checkpoints.load_checkpoint(copy, torch.device("cpu"), torch.float16)
    if number == 1e6:  # which float32 holds
        load_checkpoint(copy)


def test_the_command_that_refuses_a_pickle_converts_it(single_file: Path, tmp_path):
    path = tmp_path / "it's old.ckpt"
    torch.save(load_file(single_file), path)
    with pytest.raises(errors.SetupError) as refused:
        check.check_path(path)
    command = shlex.split(refused.value.message.partition("convert it: ")[2])
    *start, program = command
    assert start == ["python", "-c"]
    exec(program, {})
    check.check_path(path.with_suffix(".safetensors"))


@pytest.mark.parametrize("name", ["model.ckpt", "model.safetensors"])
def test_a_pickled_checkpoint_is_never_loaded(tmp_path, checkpoint: Path, name: str):
    torch.save({"state_dict": {}}, tmp_path / name)
    assert_refused(f"{name}' cannot be loaded", tmp_path / name, checkpoint)


def test_a_single_file_of_another_architecture_is_refused(
    tmp_path, checkpoint: Path, single_file: Path
):
    weights = load_file(single_file)
    other = tmp_path / "other.safetensors"
    save_file(
        {name: weight for name, weight in weights.items() if "cond_stage" not in name},
        other,
    )
    assert_refused(r"other.safetensors' is no checkpoint", other, checkpoint)
    (lone,) = [name for name in weights if name.endswith("time_embed.0.bias")]
    del weights[lone]
    save_file(weights, other)
    assert_refused("cannot be loaded: it lacks 1", other, checkpoint)


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("unet", {"in_channels": 9}, "cannot be loaded"),
        ("text_encoder", {"hidden_size": 64}, "cannot be loaded"),
        ("scheduler", {"beta_schedule": "linear"}, "noise schedule"),
    ],
)
def test_a_mismatched_configuration_is_refused(
    copy: Path, part: str, change: dict[str, object], reason: str
):
    (file,) = (path for path in (copy / part).glob("*config.json"))
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert_refused(reason, copy)


def test_a_tokenizer_of_another_model_is_refused(copy: Path):
    config = copy / "text_encoder" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 100}))
    file = copy / "text_encoder" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("token_embedding.weight"))
    weights[name] = weights[name][:100].contiguous()
    save_file(weights, file, {"format": "pt"})
    assert_refused("another text encoder", copy)


@pytest.mark.parametrize(("text", "what"), [("{", "JSON"), ("[]", "a JSON object")])
def test_a_damaged_configuration_is_named(copy: Path, text: str, what: str):
    (copy / "scheduler" / "scheduler_config.json").write_text(text)
    assert_refused(f"scheduler_config.json' is not {what}", copy)


def test_damaged_positions_are_kept_as_they_are_and_told(
    tmp_path, checkpoint: Path, caplog
):
    """Merging in float16 rounds 41 to 40.9, which AUTOMATIC1111 takes for 40."""
    weights = with_positions(key_names.original_layout(checkpoint), torch.float32)
    key = "cond_stage_model.transformer.text_model.embeddings.position_ids"
    weights[key][0, 41] = 40.9
    path = tmp_path / "merged.safetensors"
    save_file(weights, path)
    cpu = torch.device("cpu")
    loaded = checkpoints.load_checkpoint(path, cpu, torch.float32, checkpoint)
    damaged = [*range(41), 40, *range(42, 77)]
    (numbers,) = loaded.text_encoder.buffers()
    assert numbers.flatten().tolist() == damaged
    messages = [each.getMessage() for each in caplog.records]
    assert (
        "1 of the position_ids of 'merged.safetensors' are damaged: it draws with them, as"
        " AUTOMATIC1111 does"
    ) in messages
    exchanged = load_checkpoint(checkpoint).exchange(loaded)
    (numbers,) = exchanged.text_encoder.buffers()
    assert numbers.flatten().tolist() == damaged
