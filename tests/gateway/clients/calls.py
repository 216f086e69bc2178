"""Calls of other people's clients, unchanged, against a gateway: what became of each.

    python calls.py CLIENT URL

Prints a JSON object: for each call `drawn`, `answered`, or the error that the client raises.
"""

import asyncio
import base64
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

#: What nobody has.
UNKNOWN = "gpt-image-9"

#: Calls by their names: each returns an image, several, or an answer of another kind.
Calls = Mapping[str, Callable[[], Any]]


def picture(side: int = 64) -> Image.Image:
    return Image.radial_gradient("L").resize((side, side)).convert("RGB")


def png(side: int = 64) -> bytes:
    made = io.BytesIO()
    picture(side).save(made, "PNG")
    return made.getvalue()


def webuiapi(url: str) -> Calls:
    import webuiapi as client

    api = client.WebUIApi(baseurl=f"{url}/sdapi/v1")
    unit = client.ControlNetUnit(image=picture(), module="none", model="another")
    return {
        "txt2img": lambda: api.txt2img(prompt="a", width=64, height=64).images,
        "img2img": lambda: api.img2img(images=[picture()], width=64, height=64).images,
        "extra_single_image": lambda: api.extra_single_image(picture()).image,
        "extra_batch_images": lambda: api.extra_batch_images([picture()]).images,
        "png_info": lambda: api.png_info(picture()).info,
        "controlnet_detect": lambda: api.controlnet_detect([picture()], "none").images,
        "controlnet_detect, canny": lambda: api.controlnet_detect([picture()], "canny"),
        "get_options": api.get_options,
        "get_cmd_flags": api.get_cmd_flags,
        "get_sd_models": api.get_sd_models,
        "get_loras": api.get_loras,
        "get_scripts": api.get_scripts,
        "get_memory": api.get_memory,
        "interrupt": api.interrupt,
        "util_set_model": lambda: api.util_set_model("stand-in"),
        "txt2img, a ControlNet that nobody has": lambda: api.txt2img(
            prompt="a", controlnet_units=[unit]
        ),
    }


def aaa1111(url: str) -> Calls:
    from aaa1111.client import AAA1111

    api = AAA1111(base_url=url)
    payload = {"prompt": "a", "width": 64, "height": 64}
    return {
        "txt2img": lambda: api.txt2img(payload).images,
        "img2img": lambda: api.img2img(payload | {"init_images": [picture()]}).images,
        "progress": api.progress,
        "options": api.get_options,
        "cmd_flags": api.cmd_flags,
        "memory": api.memory,
        "samplers": api.samplers,
        "upscalers": api.upscalers,
        "latent_upscale_modes": api.latent_upscale_modes,
        "sd_models": api.sd_models,
        "hypernetworks": api.hypernetworks,
        "face_restorers": api.face_restorers,
        "realesrgan_models": api.realesrgan_models,
        "prompt_styles": api.prompt_styles,
        "embeddings": api.embeddings,
        "scripts": api.scripts,
        "script_info": api.script_info,
        "loras": api.loras,
        "interrupt": api.interrupt,
        "skip": api.skip,
    }


def sd_backend_client(url: str) -> Calls:
    from sd_backend_client.api.detect import connect_to_backend
    from sd_backend_client.api.webui.diffusion_request_body import DiffusionRequestBody

    backend = connect_to_backend(url)
    body = DiffusionRequestBody(prompt="a", width=64, height=64, steps=2)

    def inpaint() -> Any:
        given = body.model_copy()
        given.init_images = [picture()]
        given.mask = picture().convert("L")
        return backend.submit_inpaint(given).wait().images

    return {
        "submit_txt2img": lambda: backend.submit_txt2img(body).wait().images,
        "submit_inpaint": inpaint,
        "submit_upscale": lambda: (
            backend.submit_upscale(picture(), 128, 128).wait().images
        ),
        "get_capabilities": backend.get_capabilities,
        "list_checkpoints": backend.list_checkpoints,
        "list_vaes": backend.list_vaes,
        "list_loras": backend.list_loras,
        "list_upscalers": backend.list_upscalers,
        "list_schedulers": backend.list_schedulers,
        "list_samplers": backend.list_samplers,
        "list_controlnet_models": backend.list_controlnet_models,
        "get_controlnet_preprocessors": backend.get_controlnet_preprocessors,
        "get_controlnet_type_categories": backend.get_controlnet_type_categories,
        "get_styles": backend.get_styles,
    }


def image_generation_mcp(url: str) -> Calls:
    from image_generation_mcp.providers.sd_webui import SdWebuiImageProvider
    from image_generation_mcp.providers.types import InputImage

    async def generate(model: str | None = None, **terms: Any) -> bytes:
        provider = SdWebuiImageProvider(url, model)
        try:
            return (await provider.generate("a", **terms)).image_data
        finally:
            await provider.aclose()

    given = InputImage(png(), "image/png")
    return {
        "generate": lambda: asyncio.run(generate()),
        "generate, a picture": lambda: asyncio.run(generate(reference_images=[given])),
        "generate, a model": lambda: asyncio.run(generate("stand-in")),
        "generate, a model that nobody has": lambda: asyncio.run(generate(UNKNOWN)),
    }


