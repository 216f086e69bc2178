"""Fleet files that say which models their workers serve."""

from pathlib import Path

import pytest

from fleet.salad import file as salad_file
from fleet.salad import gpus
from fleet.scale import command as scale
from imagefleet import errors
from imagefleet.pricing import families
from imagefleet.storage.settings import job_queue
from in_process import Imagefleet, told

EXAMPLE = Path(__file__).parents[3] / "deploy" / "salad" / "sdxl.yaml"
NAMES = ["illustrious-xl", "pony-v6"]
TWO = "  store:illustrious-xl.safetensors: sdxl\n  store:pony-v6.safetensors: sdxl\n"


def read(folder: Path, old: str = "", new: str = "") -> salad_file.FleetFile:
    text = EXAMPLE.read_text()
    assert old in text
    path = folder / "sdxl.yaml"
    path.write_text(text.replace(old, new) if old else text)
    return salad_file.read_file(path)


def test_workers_get_the_models_and_the_operator_sees_their_queues(
    in_process: Imagefleet,
):
    ended = in_process("deploy", "apply", "--render", "--file", str(EXAMPLE), "--json")

    found = told(ended)
    environment = found["groups"][0]["container"]["environment_variables"]
    given = environment["IMAGEFLEET_MODEL"]
    assert given == "store:illustrious-xl.safetensors,store:pony-v6.safetensors"
    queues = [job_queue("jobs", name) for name in NAMES]
    assert [(each["name"], each["queue"]) for each in found["models"]] == list(
        zip(NAMES, queues, strict=True)
    )
    shown = in_process("deploy", "apply", "--render", "--file", str(EXAMPLE)).stdout
    assert f"Serves pony-v6 (SDXL), from the queue {queues[1]}." in shown


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("store:pony-v6.safetensors", "pony-v6"),
        ("store:a folder.tar", "a folder"),
        ("/models/checkpoint", "checkpoint"),
        ("/models/v1.5.safetensors", "v1.5"),
        ("https://host/x/pony.safetensors", "pony"),
    ],
)
def test_a_model_has_the_name_that_jobs_give_it(text: str, name: str):
    assert salad_file.name_of(text) == name


def test_a_gpu_class_with_too_little_memory_is_refused(tmp_path):
    file = read(tmp_path, "  - RTX 3090\n", "  - RTX 2060\n")

    with pytest.raises(
        errors.SetupError, match=r"RTX 2060 6GB has too little memory for SDXL"
    ):
        file.gpu_classes(gpus.built_in())
    sd1 = read(tmp_path, TWO, "  /models/dreamshaper-8: sd1\n")
    assert len(sd1.gpu_classes(gpus.built_in())) == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "environment:\n",
            "environment:\n  IMAGEFLEET_MODEL: /m\n",
            "IMAGEFLEET_MODEL does not go with these `models`",
        ),
        (
            "environment:\n",
            f"environment:\n  IMAGEFLEET_MODEL_SHA256: {'a' * 64}\n",
            "does not go with these `models`",
        ),
        (
            TWO,
            "  /a/x.safetensors: sdxl\n  store:x.safetensors: sd1\n",
            "have one name",
        ),
        (TWO, "  store:*: sdxl\n", "name each model by itself"),
        (TWO, "  https://host/x.safetensors?token=abc: sdxl\n", "without a token"),
        (TWO, "  https://host/x.safetensors?token=abc: 5\n", "without a token"),
        (TWO, "  store:../x: sdxl\n", "models:"),
        (TWO, "  /models/x: sd3\n", "the family of x should be one of sd1, sd2"),
    ],
)
def test_what_workers_would_refuse_is_refused_before_it_reaches_them(
    old: str, new: str, message: str, tmp_path
):
    with pytest.raises(errors.SetupError, match="the fleet file") as raised:
        read(tmp_path, old, new)
    assert message in raised.value.message
    assert "abc" not in raised.value.message, "a token"


def test_the_scaler_assumes_the_slowest_class_on_the_first_model(
    tmp_path,
):
    sdxl = scale._assumed_speed(read(tmp_path))
    both = scale._assumed_speed(
        read(tmp_path, "pony-v6.safetensors: sdxl", "a.tar: sd1")
    )
    sd1 = scale._assumed_speed(read(tmp_path, TWO, "  /models/a: sd1\n"))

    assert sdxl is not None
    assert sdxl == both
    assert sdxl.jobs_per_second == families.FAMILIES["sdxl"].images_per_second(1.63)
    assert sd1 is not None
    assert sd1.jobs_per_second == pytest.approx(1.63)


def test_the_scaler_does_not_rent_for_twenty_guided_steps_where_four_of_one_row_are_drawn(
    tmp_path,
):
    added = "environment:\n  IMAGEFLEET_ACCELERATOR: sdxl_lightning_4step_lora\n"
    few, usual = (
        scale._assumed_speed(file)
        for file in (read(tmp_path, "environment:\n", added), read(tmp_path))
    )

    assert few is not None
    assert usual is not None
    assert few.jobs_per_second / usual.jobs_per_second == pytest.approx(7.11, abs=0.01)


def test_the_scaler_counts_the_queues_of_its_file(
    salad, in_process: Imagefleet, tmp_path
):
    file = tmp_path / "fleet.yaml"
    lines = "replicas: 40\nmodels: {store:pony.tar: sdxl}\n"
    text = file.read_text().replace("replicas: 750\n", lines)
    file.write_text(text.replace("  IMAGEFLEET_MODEL: /models/checkpoint\n", ""))
    assert in_process("deploy", "apply", "--yes").returncode == 0
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text(
        '{"prompt": "a", "model": "pony"}\n' * 5
        + '{"prompt": "a", "model": "dream"}\n' * 4
    )
    sent = in_process("load", str(jobs), "--model", "pony", "--model", "dream")
    assert sent.returncode == 0, sent.stderr

    ended = in_process(
        "scale",
        "--dollars-per-hour",
        "15",
        "--max-dollars",
        "100",
        "--once",
        "--dry-run",
        "--json",
        "--images-per-second",
        "1",
    )

    decision = told(ended)
    assert decision["messages"] == 5, "those of the other model are for another fleet"
    assert decision["wanted"] == 1
