"""What A1111 tells of drawn images: `Processed.js()` of its release 1.10, and texts of images."""

import json

from imagefleet.files import picture
from imagefleet.http import sent_images
from imagefleet.job.message import Job
from imagefleet.records.outcomes import JobFacts
from imagefleet.validation import JSONObject

_OF_JOB = (
    "cfg_scale",
    "steps",
    "subseed_strength",
    "seed_resize_from_w",
    "seed_resize_from_h",
    "clip_skip",
    "denoising_strength",
)


def answer(
    payload: JSONObject, job: Job, facts: JobFacts, images: list[bytes]
) -> bytes:
    """The JSON of txt2img and img2img; large, so that it is made in a thread."""
    texts = [sent_images.text_of(data) for data in images]
    known = picture.parsed_parameters(texts[0]) if texts else {}
    prompt, negative_prompt = job.shown_prompts
    count = len(images)
    drawn = job.identified(facts.id)
    width, height = (
        (facts.records[0].width, facts.records[0].height) if images else (0, 0)
    )
    info = {name: getattr(job, name) for name in _OF_JOB} | {
        "prompt": prompt,
        "all_prompts": [prompt] * count,
        "negative_prompt": negative_prompt,
        "all_negative_prompts": [negative_prompt] * count,
        "seed": drawn.seed,
        "all_seeds": list(map(drawn.image_seed, range(count))),
        "subseed": drawn.subseed,
        "all_subseeds": list(map(drawn.image_subseed, range(count))),
        "width": width,
        "height": height,
        "sampler_name": job.sampler_name,
        "batch_size": job.batch_size,
        "restore_faces": False,
        "face_restoration_model": None,
        "sd_model_name": known.get("Model", ""),
        "sd_model_hash": known.get("Model hash", ""),
        "sd_vae_name": known.get("VAE"),
        "sd_vae_hash": known.get("VAE hash"),
        "extra_generation_params": {},
        "index_of_first_image": 0,
        "infotexts": texts,
        "styles": payload.get("styles") or [],
        "job_timestamp": "0",
        "is_using_inpainting_conditioning": False,
        "version": known.get("Version", ""),
        "job": facts.key,
    }
    left_out = {"init_images", "mask", "alwayson_scripts"}
    shown = {name: value for name, value in payload.items() if name not in left_out}
    sent = images if payload.get("send_images", True) else []
    return json.dumps(
        {
            "images": sent_images.in_base64(sent),
            "parameters": shown,
            "info": json.dumps(info),
        }
    ).encode()
