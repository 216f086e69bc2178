"""What jobs are given beside prompts: jobs that name such images, and the images themselves."""

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from imagefleet.job import clip
from imagefleet.job.message import Job, read_job
from imagefleet.job.passes import img2img as given
from imagefleet.storage import protocol
from imagefleet.storage.routing import models
from worker.inputs import img2img, pictures

INPAINTING = (
    '{"prompt": "a", "init_images": ["a.png"], "mask": "b.png", "mask_blur": 2}'
)

PASSES = (
    b'{"prompt": "a", "init_images": ["iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4'
    b'//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"], "mask": "images/spring/a (1).png", "mask_blur": 4,'
    b' "resize_mode": 2, "inpainting_fill": 3, "inpaint_full_res": false, "mask_blur_x": 5,'
    b' "alwayson_scripts": {"ControlNet": {"args": [{"image": "a.png", "model": "x [0123abcd]",'
    b' "weight": 0.5, "guidance_start": 0.1, "resize_mode": "Just Resize"}]}}}',
    b'{"prompt": "a <lora:b:1>", "enable_hr": true, "hr_scale": 1.5, "hr_resize_x": 768,'
    b' "width": 512, "height": 768, "hr_upscaler": "R-ESRGAN 4x+", "hr_prompt": "c <lora:b:1>:1.2",'
    b' "hr_sampler_name": "Euler", "hr_scheduler": "Karras", "hr_second_pass_steps": 7}',
    b'{"image": "a.png", "upscaler_1": "4x", "upscaler_2": "Lanczos", "resize_mode": 1,'
    b' "extras_upscaler_2_visibility": 0.5, "upscaling_resize_w": 640, "upscaling_crop": false,'
    b' "gfpgan_visibility": 0, "then": [{"upscaler_1": "Nearest", "upscaling_resize": 1.5}]}',
    b'{"prompt": "a", "id": "b", "campaign": "c", "then": [{"model": "x", "steps": 5}, {"seed": -1,'
    b' "denoising_strength": 0.5}], "stage": {"number": 2, "message": "m"}, "model": "y"}',
)


def tokenise(texts: Sequence[str]) -> list[list[int]]:
    """A token for each sign that is left of a prompt."""
    return [[7] * len(clip.cleaned(text)) for text in texts]


def check_sources(job: Job) -> None:
    for place in filter(None, map(given.place, job.sources)):
        protocol.check_blob_name(place.blob)


def check_stages(job: Job, again: Job, body: str) -> None:
    """*again* is the job after its message, which was *body* at first."""
    assert (again.stage, again.stages) == (job.stage, job.stages)
    assert models.model_of(job.to_message()) == job.model, "its queue is its model's"
    models.models_of(body)


def read(data: bytes) -> None:
    """A job's image, mask and map, as a worker prepares them."""
    image = pictures.read("init_images: the image", data)
    init, overlay = img2img.begin(read_job(INPAINTING, "an-id"), image, image, (64, 64))
    assert init.pixels.shape == (64, 64, 3)
    if overlay is not None:
        assert overlay.put_over(init.pixels).shape[1::-1] == image.size
    assert pictures.control(image, 1, (64, 64)).shape == (64, 64, 3)


def _picture(kind: str) -> bytes:
    y, x = np.mgrid[0:48, 0:64]
    pixels = np.stack([x * 4, y * 5, (x ^ y) * 4, (x + y) * 2], 2).astype(np.uint8)
    image = Image.fromarray(pixels)
    buffer = io.BytesIO()
    (image.convert("RGB") if kind == "JPEG" else image).save(buffer, kind)
    return buffer.getvalue()


PICTURES = tuple(_picture(kind) for kind in ("PNG", "JPEG", "WEBP"))
