"""ADetailer: draws again what detectors find in a finished picture, one part after the other.

As the extension does it (`scripts/!adetailer.py`): each part is an inpainting of the picture so
far, with the picture's prompt, sampler and size of its first pass, and a seed that counts up.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from PIL import Image

from imagefleet.job.message import Job
from worker.engine.contract import ImageRequest, Pixels
from worker.files.library import FileLibrary
from worker.inputs import detectors, img2img

#: Draws a part that the detector of this number found.
Draw = Callable[[ImageRequest, int], Awaitable[Pixels]]


async def draw(
    library: FileLibrary, job: Job, request: ImageRequest, pixels: Pixels, draw: Draw
) -> Pixels:
    """The picture of a *request*, with what the job's detectors find drawn again.

    Raises as `FileLibrary.resolve`, and as *draw*.
    """
    for at, detail in enumerate(job.details):
        path = await library.resolve(detail.ad_model)
        boxes = await asyncio.to_thread(
            detectors.find,
            library.identity(path),
            detail.ad_model,
            pixels,
            detail.ad_confidence,
        )
        size = pixels.shape[1], pixels.shape[0]
        masks = await asyncio.to_thread(detectors.masks, detail, boxes, size)
        # Of an inpainting's job, only the image and the mask are prepared.
        fields = {
            "denoising_strength": detail.ad_denoising_strength,
            "resize_mode": 0,
            "mask_blur": detail.ad_mask_blur,
            "inpainting_fill": 1,
            "inpainting_mask_invert": 0,
            "inpaint_full_res": detail.ad_inpaint_only_masked,
            "inpaint_full_res_padding": detail.ad_inpaint_only_masked_padding,
        }
        own_job = job.model_copy(update=fields)
        positive, negative = job.detail_prompts[at]
        # The picture's first pass, without its ControlNets, refiner and estimate.
        own = replace(
            request,
            prompt=positive or request.prompt,
            # A prompt of its own has no tags, and so no LoRAs.
            loras=request.loras if positive is None else (),
            negative_prompt=negative or request.negative_prompt,
            steps=detail.own("ad_steps", request.steps),
            cfg_scale=detail.own("ad_cfg_scale", request.cfg_scale),
            width=detail.own("ad_inpaint_width", request.width),
            height=detail.own("ad_inpaint_height", request.height),
            hires=None,
            controls=(),
            refiner=None,
            stop=None,
            is_detailed=False,
        )
        for number, mask in enumerate(masks):
            init, overlay = await asyncio.to_thread(
                img2img.begin,
                own_job,
                Image.fromarray(pixels),
                Image.fromarray(mask),
                (own.width, own.height),
            )
            noise = replace(own.noise, subseed=own.noise.subseed + number)
            of_part = replace(own, init=init, seed=own.seed + number, noise=noise)
            pixels = await draw(of_part, at)
            if overlay is not None:
                pixels = await asyncio.to_thread(overlay.put_over, pixels)
    return pixels
