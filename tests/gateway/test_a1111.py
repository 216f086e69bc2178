"""AUTOMATIC1111's API as its programs know it: what it ignores, defaults, answers and lists."""

import asyncio
import base64
import io
import json
from typing import Any

import pytest
from PIL import Image

from imagefleet.storage.settings import StorageSettings
from polling import until

TXT2IMG = "/sdapi/v1/txt2img"
IMG2IMG = "/sdapi/v1/img2img"


@pytest.fixture
def storage_settings(local_settings: StorageSettings) -> StorageSettings:
    """One kind of storage: what is told here does not depend on it."""
    return local_settings


def encoded(image: Image.Image, form: str = "PNG", **terms: Any) -> str:
    made = io.BytesIO()
    image.save(made, form, **terms)
    return base64.b64encode(made.getvalue()).decode()


PICTURE = Image.radial_gradient("L").resize((128, 128)).convert("RGB")


def text_of(answer: Any) -> str:
    return str(json.loads(answer["info"])["infotexts"][0])


@pytest.mark.parametrize(
    "extra",
    [
        {"url": "http://127.0.0.1:7860", "auth": "a:b", "stepz": 3},
        {"resize_mode": 0, "mask": "AA==", "init_images": [], "inpaint_full_res": True},
        {"hr_additional_modules": [], "upscaler_1": "None", "distilled_cfg_scale": 3},
        {
            "enable_hr": True,
            "hr_upscaler": "Latent",
            "hr_additional_modules": ["Use same choices"],
            "width": 64,
            "height": 64,
        },
        {"override_settings": {"forge_additional_modules": []}},
        {
            "alwayson_scripts": {
                "ADetailer": {"args": [False, False, {"ad_model": "None"}]},
                "Dynamic Thresholding": {"args": [{"enabled": False}]},
                "Tiled Diffusion": {"args": []},
            }
        },
    ],
    ids=[
        "of programs",
        "of img2img",
        "of Forge",
        "in hires",
        "settings of Forge",
        "switched off",
    ],
)
async def test_what_a1111_ignores_is_ignored(serve, extra):
    served = await serve()

    status, found = await served.post(TXT2IMG, {"prompt": "a", **extra})

    assert (status, found.get("detail")) == (200, None)


#: Every field that A1111's own page of its API shows, with what it shows there.
OF_ITS_PAGE = {
    "prompt": "a",
    "negative_prompt": "",
    "styles": [""],
    "seed": -1,
    "subseed": -1,
    "subseed_strength": 0,
    "seed_resize_from_h": -1,
    "seed_resize_from_w": -1,
    "sampler_name": "DPM++ 2M",
    "scheduler": "Automatic",
    "batch_size": 1,
    "n_iter": 1,
    "steps": 4,
    "cfg_scale": 7,
    "width": 64,
    "height": 64,
    "restore_faces": False,
    "tiling": False,
    "do_not_save_samples": False,
    "do_not_save_grid": False,
    "eta": 0,
    "denoising_strength": 0,
    "s_min_uncond": 0,
    "s_churn": 0,
    "s_tmax": 0,
    "s_tmin": 0,
    "s_noise": 0,
    "override_settings": {},
    "override_settings_restore_afterwards": True,
    "refiner_checkpoint": "",
    "refiner_switch_at": 0,
    "disable_extra_networks": False,
    "firstpass_image": "",
    "comments": {},
    "enable_hr": False,
    "firstphase_width": 0,
    "firstphase_height": 0,
    "hr_scale": 2,
    "hr_upscaler": "",
    "hr_second_pass_steps": 0,
    "hr_resize_x": 0,
    "hr_resize_y": 0,
    "hr_checkpoint_name": "",
    "hr_sampler_name": "",
    "hr_scheduler": "",
    "hr_prompt": "",
    "hr_negative_prompt": "",
    "force_task_id": "",
    "sampler_index": "Euler",
    "script_name": "",
    "script_args": [],
    "send_images": True,
    "save_images": False,
    "alwayson_scripts": {},
    "infotext": "",
}

