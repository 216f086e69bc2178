"""The demo's checkpoint with its 24 messages, of which two are invalid, and its cascade."""

import json
from pathlib import Path

from imagefleet.errors import SetupError

REFERENCE_MESSAGE = (
    Path(__file__).with_name("reference-job.json").read_text(encoding="utf-8")
)

CAMPAIGN = "demo"


def _trained(name: str) -> Path:
    """A folder inside the package, or in a checkout of the source."""
    in_wheel = Path(__file__).with_name(name)
    return in_wheel if in_wheel.is_dir() else Path(__file__).resolve().parents[2] / name


#: The demo's checkpoint, and the folder of the cascade's two.
TRAINED = _trained("demo_model")
CASCADE = _trained("demo_cascade")

#: The LoRA with which the demo's checkpoint draws in four steps.
ACCELERATOR = TRAINED / "loras" / "few-steps.safetensors"

#: A misspelt field and an unknown LoRA, for the demo to show failed jobs.
INVALID_MESSAGE = json.dumps({"prompt": "a lighthouse in a storm", "stepz": 15})
MISSING_LORA_MESSAGE = json.dumps(
    {
        "prompt": "a castle in the clouds, <lora:no-such-style:0.8>",
        "id": "missing-lora",
        "campaign": CAMPAIGN,
    }
)


def find_checkpoint(folder: Path | None = None) -> Path:
    """The folder of the demo's checkpoint, or another of its; raises SetupError if missing."""
    folder = folder or TRAINED
    if not folder.is_dir():
        raise SetupError(f"the demo checkpoint {str(folder)!r} does not exist")
    return folder


def read_jobs(folder: Path, campaign: str = CAMPAIGN) -> list[str]:
    """The jobs that come with a checkpoint or a cascade, by their number."""
    lines = (folder / "demo_jobs.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        json.dumps({"id": f"{number:02}", "campaign": campaign, **json.loads(line)})
        for number, line in enumerate(lines, start=1)
    ]


def messages() -> list[str]:
    """All messages in order: the reference job, the checkpoint's 21, and the invalid ones."""
    jobs = read_jobs(TRAINED)
    return [
        REFERENCE_MESSAGE,
        *jobs[:7],
        INVALID_MESSAGE,
        *jobs[7:14],
        MISSING_LORA_MESSAGE,
        *jobs[14:],
    ]


def without_sampling(message: str) -> str:
    """The message without steps, sampler and guidance, for a worker with an accelerator."""
    sampling = {"steps", "sampler_name", "cfg_scale"}
    return json.dumps(
        {k: v for k, v in json.loads(message).items() if k not in sampling}
    )