def openai(url: str) -> Calls:
    import openai as client

    api = client.OpenAI(base_url=f"{url}/v1", api_key="none")

    def generate(**terms: Any) -> Any:
        return api.images.generate(prompt="a", size="64x64", **terms).data  # type: ignore[call-overload]

    return {
        "images.generate": lambda: generate(model="dall-e-3", n=2),
        "images.edit": lambda: api.images.edit(image=("a.png", png()), prompt="a").data,
        "models.list": api.models.list,
        "models.retrieve": lambda: api.models.retrieve("stand-in"),
        "images.generate, stream": lambda: generate(stream=True),
        "images.generate, a model that nobody has": lambda: generate(model=UNKNOWN),
    }


def litellm(url: str) -> Calls:
    import litellm as client

    terms = {"api_base": f"{url}/v1", "api_key": "none"}

    def generate(model: str) -> Any:
        return client.image_generation(
            "a", f"openai/{model}", size="512x512", **terms
        ).data

    return {
        "image_generation": lambda: generate("dall-e-3"),
        "image_edit": lambda: (
            client.image_edit(
                image=io.BytesIO(png()), prompt="a", model="openai/gpt-image-1", **terms
            ).data
        ),
        "image_generation, a model that nobody has": lambda: generate(UNKNOWN),
    }


def data_designer(url: str) -> Calls:
    import data_designer.config as dd
    from data_designer.interface import DataDesigner

    def create() -> Any:
        provider = dd.ModelProvider(name="fleet", endpoint=f"{url}/v1", api_key="none")
        terms = dd.ImageInferenceParams(extra_body={"model": "default", "steps": 2})
        model = dd.ModelConfig(
            alias="sd", model="sd-any", provider="fleet", inference_parameters=terms
        )
        builder = dd.DataDesignerConfigBuilder(model_configs=[model])
        things = dd.CategorySamplerParams(values=["house", "fish"])
        builder.add_column(
            dd.SamplerColumnConfig(name="thing", sampler_type="category", params=things)
        )
        builder.add_column(
            dd.ImageColumnConfig(name="image", prompt="a {{ thing }}", model_alias="sd")
        )
        with tempfile.TemporaryDirectory() as folder:
            designer = DataDesigner(model_providers=[provider], artifact_path=folder)
            designer.create(builder, num_records=2)
            return [path.read_bytes() for path in Path(folder).rglob("*.png")]

    return {"create": create}


def langchain(url: str) -> Calls:
    from langchain_community.utilities.dalle_image_generator import DallEAPIWrapper

    api = DallEAPIWrapper(base_url=f"{url}/v1", api_key="none")
    return {"DallEAPIWrapper.run": lambda: read(api.run("a"))}


def llama_index(url: str) -> Calls:
    from llama_index.tools.openai.image_generation.base import (
        OpenAIImageGenerationToolSpec,
    )

    os.environ["OPENAI_BASE_URL"] = f"{url}/v1"
    tool = OpenAIImageGenerationToolSpec(api_key="none")
    return {"image_generation": lambda: read(tool.image_generation("a"))}


def llm(url: str) -> Calls:
    program = str(Path(sys.executable).with_name("llm"))

    def draw() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.png"
            variables = {
                "OPENAI_BASE_URL": f"{url}/v1",
                "OPENAI_API_KEY": "none",
                "LLM_USER_PATH": folder,
            }
            subprocess.run(
                [program, "-m", "openai/gpt-image-1.5", "a", "-o", "output", str(path)],
                env=os.environ | variables,
                check=True,
                capture_output=True,
            )
            return path.read_bytes()

    return {"llm -m openai/gpt-image-1.5": draw}


def read(address: str) -> bytes:
    """The picture at an address."""
    import urllib.request

    with urllib.request.urlopen(address) as answer:
        return bytes(answer.read())


#: The clients by their names on PyPI.
CLIENTS: Mapping[str, Callable[[str], Calls]] = {
    "aaa1111": aaa1111,
    "data-designer": data_designer,
    "image-generation-mcp": image_generation_mcp,
    "langchain-community": langchain,
    "litellm": litellm,
    "llama-index-tools-openai-image-generation": llama_index,
    "llm-openai-images": llm,
    "openai": openai,
    "sd-backend-client": sd_backend_client,
    "webuiapi": webuiapi,
}


def outcome(call: Callable[[], Any]) -> str:
    """`drawn` if a call's images can be opened, `answered` if it has none; or its error."""
    try:
        found = call()
    except Exception as error:  # noqa: BLE001 - it is what is told
        return f"{type(error).__name__}: {error}"
    several = found if isinstance(found, list) and found else [found]
    return "drawn" if all(map(is_image, several)) else "answered"


def is_image(found: Any) -> bool:
    """True if what a client returns is a picture, in any of the ways that they have."""
    found = getattr(found, "b64_json", None) or found
    if isinstance(found, str) and len(found) > 80:
        found = base64.b64decode(found)
    if isinstance(found, bytes):
        found = Image.open(io.BytesIO(found))
    if not isinstance(found, Image.Image):
        return False
    found.load()
    return True


def main() -> None:
    name, url = sys.argv[1:]
    found = {call: outcome(made) for call, made in CLIENTS[name](url).items()}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