#: What SillyTavern sends: a whole form of its own, with the address and the key beside it.
OF_SILLY_TAVERN = {
    "url": "http://127.0.0.1:7860",
    "auth": "user:password",
    "prompt": "a",
    "negative_prompt": "",
    "sampler_name": "Euler a",
    "scheduler": "Karras",
    "steps": 4,
    "cfg_scale": 7,
    "width": 64,
    "height": 64,
    "restore_faces": False,
    "enable_hr": False,
    "hr_upscaler": "Latent",
    "hr_scale": 1,
    "hr_additional_modules": [],
    "denoising_strength": 0.7,
    "hr_second_pass_steps": 0,
    "seed": -1,
    "override_settings": {
        "CLIP_stop_at_last_layers": 1,
        "sd_vae": "Automatic",
        "forge_additional_modules": [],
    },
    "override_settings_restore_afterwards": True,
    "clip_skip": 1,
    "save_images": True,
    "send_images": True,
    "do_not_save_grid": False,
    "do_not_save_samples": False,
}

#: What Open WebUI sends to the same, and a page of openOutpaint's kind.
OF_OPEN_WEBUI = {"prompt": "a", "batch_size": 1, "width": 64, "height": 64, "steps": 4}


@pytest.mark.parametrize(
    "payload",
    [OF_ITS_PAGE, OF_SILLY_TAVERN, OF_OPEN_WEBUI],
    ids=["its page", "SillyTavern", "Open WebUI"],
)
async def test_payloads_of_other_peoples_programs_are_drawn(serve, payload):
    served = await serve()

    status, found = await served.post(TXT2IMG, payload)

    assert (status, found.get("detail")) == (200, None)
    assert len(found["images"]) == 1


async def test_a_slash_at_the_end_of_a_path_leads_to_the_same(serve):
    served = await serve()

    assert (await served.post(f"{TXT2IMG}/", {"prompt": "a"}))[0] == 200
    assert (await served.get("/sdapi/v1/sd-models/"))[0] == 200
    assert (await served.get("/sdapi/v1/options/"))[0] == 200


async def test_fields_of_txt2img_are_ignored_by_img2img(serve):
    served = await serve()
    body = {"prompt": "a", "init_images": [encoded(PICTURE)], "enable_hr": True}

    status, _ = await served.post(IMG2IMG, body | {"hr_scale": 2, "hr_upscaler": "x"})

    assert status == 200
    assert (await served.post(IMG2IMG, {"prompt": "a"}))[0] == 404


async def test_an_extension_that_is_on_is_refused_by_name(serve):
    served = await serve(works=False)
    scripts = {"ReActor": {"args": [True, "a face"]}}

    status, found = await served.post(TXT2IMG, {"alwayson_scripts": scripts})

    assert (status, "ReActor" in found["detail"]) == (422, True)


@pytest.mark.parametrize("native", [False, True])
async def test_defaults_are_those_of_a1111(serve, native: bool):
    served = await serve(native_size=native)

    _, found = await served.post(TXT2IMG, {"prompt": "a"})

    text = text_of(found)
    size = "" if native else "Size: 512x512"
    assert "Steps: 50, Sampler: Euler," in text
    assert size in text


async def test_settings_of_a_client_are_stronger_than_defaults(serve):
    served = await serve()
    settings = {"override_settings": {"randn_source": "CPU"}}

    _, found = await served.post(TXT2IMG, {"sampler_index": "DDIM", **settings})

    assert "Sampler: DDIM" in text_of(found)


