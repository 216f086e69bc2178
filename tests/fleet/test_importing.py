"""`imagefleet import`: what becomes of pictures, of the files they name, and of malicious ones."""

import asyncio
import hashlib
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from safetensors.numpy import save_file

import bombs
from cli import console
from header_files import file_of, lora_of
from imagefleet import errors
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from in_process import Imagefleet, assert_refused
from loadgen.infotext import comfyui, source
from worker.files import manifest

CASES = Path(__file__).parents[1] / "loadgen" / "infotext" / "cases"

PARAMETERS = "Steps: 20, Sampler: Euler a, CFG scale: 7, Seed: 5, Size: 512x512"


def picture(
    path: Path, text: str, key: str = "parameters", *, packed: bool = False
) -> Path:
    texts = PngImagePlugin.PngInfo()
    texts.add_text(key, text, zip=packed)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(path, pnginfo=texts)
    return path


def lines(text: str) -> list[JSONDict]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_file_of_a_folder_is_a_job_or_refused_by_its_name(
    in_process: Imagefleet, tmp_path
):
    files = {each.name for each in CASES.iterdir() if each.suffix in source.SUFFIXES}

    result = in_process("import", str(CASES), "--rejects", "refused.jsonl")

    jobs = lines(result.stdout)
    refused = lines((tmp_path / "refused.jsonl").read_text())
    places = {Path(each["failure"]["place"]).name for each in refused}
    assert len(jobs) + len(places) == len(files)
    assert (
        {"no-metadata.png", "comfy-damaged.png", "comfy-custom-node.png"}
        <= places
        <= files
    )
    (empty,) = (
        each["failure"] for each in refused if "no-metadata" in each["failure"]["place"]
    )
    assert empty["reason"] == "the file holds no parameters"
    assert (
        "a1111-1.10-img2img.png is skipped: init_images: must be given" in result.stderr
    )
    assert f"showing 10 of {len(refused)}; all are in refused.jsonl" in result.stderr
    assert (
        result.returncode == console.EXIT_IMAGES_WRONG
    )  # nor are their models anywhere


def test_a_scale_of_zero_is_the_negative_prompt_alone_as_it_was(
    in_process: Imagefleet, tmp_path
):
    text = PARAMETERS.replace("CFG scale: 7", "CFG scale: 0")
    picture(tmp_path / "one.png", f"a cat\nNegative prompt: a dog\n{text}")
    (job,) = lines(in_process("import", "one.png").stdout)
    assert (job["cfg_scale"], job["defaults"]) == (0, "a1111-1.10")


def test_its_jobs_are_loaded_as_they_are_and_have_the_names_of_their_pictures(
    in_process: Imagefleet, tmp_path
):
    picture(tmp_path / "in" / "sub" / "Cat 1.PNG", f"a cat\n{PARAMETERS}")
    (tmp_path / "in" / "sub" / "Cat 1.txt").write_text(
        "the caption of the picture beside it"
    )
    (tmp_path / "in" / "two.txt").write_text(f"two\n{PARAMETERS}")
    picture(
        tmp_path / "in" / "two.png", f"a cat\n{PARAMETERS}"
    )  # whose text is not read
    picture(tmp_path / "in" / "zz" / "two.png", f"a cat\n{PARAMETERS}")
    (tmp_path / "in" / "notes.md").write_text("no picture")

    result = in_process("import", "in", "--output", "again.jsonl")

    assert (result.returncode, result.stdout) == (console.EXIT_DONE, ""), result.stderr
    ids = [job["id"] for job in lines((tmp_path / "again.jsonl").read_text())]
    assert [each.split("-")[0] for each in ids] == ["Cat_1", "two", "two"]
    assert len(set(ids)) == 3
    loaded = in_process("load", "again.jsonl", "--dry-run")
    assert loaded.returncode == console.EXIT_DONE, loaded.stderr
    assert [job["id"] for job in lines(loaded.stdout)] == ids
    assert [job["randn_source"] for job in lines(loaded.stdout)] == [
        "GPU"
    ] * 3  # A1111's
    assert lines(in_process("import", "in").stdout) == lines(
        (tmp_path / "again.jsonl").read_text()
    )


