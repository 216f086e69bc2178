import hashlib
from collections.abc import Callable

from imagefleet.job.noise import Noise
from imagefleet.job.samplers import Options
from imagefleet.storage.open import Storage
from messages import Drawing, image, message


async def test_an_image_states_what_its_job_asked_for_and_the_hashes_of_its_files(
    storage: Storage,
    run_pipeline,
    lora_bytes: Callable[[str], bytes],
    tmp_path,
):
    data = lora_bytes("fox")
    weights = data[8 + int.from_bytes(data[:8], "little") :]
    await storage.files.create("loras/fox.safetensors", data, "text/plain", {})
    model = tmp_path / "m.safetensors"
    model.write_bytes(data)
    engine = Drawing()
    settings = {"randn_source": "NV", "eta_ancestral": 0.5}
    prompt = "a <lora:fox:0.5> # not drawn\n:1.5"
    await run_pipeline(
        engine,
        sent=[message(id="j", prompt=prompt, override_settings=settings)],
        model=str(model),
    )
    (request,) = engine.drawn
    assert (request.cfg_scale, request.prompt.weights) == (7, (1.5,))
    assert request.noise == Noise("NV")
    assert request.sampler_options == Options(eta=0.5)
    text = (await image(storage, "default/j.png")).info["parameters"]
    assert text.startswith("a <lora:fox:0.5> \n:1.5\n")
    assert f"Model hash: {hashlib.sha256(data).hexdigest()[:10]}, " in text
    assert f'Lora hashes: "fox: {hashlib.sha256(weights).hexdigest()[:12]}", ' in text
    assert "RNG: NV, Eta: 0.5, " in text


async def test_a_job_goes_before_the_worker_in_what_decodes_its_image(
    storage: Storage,
    run_pipeline,
    tmp_path,
):
    engine = Drawing()
    for by in ("Full", "TAESD", None):
        settings = {"sd_vae_decode_method": by}
        await storage.queue.send(
            [message(id=f"{by}", prompt=f"{by}", override_settings=settings)]
        )
    await run_pipeline(engine, taesd=tmp_path)
    asked = {str(request.prompt): request.decoder for request in engine.drawn}
    assert asked == {"Full": "Full", "TAESD": "TAESD", "None": None}
    for by in asked:
        text = (await image(storage, f"default/{by}.png")).info["parameters"]
        assert ("VAE Decoder: TAESD" in text) == (by != "Full")