async def test_info_has_what_a1111_tells_and_seeds_of_variations(serve):
    served = await serve()
    body = {"prompt": "a", "n_iter": 3, "seed": 500, "steps": 4}
    variation = {"subseed": 7, "subseed_strength": 0.3}

    _, plain = await served.post(TXT2IMG, body)
    _, varied = await served.post(TXT2IMG, body | variation)

    info = json.loads(plain["info"])
    assert info["all_seeds"] == [500, 501, 502]
    assert info["subseed_strength"] == 0
    info = json.loads(varied["info"])
    assert info["all_seeds"] == [500, 500, 500]
    assert info["all_subseeds"] == [7, 8, 9]
    assert {"sd_model_hash", "job_timestamp", "version", "styles"} <= info.keys()


async def test_images_are_left_out_where_nobody_wants_them(serve):
    served = await serve()

    _, found = await served.post(TXT2IMG, {"prompt": "a", "send_images": False})

    assert found["images"] == []
    assert text_of(found)


async def test_an_interrupted_request_ends_with_what_is_drawn(serve):
    served = await serve(works=False)
    asked = asyncio.create_task(served.post(TXT2IMG, {"prompt": "a"}))
    (ticket,) = await until(lambda: served.gateway.desk.tickets)
    await until(lambda: ticket.sent_at)

    assert await served.post("/sdapi/v1/interrupt") == (200, {})

    status, found = await asked
    assert (status, found["images"]) == (200, [])
    await until(served.storage.queue.depth, lambda depth: depth.messages == 0)


async def test_skip_ends_the_first_request(serve):
    served = await serve(works=False)
    asked = [
        asyncio.create_task(served.post(TXT2IMG, {"prompt": str(number)}))
        for number in range(2)
    ]
    tickets = await until(
        lambda: served.gateway.desk.tickets, lambda found: len(found) == 2
    )
    await until(lambda: all(ticket.sent_at for ticket in tickets))

    assert (await served.post("/sdapi/v1/skip"))[0] == 200

    await until(lambda: any(task.done() for task in asked))
    assert len(served.gateway.desk.tickets) == 1
    await served.post("/sdapi/v1/interrupt")
    await asyncio.gather(*asked)


async def test_progress_nears_one_by_what_others_took(serve):
    served = await serve()
    await served.post(TXT2IMG, {"prompt": "a", "steps": 4})
    assert served.gateway.desk.seconds_per_step > 0
    waiting = asyncio.create_task(served.post(TXT2IMG, {"prompt": "b", "steps": 30}))
    await until(lambda: served.gateway.desk.tickets)

    _, body = await served.get("/sdapi/v1/progress")

    found = json.loads(body)
    assert 0 <= found["progress"] < 1
    assert found["state"].keys() >= {"job_timestamp", "stopping_generation", "job_no"}
    await waiting


async def test_styles_are_applied_by_name(serve, tmp_path):
    (path := tmp_path / "styles.csv").write_text(
        "name,prompt,negative_prompt\noil,oil painting of {prompt},photo\nend,detailed,\n"
    )
    served = await serve(styles_file=path)

    _, found = await served.post(
        TXT2IMG, {"prompt": "a fish", "styles": ["oil", "end"]}
    )

    assert text_of(found).startswith(
        "oil painting of a fish, detailed\nNegative prompt: photo\n"
    )
    _, listed = await served.get("/sdapi/v1/prompt-styles")
    assert [style["name"] for style in json.loads(listed)] == ["oil", "end"]
    status, refused = await served.post(TXT2IMG, {"styles": ["ink"]})
    assert (status, "'ink'" in refused["detail"]) == (422, True)


async def test_parameters_of_a_picture_are_parsed(serve):
    served = await serve()
    body = {"prompt": "a, b\nc", "negative_prompt": "d", "steps": 4, "seed": 7}
    body |= {"width": 64, "height": 64}
    _, drawn = await served.post(TXT2IMG, body)

    _, found = await served.post("/sdapi/v1/png-info", {"image": drawn["images"][0]})

    told = found["parameters"]
    assert (told["Prompt"], told["Negative prompt"]) == ("a, b\nc", "d")
    assert (told["Steps"], told["Seed"]) == ("4", "7")