def test_a_table_gives_what_no_text_holds(in_process: Imagefleet, tmp_path):
    text = f"a cat\n{PARAMETERS}, Denoising strength: 0.5, Version: v1.10.1".replace(
        '"', '""'
    )
    rows = [
        "infotext,init_images,steps",
        f'"{text}",cat.png,',
        f'"{text}",,',
        f'"a dog\n{PARAMETERS}",,9',
    ]
    (tmp_path / "jobs.csv").write_text("\n".join(rows))

    result = in_process("import", "jobs.csv")

    first, second = lines(result.stdout)
    assert (first["init_images"], first["denoising_strength"]) == ("cat.png", 0.5)
    assert (second["prompt"], second["steps"]) == ("a dog", "9")
    assert "row 3, line 4 is skipped: init_images: must be given" in result.stderr
    assert result.returncode == console.EXIT_IMAGES_WRONG


def test_a_summary_for_programs_is_all_that_is_printed(
    in_process: Imagefleet, tmp_path
):
    picture(
        tmp_path / "one.png", f"one\n{PARAMETERS}, Model: dreams, Script: X/Y/Z plot"
    )
    picture(tmp_path / "two.png", "a caption")

    result = in_process(
        "import", "one.png", "two.png", "--json", "--output", "again.jsonl"
    )

    told = json.loads(result.stdout)
    assert (
        json.loads(in_process("import", "one.png", "two.png", "--json").stdout) == told
    )
    assert (told["jobs"], told["refused"]) == (1, 1)
    assert told["cannot"] == {"Script (X/Y/Z plot) is not drawn": 1}
    assert [(each["kind"], each["name"]) for each in told["missing"]] == [
        ("model", "dreams")
    ]
    assert len(lines((tmp_path / "again.jsonl").read_text())) == 1
    assert_refused(in_process("import", "gone.png"), "'gone.png' does not exist")


def test_seeds_of_64_bits_are_those_of_32_with_the_same_noise(
    in_process: Imagefleet, tmp_path
):
    (tmp_path / "owl.png").write_bytes((CASES / "comfy-ksampler.png").read_bytes())
    large = comfyui.read(graph()).job | {"seed": 2**63 + 7}
    (tmp_path / "jobs.jsonl").write_text(
        json.dumps(large | {"sampler_name": "DPM++ SDE"})
    )

    result = in_process("import", "owl.png", "jobs.jsonl")

    (job,) = lines(result.stdout)
    seeds = 156680208700286, job["seed"]
    noises = [
        torch.randn(64, generator=torch.Generator().manual_seed(seed)) for seed in seeds
    ]
    assert torch.equal(*noises)
    assert "jobs.jsonl, line 1 is skipped: seed: " in result.stderr


# The files that pictures name


