"""Names made of jobs' and workers' names, beside those of images (`message.image_stem`)."""

import re

from imagefleet.job.message import DEFAULT_CAMPAIGN

#: Drawings that came too late for their names: below the image's name, one for each worker.
DUPLICATES = "-duplicates/"

#: Images that `imagefleet redo` has replaced: below the image's name.
REPLACED = "-replaced/"

#: Records of the images that a node has stored since its last good check, once one has failed.
SUSPECT = "-suspect/"

#: What workers and the operator store beside images begins so.
ASIDE = "-"


def worker_file_name(worker: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", worker).lstrip(".") or "_"


def duplicate_name(image: str, worker: str) -> str:
    """The blob of a drawing of *image* that its worker keeps aside, as the name was taken."""
    return f"{DUPLICATES}{image}/{worker_file_name(worker)}.{image.rpartition('.')[2]}"


def split_job_key(name: str, campaign: str | None = None) -> tuple[str, str]:
    """Campaign and id of a job that somebody names by `campaign/id`, or by its id alone."""
    if campaign is None and "/" in name:
        campaign, _, name = name.partition("/")
    return campaign or DEFAULT_CAMPAIGN, name