async def test_images_are_enlarged(serve):
    served = await serve()
    terms = {"upscaler_1": "Lanczos", "upscaling_resize": 2}

    status, found = await served.post(
        "/sdapi/v1/extra-single-image", {"image": encoded(PICTURE), **terms}
    )
    assert (status, bool(found["image"])) == (200, True)
    files = [{"data": encoded(PICTURE), "name": f"{number}.png"} for number in range(2)]
    status, found = await served.post(
        "/sdapi/v1/extra-batch-images", {"imageList": files, **terms}
    )
    assert (status, len(found["images"])) == (200, 2)


async def test_without_an_upscaler_images_are_left_as_they_are(serve):
    served = await serve(works=False)
    given = {"image": encoded(PICTURE), "upscaler_1": "None"}

    status, found = await served.post("/sdapi/v1/extra-single-image", given)

    assert (status, found["image"]) == (200, encoded(PICTURE))
    for body in ({}, {"image": 1}, {"imageList": 7}, {"imageList": [{"name": "a"}]}):
        status, _ = await served.post("/sdapi/v1/extra-batch-images", body)
        assert status == 422


async def test_images_are_prepared_for_a_controlnet_by_no_module(serve):
    served = await serve(works=False)
    images = {"controlnet_input_images": [encoded(PICTURE)]}

    status, found = await served.post("/controlnet/detect", images)

    assert (status, found["images"]) == (200, [encoded(PICTURE)])
    for body in ({}, {**images, "controlnet_module": "canny"}):
        assert (await served.post("/controlnet/detect", body))[0] == 422


async def test_options_and_flags_are_whole_and_name_the_checkpoint_that_draws(
    serve,
):
    served = await serve()
    await until(served.storage.models.served_now)

    options, flags, scripts = [
        json.loads((await served.get(f"/sdapi/v1/{name}"))[1])
        for name in ("options", "cmd-flags", "scripts")
    ]

    assert options["sd_model_checkpoint"] == "stand-in"
    assert len(options) > 300
    assert len(flags) > 100
    # Of 1.10 and of no release before.
    assert {"do_not_download_clip", "freeze_specific_settings", "models_dir"} <= set(
        flags
    )
    assert "no_tests" not in flags
    assert scripts["txt2img"] == scripts["img2img"] == ["adetailer", "controlnet"]
    # As programs do that change one of them.
    status, _ = await served.post("/sdapi/v1/options", options)
    assert status == 200


async def test_loras_of_a_workers_own_folder_are_listed(serve, tmp_path, monkeypatch):
    (folder := tmp_path / "loras").mkdir()
    (folder / "of its own.safetensors").write_bytes(b"x")
    monkeypatch.setenv("IMAGEFLEET_LORA_DIRECTORY", str(folder))
    served = await serve()

    async def names() -> list[str]:
        served.gateway.desk.models._read_at = -10.0
        served.gateway.desk.models.held._read_at = -100.0
        _, body = await served.get("/sdapi/v1/loras")
        return [each["name"] for each in json.loads(body)]

    assert await until(names) == ["of its own"]


@pytest.mark.parametrize("form", ["GIF", "BMP", "MPO"])
async def test_pictures_that_people_have_are_read(serve, form: str):
    served = await serve()
    terms = {"save_all": True, "append_images": [PICTURE]} if form == "MPO" else {}

    status, found = await served.post(
        IMG2IMG, {"prompt": "a", "init_images": [encoded(PICTURE, form, **terms)]}
    )

    assert (status, found.get("detail")) == (200, None)


async def test_everything_that_programs_ask_for_at_their_start_is_there(serve):
    served = await serve(works=False)

    for path in served.paths():
        status, body = await served.get(path)
        assert status == 200
        assert body
    for name in ("refresh-checkpoints", "refresh-vae", "refresh-loras"):
        assert await served.post(f"/sdapi/v1/{name}") == (200, None)
    status, body = await served.get("/sdapi/v1/nowhere")
    assert (status, json.loads(body)["detail"]) == (404, "Not Found")