def test_files_are_found_by_their_hash_whatever_they_are_called_in_the_storage(
    in_process: Imagefleet, tmp_path
):
    lora = tmp_path / "ink v2.safetensors"
    worse = tmp_path / "worse.safetensors"
    lora.write_bytes(lora_of())
    save_file({"emb_params": np.zeros((2, 768), np.float16)}, worse)
    for kind, file in (("lora", lora), ("embedding", worse)):
        assert (
            in_process("files", "add", kind, file.name).returncode == console.EXIT_DONE
        )
    model = tmp_path / "model"
    model.write_bytes(file_of())

    async def store() -> None:
        settings = StorageSettings(storage=f"local:{tmp_path / 'imagefleet-data'}")
        async with open_storage(settings) as storage:
            sha256 = {"sha256": "4d5e6f7081".ljust(64, "a")}
            await storage.files.upload("models/dreams-2.safetensors", model, "", sha256)

    asyncio.run(store())
    digits = {
        "lora": manifest.hash_lora(lora),
        "model": "4d5e6f7081",
        "ti": hashlib.sha256(worse.read_bytes()).hexdigest()[:12],
    }
    text = (
        "a house <lora:Ink Wash:0.8:0.5>\nNegative prompt: bad_hands, (bad_hands2:1.2)\n"
        f"{PARAMETERS}, Model hash: {digits['model']}, Model: dreams,"
        f' Lora hashes: "Ink Wash: {digits["lora"]}", TI hashes: "bad_hands: {digits["ti"]}"'
    )
    picture(tmp_path / "one.png", text)

    result = in_process("import", "one.png")

    assert result.returncode == console.EXIT_DONE, result.stderr
    (job,) = lines(result.stdout)
    assert job["override_settings"]["sd_model_checkpoint"] == "dreams-2"
    assert job["prompt"] == "a house <lora:ink v2:0.8:0.5>"
    assert job["negative_prompt"] == "worse, (bad_hands2:1.2)"

    # A file of the name that has another hash is another file.
    (tmp_path / "one.txt").write_text(
        f"a <lora:ink v2:1>, unknown\n{PARAMETERS}, Lora hashes:"
        ' "ink v2: 0123456789ab", TI hashes: "unknown: 0123456789ab"'
    )
    other = in_process("import", "one.txt")
    assert "loras/ink v2 is another file: its hash is not 0123456789ab" in other.stderr
    assert "unknown" in other.stderr.partition("not in embeddings/")[0]
    assert other.returncode == console.EXIT_IMAGES_WRONG


# Pictures are anyone's


def png(*chunks: tuple[bytes, bytes], size: tuple[int, int] = (8, 8)) -> bytes:
    file = io.BytesIO(b"\x89PNG\r\n\x1a\n")
    file.seek(0, io.SEEK_END)
    header = struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
    for kind, data in ((b"IHDR", header), *chunks, (b"IDAT", b""), (b"IEND", b"")):
        PngImagePlugin.putchunk(file, kind, data)
    return file.getvalue()


BOMB = bombs.pack(b"a", 128)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (png((b"zTXt", b"parameters\0\0" + BOMB)), "damaged image"),
        (png((b"iTXt", b"parameters\0\1\0\0\0" + BOMB)), "damaged image"),
        (png(*[(b"tEXt", b"parameters\0" + b"a" * 2**20)] * 70), "damaged image"),
        (
            png((b"tEXt", b"parameters\0" + b"a" * (2**22 + 1))),
            "more than 4,194,304 characters",
        ),
        (png(size=(60_000, 60_000)), "more than"),
        (b"\x89PNG\r\n\x1a\n", "not a PNG"),
        (b"", "not a PNG"),
        (b"GIF89a", "not a PNG"),
    ],
    ids=range(8),
)
def test_a_malicious_picture_is_refused_with_a_sentence(
    tmp_path, data: bytes, reason: str
):
    path = tmp_path / "bomb.png"
    path.write_bytes(data)
    with pytest.raises(errors.JobError, match=reason):
        source.read_file(path)


def test_a_picture_larger_than_any_of_ours_is_read_for_its_text_alone(
    tmp_path,
):
    path = tmp_path / "large.png"
    text = f"a cat\n{PARAMETERS}".encode("latin-1")
    path.write_bytes(png((b"tEXt", b"parameters\0" + text), size=(8192, 8192)))
    assert source.read_file(path).job["prompt"] == "a cat"


def node(kind: str, **inputs: Any) -> JSONDict:
    return {"class_type": kind, "inputs": inputs}


