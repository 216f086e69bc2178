"""OpenAI's own client against the gateway."""

import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from PIL import Image


@pytest.fixture(scope="module")
def openai() -> Any:
    """Imported as it is used: that takes a second."""
    import openai

    return openai


@pytest.fixture
async def client(openai, serve) -> AsyncIterator[Any]:
    served = await serve()
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none"
    ) as client:
        yield client


def opened(text: str | None) -> Image.Image:
    image = Image.open(io.BytesIO(base64.b64decode(text or "")))
    image.load()
    return image


def png(*, alpha: int = 255) -> tuple[str, bytes]:
    made = io.BytesIO()
    Image.new("RGBA", (64, 64), (200, 30, 30, alpha)).save(made, "PNG")
    return "picture.png", made.getvalue()


async def test_generate_brings_as_many_pictures_as_asked_for(
    client,
):
    found = await client.images.generate(
        prompt="a red house",
        model="default",
        n=2,
        size="512x512",
        quality="high",
        user="me",
    )

    assert [opened(each.b64_json).size for each in found.data or ()] == [(512, 512)] * 2
    assert found.created > 0


async def test_generate_takes_the_settings_of_diffusion_beside_its_own(
    client,
):
    settings = {"seed": 7, "steps": 4, "negative_prompt": "rain", "cfg_scale": 1}

    found = await client.images.generate(prompt="a red house", extra_body=settings)

    assert "Seed: 7" in opened((found.data or [])[0].b64_json).info["parameters"]


async def test_quality_and_compression_are_drawn_as_asked(client):
    found = await client.images.generate(
        prompt="a", quality="low", output_format="jpeg", output_compression=50
    )

    assert opened((found.data or [])[0].b64_json).format == "JPEG"


async def test_an_address_in_place_of_the_picture_leads_to_it(
    client,
):
    found = await client.images.generate(prompt="a red house", response_format="url")

    url = (found.data or [])[0].url or ""
    async with aiohttp.ClientSession() as session, session.get(url) as told:
        assert (told.status, told.content_type) == (200, "image/png")


async def test_who_asks_for_no_form_finds_the_picture_and_its_address(client):
    found = await client.images.generate(prompt="a red house")

    (only,) = found.data or []
    assert opened(only.b64_json).format == "PNG"
    assert "/jobs/" in (only.url or "")


@pytest.mark.parametrize("alpha", [255, 0])
async def test_edit_draws_the_picture_anew_or_where_it_is_transparent(
    client, alpha: int
):
    found = await client.images.edit(
        image=png(),
        mask=png(alpha=alpha),
        prompt="a fish",
        n=1,
        extra_body={"steps": 4},
    )

    assert opened((found.data or [])[0].b64_json).size[0] >= 16


async def test_models_are_those_of_the_storage_and_the_workers_own(
    client,
):
    assert "default" in [model.id async for model in client.models.list()]
    assert (await client.models.retrieve("default")).owned_by == "imagefleet"


async def test_what_cannot_be_drawn_is_an_error_of_openais_form(
    client,
    openai,
):
    with pytest.raises(openai.BadRequestError, match="size: should be WIDTHxHEIGHT"):
        await client.images.generate(prompt="a", size="large")  # type: ignore[call-overload]
    with pytest.raises(openai.NotFoundError, match="'gpt-image-1' does not exist"):
        await client.models.retrieve("gpt-image-1")
    for field, value, reason in (
        ("size", "100x100", "size: should be multiples of 8"),
        ("n", 11, "n: should be 1 to 10"),
        ("background", "transparent", "background: is not supported"),
        ("quality", "best", "quality: should be"),
        ("partial_images", 2, "partial_images: is not supported"),
        ("output_compression", 0, "output.quality"),
    ):
        with pytest.raises(openai.BadRequestError, match=reason):
            await client.images.generate(prompt="a", extra_body={field: value})
    with pytest.raises(openai.BadRequestError, match="image: several"):
        await client.images.edit(image=[png(), png()], prompt="a")
    with pytest.raises(openai.BadRequestError, match="the prompt is broken"):
        await client.images.generate(prompt="broken")
