"""`webuiapi`, a client of AUTOMATIC1111's API that others wrote, against the gateway."""

import asyncio

import pytest
import webuiapi
from PIL import Image

from polling import until


@pytest.fixture
def picture() -> Image.Image:
    return Image.radial_gradient("L").resize((128, 128)).convert("RGB")


async def test_txt2img_brings_the_pictures_and_what_they_were_drawn_by(
    serve,
):
    served = await serve()
    api = await asyncio.to_thread(webuiapi.WebUIApi, port=served.port)

    found = await asyncio.to_thread(
        api.txt2img, prompt="a red house", seed=7, width=64, height=64, n_iter=2
    )

    assert [image.size for image in found.images] == [(64, 64)] * 2
    assert found.info["all_seeds"] == [7, 8]
    assert found.info["infotexts"][1].startswith("a red house\nSteps: 20, ")
    assert found.parameters["prompt"] == "a red house"


async def test_img2img_begins_with_the_picture_that_is_sent(
    serve, picture: Image.Image
):
    served = await serve()
    api = await asyncio.to_thread(webuiapi.WebUIApi, port=served.port)

    found = await asyncio.to_thread(
        api.img2img,
        images=[picture],
        mask_image=picture,
        prompt="a fish",
        width=64,
        height=64,
    )

    assert found.image.size == (128, 128)  # of which the mask's part is drawn
    stored = [name async for name in served.storage.files.names("inputs/")]
    assert [name.rpartition("/")[0] for name in stored] == [
        "inputs/gateway"
    ]  # the same twice


async def test_png_info_reads_what_a_picture_was_drawn_by(
    serve,
):
    served = await serve()
    api = await asyncio.to_thread(webuiapi.WebUIApi, port=served.port)
    drawn = await asyncio.to_thread(api.txt2img, prompt="a red house", seed=7)

    found = await asyncio.to_thread(api.png_info, drawn.image)

    assert found.info == drawn.info["infotexts"][0]


async def test_progress_and_interrupt_are_of_what_the_client_waits_for(
    serve,
):
    served = await serve(works=False)
    api = await asyncio.to_thread(webuiapi.WebUIApi, port=served.port)
    before = await asyncio.to_thread(api.get_progress)
    waiting = asyncio.create_task(asyncio.to_thread(api.txt2img, prompt="a red house"))
    await until(
        lambda: served.gateway.desk.tickets and served.gateway.desk.tickets[0].sent_at
    )

    during = await asyncio.to_thread(api.get_progress)
    await asyncio.to_thread(api.interrupt)

    assert (await waiting).images == []
    assert (before["progress"], before["state"]["job_count"]) == (0, 0)
    assert 0 < during["progress"] < 1
    assert during["state"]["job_count"] == 1


async def test_options_decide_the_next_pictures_and_only_the_clients_own(
    serve, clients_file
):
    served = await serve(clients=clients_file)
    alice = await asyncio.to_thread(webuiapi.WebUIApi, port=served.port)
    bob = await asyncio.to_thread(webuiapi.WebUIApi, port=served.port)
    await asyncio.to_thread(alice.set_auth, "alice", "alice-key")
    await asyncio.to_thread(bob.set_auth, "bob", "bob-key")

    await asyncio.to_thread(alice.set_options, {"CLIP_stop_at_last_layers": 2})

    assert (await asyncio.to_thread(alice.get_options))["CLIP_stop_at_last_layers"] == 2
    assert (await asyncio.to_thread(bob.get_options))["CLIP_stop_at_last_layers"] == 1
    texts = [
        (await asyncio.to_thread(api.txt2img, prompt="a")).info["infotexts"][0]
        for api in (alice, bob)
    ]
    assert ["Clip skip: 2" in text for text in texts] == [True, False]


async def test_an_option_that_cannot_be_honoured_is_refused_by_name(
    serve,
):
    served = await serve()

    status, found = await served.post("/sdapi/v1/options", {"token_merging_ratio": 0.5})

    assert status == 422
    assert found["detail"].startswith("token_merging_ratio is not supported")


async def test_lists_have_what_jobs_may_name(serve):
    served = await serve()
    api = await asyncio.to_thread(webuiapi.WebUIApi, port=served.port)
    await served.storage.files.create("models/dreamshaper.safetensors", b"x", "a/b", {})
    await served.storage.files.create("loras/outline.safetensors", b"x", "a/b", {})

    await until(served.storage.models.served_now)
    served.gateway.desk.models._read_at = -10.0
    models = await asyncio.to_thread(api.util_get_model_names)
    assert models == ["dreamshaper", "stand-in"]
    assert [each["name"] for each in await asyncio.to_thread(api.get_loras)] == [
        "outline"
    ]
    assert "Euler a" in await asyncio.to_thread(api.util_get_sampler_names)
    assert "karras" in await asyncio.to_thread(api.util_get_scheduler_names)
    assert {"name": "Lanczos"}.items() <= (await asyncio.to_thread(api.get_upscalers))[
        1
    ].items()


@pytest.mark.parametrize(
    ("payload", "status", "reason"),
    [
        ({"prompt": "a", "id": "3"}, 422, "id: unknown key"),
        ({"prompt": "a", "restore_faces": True}, 422, "restore_faces is not supported"),
        ({"prompt": "broken"}, 422, "a worker reports: the prompt is broken"),
        (
            {"prompt": "a", "override_settings": {"sd_unet": "x"}},
            422,
            "override_settings.sd_unet",
        ),
        ({"prompt": "a", "n_iter": 20_000}, 422, "n_iter: should be less"),
    ],
)
async def test_what_cannot_be_drawn_is_an_error_in_a1111s_form(
    serve, payload, status: int, reason: str
):
    served = await serve()

    found_status, found = await served.post("/sdapi/v1/txt2img", payload)

    assert found_status == status
    assert reason in found["detail"]
    assert found.keys() == {"error", "detail", "body", "errors"}
