"""A worker's own VAE: whose file it is, and what its images tell of it."""

import io
from collections.abc import Callable

import pytest
from PIL import Image

from imagefleet import errors
from imagefleet.files import demo
from imagefleet.job.message import read_job
from imagefleet.storage.open import Storage
from messages import message
from worker.inputs.reader import JobFiles
from worker.process import engine_settings


async def test_images_name_it_unless_their_job_names_another(
    storage: Storage,
    run_pipeline,
    lora_bytes: Callable[[str], bytes],
):
    hashes = {}
    for name in ("sharp", "soft"):
        await storage.files.create(
            f"vaes/{name}.safetensors", lora_bytes(name), "text/plain", {}
        )
    sent = {"sharp": message(id="j"), "soft": message(id="k", sd_vae="soft")}
    await run_pipeline(sent=[*sent.values()], vae="sharp")
    for name, each in sent.items():
        data = await storage.blobs.read(read_job(each, "m").blob_name(0))
        text = Image.open(io.BytesIO(data)).info["parameters"]
        assert f", VAE: {name}.safetensors" in text
        hashes[name] = text.partition("VAE hash: ")[2].partition(",")[0]
    assert len({*hashes.values()} - {""}) == 2


@pytest.mark.parametrize(("setting", "kind"), [("vae", "VAE"), ("accelerator", "LoRA")])
async def test_a_name_that_is_no_file_of_the_storage_ends_the_worker_and_fails_no_job(
    storage: Storage, run_pipeline, setting: str, kind: str
):
    await storage.queue.send([message(id="j")])
    with pytest.raises(errors.SetupError, match=f"--{setting}: no {kind} lcm"):
        await run_pipeline(**{setting: "lcm"})
    assert not (await storage.poison.depth()).messages


async def test_the_engine_gets_the_files_of_the_settings(
    storage: Storage,
    worker_settings,
    lora_bytes: Callable[[str], bytes],
):
    await storage.files.create(
        "vaes/sharp.safetensors", lora_bytes("x"), "text/plain", {}
    )
    for given in ("sharp", "/none/sharp.safetensors"):
        settings = worker_settings(vae=given, model=demo.TRAINED)
        paths = await JobFiles(storage, settings).own_paths()
        made = engine_settings(settings, **paths).vae
        assert made.name == "sharp.safetensors"
        assert made.exists() == (given == "sharp")
