"""The noise below a mask (`inpainting_fill` 2) of the images of a job."""

import json

from imagefleet.job.message import read_job
from worker.stages.requests import requests_of


def test_each_batch_has_the_noise_of_the_first_as_in_automatic1111():
    # `init` of StableDiffusionProcessingImg2Img (1.10) runs once, with all_seeds[0:batch_size].
    fields = {
        "prompt": "a",
        "init_images": ["a.png"],
        "mask": "b.png",
        "inpainting_fill": 2,
    }
    job = read_job(
        json.dumps({**fields, "seed": 5, "batch_size": 2, "n_iter": 3}), "one"
    )
    requests = requests_of(job, (64, 64), (), ())
    assert [each.seed for each in requests] == [5, 6, 7, 8, 9, 10]
    assert [each.fill_seed for each in requests] == [5, 6] * 3
