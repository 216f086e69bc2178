"""`imagefleet load --check`: what jobs name that workers would not find."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

from cli import console
from fleet.files.stored import Listing
from imagefleet.signing import SigningKey
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import SignerSettings, StorageSettings
from in_process import Imagefleet
from storages import flags

JOBS = [
    {"prompt": "a <lora:known:0.5>, <lora:known:0.2>", "model": "sd-1.5"},
    {"prompt": "b <lora:Known:1>", "model": "packed"},
    {"prompt": "c <lora:lost:1> <lora:known:1>", "model": "gone"},
    {"prompt": "d <lora:lost:0.1>"},
    *({"prompt": "e <lora:lost:1>"} for _ in range(3)),
    {"prompt": "f <lora:nested:1>"},
]

STORED = (
    "loras/known.safetensors",
    "loras/lost.txt",
    "loras/folder/nested.safetensors",
    "models/sd-1.5.safetensors",
    "models/packed.tar",
)


def in_storage(settings: StorageSettings, *names: str) -> None:
    async def fill() -> None:
        async with open_storage(settings) as storage:
            await storage.create()
            for name in names:
                await storage.files.create(name, b"x", "application/octet-stream", {})

    asyncio.run(fill())


def missing(result: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], Any]:
    found = json.loads(result.stdout)["missing"]
    return {(each["kind"], each["name"]): each for each in found}


def test_what_is_missing_is_told_with_its_jobs_and_nothing_is_sent(
    in_process: Imagefleet, jobs: Path, storage_settings: StorageSettings
):
    in_storage(storage_settings, *STORED)
    result = in_process(
        "load", "jobs.jsonl", "--check", "--json", *flags(storage_settings)
    )

    found = missing(result)
    assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert set(found) == {
        ("LoRA", "Known"),
        ("LoRA", "lost"),
        ("model", "gone"),
    } | ({("LoRA", "nested")} if not storage_settings.is_local else set())
    if not storage_settings.is_local:
        nested = found["LoRA", "nested"]["reason"]
        assert (
            nested
            == "loras/folder/nested.safetensors is in a folder: move it to loras/"
        )
    lost = found["LoRA", "lost"]
    assert (lost["jobs"], lost["places"]) == (5, ["line 3", "line 4", "line 5"])
    assert "did you mean 'known'?" in found["LoRA", "Known"]["reason"]
    document = json.loads(result.stdout)
    assert (document["jobs"], document["named"]) == (
        len(JOBS),
        {
            "loras": 4,
            "models": 3,
            "embeddings": 0,
            "upscalers": 0,
            "controlnets": 0,
            "vaes": 0,
            "detectors": 0,
            "judges": 0,
            "inputs": 0,
        },
    )
    assert next(iter(found)) == ("LoRA", "lost"), "what most jobs name comes first"
    assert [
        each.name for each in jobs.parent.iterdir() if "checkpoint" in each.name
    ] == []

    async def queued() -> int:
        async with open_storage(storage_settings) as storage:
            return (await storage.queue.depth()).messages

    assert asyncio.run(queued()) == 0


def test_a_person_reads_a_table_and_programs_the_exit_code(
    in_process: Imagefleet, jobs: Path, local_settings: StorageSettings
):
    in_storage(local_settings, *STORED)
    result = in_process("load", "jobs.jsonl", "--check", *flags(local_settings))

    row = next(line for line in result.stdout.splitlines() if "lost" in line)
    assert row.split()[:3] == ["LoRA", "lost", "5"]
    assert "line 3; line 4; line 5" in row
    assert "not in loras/" in row
    assert "8 jobs with 4 LoRAs, 3 models: 3 of them missing" in result.stderr
    jobs.write_text(json.dumps(JOBS[0]))
    complete = in_process("load", "jobs.jsonl", "--check", *flags(local_settings))
    assert complete.returncode == console.EXIT_DONE
    assert complete.stdout == ""
    assert "1 job with 1 LoRA, 1 model: none is missing" in complete.stderr


def test_a_folder_of_loras_and_models_from_elsewhere_count(
    in_process: Imagefleet,
    tmp_path,
    local_settings: StorageSettings,
    monkeypatch,
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.safetensors").write_bytes(b"x")
    (tmp_path / "jobs.txt").write_text("a <lora:own:1>\n")
    (tmp_path / "jobs.csv").write_text("prompt,model\na,elsewhere\nb,local-model\n")
    check = ("--check", *flags(local_settings))

    assert (
        in_process("load", "jobs.txt", *check).returncode
        == console.EXIT_OPERATOR_MUST_ACT
    )
    found = in_process("load", "jobs.txt", *check, "--lora-directory", "mine")
    assert found.returncode == console.EXIT_DONE
    gone = in_process("load", "jobs.txt", *check, "--lora-directory", "none")
    assert "--lora-directory none cannot be read: No such file" in gone.stderr
    monkeypatch.setenv("IMAGEFLEET_LORA_DIRECTORY", "mine")
    assert in_process("load", "jobs.txt", *check).returncode == console.EXIT_DONE

    models = ("--model", "elsewhere", "--model", "./models/local-model.safetensors")
    assert (
        in_process("load", "jobs.csv", *check).returncode
        == console.EXIT_OPERATOR_MUST_ACT
    )
    assert (
        in_process("load", "jobs.csv", *check, *models).returncode == console.EXIT_DONE
    )


def test_all_jobs_of_a_template_are_looked_through(
    in_process: Imagefleet, tmp_path, local_settings: StorageSettings
):
    (tmp_path / "t.yaml").write_text(
        "prompt: a {l}\nlists: {l: [{lora: often, weight: 200}, {lora: seldom}]}\n"
        "count: 3000\njob: {model: m2}\n"
    )
    in_storage(local_settings, "loras/often.safetensors", "models/m1.safetensors")
    result = in_process("load", "t.yaml", "--check", "--json", *flags(local_settings))

    found = missing(result)
    assert set(found) == {("LoRA", "seldom"), ("model", "m2")}
    assert found["model", "m2"]["jobs"] == 3000
    assert found["model", "m2"]["places"] == ["job 1", "job 2", "job 3"]


def test_with_a_signing_key_a_file_must_be_in_the_signed_list(
    in_process: Imagefleet, tmp_path, local_settings: StorageSettings
):
    """A worker with a trusted key uses no other file."""
    SigningKey.create(tmp_path / "key.pem")
    (tmp_path / "jobs.txt").write_text("<lora:listed:1>\n<lora:stored:1>\n")
    in_storage(local_settings, "loras/listed.safetensors", "loras/stored.safetensors")
    check = ("load", "jobs.txt", "--check", "--json", *flags(local_settings))
    signed = (*check, "--signing-key", "key.pem")
    assert in_process(*check).returncode == console.EXIT_DONE
    assert set(missing(in_process(*signed))) == {("LoRA", "listed"), ("LoRA", "stored")}

    async def list_one() -> None:
        settings = SignerSettings(
            **local_settings.model_dump(), signing_key=tmp_path / "key.pem"
        )
        async with open_storage(settings) as storage:
            await Listing(storage, "loras", settings.keys()).change(
                {"listed": "0" * 64}
            )

    asyncio.run(list_one())
    found = missing(in_process(*signed))
    assert set(found) == {("LoRA", "stored")}
    assert (
        "not listed in loras/manifest.json, which is signed"
        in found["LoRA", "stored"]["reason"]
    )


def test_images_and_files_of_their_passes_are_looked_for_as_well(
    in_process: Imagefleet, jobs: Path, storage_settings: StorageSettings
):
    in_storage(
        storage_settings,
        "inputs/cats/a.png",
        "upscalers/4x.safetensors",
        "controlnets/x.pth",
        "vaes/sharper.safetensors",
        "models/late.safetensors",
    )
    unit = {"image": "cats/a.png", "model": "canny [0123abcd]"}
    given = [
        {"prompt": "a", "init_images": ["cats/a.png"], "mask": "masks/1.webp"},
        {"prompt": "c", "enable_hr": True, "hr_upscaler": "4x"},
        {"prompt": "d", "enable_hr": True, "hr_upscaler": "4x_b"},
        {"prompt": "e", "alwayson_scripts": {"controlnet": {"args": [unit]}}},
        {"prompt": "g", "override_settings": {"sd_vae": "sharp.safetensors"}},
        {"prompt": "f", "then": [{"upscaler_1": "5x"}, {"upscaler_1": "Lanczos"}]},
        {"prompt": "h", "refiner_checkpoint": "later", "refiner_switch_at": 0.5},
        {"prompt": "i", "hr_checkpoint_name": "late [0123456789]", "enable_hr": True},
    ]
    jobs.write_text("".join(json.dumps(job) + "\n" for job in given))
    result = in_process(
        "load", "jobs.jsonl", "--check", "--json", *flags(storage_settings)
    )

    assert {key: each["reason"] for key, each in missing(result).items()} == {
        ("image", "masks/1.webp"): "not in inputs/",
        ("upscaler", "4x_b"): "not in upscalers/; did you mean '4x'?",
        ("upscaler", "5x"): "not in upscalers/",
        ("ControlNet", "canny"): "not in controlnets/",
        ("VAE", "sharp"): "not in vaes/; did you mean 'sharper'?",
        ("model", "later"): "not in models/; did you mean 'late'?",
    }