def graph(**nodes: Any) -> str:
    sampler = {
        "steps": 20,
        "cfg": 7,
        "seed": 1,
        "sampler_name": "euler",
        "scheduler": "normal",
    }
    links = {"positive": ["p", 0], "negative": ["p", 0], "latent_image": ["e", 0]}
    return json.dumps(
        {
            "s": node("SaveImage", images=["d", 0]),
            "d": node("VAEDecode", samples=["k", 0], vae=["c", 0]),
            "k": node("KSampler", model=["c", 0], **sampler, **links),
            "p": node("CLIPTextEncode", text="a cat", clip=["c", 0]),
            "e": node("EmptyLatentImage", width=64, height=64),
            "c": node("CheckpointLoaderSimple", ckpt_name="a"),
            **nodes,
        }
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            graph(c=node("LoraLoader", model=["c", 0], clip=["c", 0])),
            "goes in a circle",
        ),
        (
            graph(d=node("VAEDecode", samples=["d", 0])),
            r"node d \(VAEDecode\) has no counterpart",
        ),
        (
            graph(p=node("CLIPTextEncode", text=["p", 0], clip=["c", 0])),
            "no counterpart",
        ),
        (
            graph(e=node("LatentUpscale", samples=["k", 0], width=8, height=8)),
            "no counterpart",
        ),
        (
            graph(e=node("EmptyLatentImage", width=64, height=64, batch_size=4)),
            "one of a batch",
        ),
        (graph(s=node("SaveImage")), "saves 0 pictures"),
        (graph(k=node("KSampler", steps=[])), "damaged"),
        (graph(s=7), "damaged"),
        ("[" * 100_000, "damaged"),
        ("[]", "damaged"),
        ("{}", "saves 0 pictures"),
    ],
)
def test_a_graph_without_an_end_or_a_meaning_is_refused(text: str, reason: str):
    with pytest.raises(errors.JobError, match=reason):
        comfyui.read(text)


def of_words(text: str) -> str:
    return graph(p=node("CLIPTextEncode", text=text, clip=["c", 0]))


def test_a_prompt_that_comfyui_cuts_elsewhere_is_said(in_process: Imagefleet, tmp_path):
    picture(tmp_path / "in" / "long.png", of_words("mill " * 76), "prompt")
    picture(tmp_path / "in" / "short.png", of_words("mill " * 75), "prompt")
    result = in_process("import", "in")
    assert len(lines(result.stdout)) == 2
    assert "1 job: its prompt has more than 75 tokens" in result.stderr


def test_an_embedding_of_comfyui_is_looked_up(in_process: Imagefleet, tmp_path):
    text = "(embedding:sub\\\\Easy.pt:1.2), embedding:other"
    picture(tmp_path / "one.png", of_words(text), "prompt")
    result = in_process("import", "one.png")
    assert [each["prompt"] for each in lines(result.stdout)] == ["(Easy:1.2), other"]


def test_a_picture_that_invokeai_scaled_is_drawn_as_it_was_and_said(
    in_process: Imagefleet, tmp_path
):
    with Image.open(CASES / "invokeai-6.8.png") as image:
        text = image.info["invokeai_metadata"]
    texts = PngImagePlugin.PngInfo()
    texts.add_text("invokeai_metadata", text)
    for name, size in (("scaled.png", (384, 576)), ("whole.png", (512, 768))):
        Image.new("RGB", size).save(tmp_path / name, pnginfo=texts)
    result = in_process("import", "scaled.png", "whole.png")
    sizes = [(job["width"], job["height"]) for job in lines(result.stdout)]
    assert sizes == [(512, 768), (512, 768)]
    assert "1 job: it was drawn in 512x768 and scaled to 384x576" in result.stderr


def test_settings_of_easy_diffusion_are_read_as_json(in_process: Imagefleet, tmp_path):
    settings = {"prompt": "a pond", "seed": 42, "num_inference_steps": 25}
    settings |= {"guidance_scale": 7.5, "width": 512, "height": 640}
    settings |= {
        "sampler_name": "euler_a",
        "use_lora_model": ["ink"],
        "lora_alpha": [0.5],
    }
    (tmp_path / "one.json").write_text(json.dumps(settings))
    result = in_process("import", "one.json")
    (job,) = lines(result.stdout)
    assert (job["prompt"], job["steps"]) == ("a pond <lora:ink:0.5>", 25)
    assert "diffusers' scheduler: alike and not equal" in result.stderr
