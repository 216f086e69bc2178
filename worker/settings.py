"""What a worker can be told: each field is a flag and an IMAGEFLEET_ variable."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from imagefleet.pricing.prices import Priority
from imagefleet.storage.protocol import MAX_LEASE_SECONDS
from imagefleet.telemetry.settings import TelemetrySettings


def _name_of_this_worker() -> str:
    machine = os.environ.get("SALAD_MACHINE_ID") or socket.gethostname()
    return f"{machine}-{os.getpid()}"


#: Settings of earlier versions, and what happens now: they are ignored with a warning.
REMOVED_SETTINGS: dict[str, str] = {
    "engine": "there is one engine, which draws each image at its own step",
    "max_batch": "--slots sets the images drawn at once",
    "attention": "the fastest self-attention kernel is selected for each GPU",
    "rank_capacity": "LoRAs above rank 64 are merged into the weights",
    "lora_memory_megabytes": "2 GiB of LoRA files are kept in memory",
}


class WorkerSettings(TelemetrySettings):
    """The settings of one worker, so of one GPU."""

    model: Annotated[str, BeforeValidator(str)] = Field(
        repr=False,  # an address may hold a token
        description="The checkpoint: a folder in diffusers' format or one .safetensors file; or"
        " fetched at the start, as a .safetensors file or a .tar of such a folder, from https:// or"
        " from the store's models/ (store:NAME).",
    )
    model_sha256: str | None = Field(
        default=None,
        pattern=r"^[0-9a-fA-F]{64}$",
        description="The SHA-256 that a fetched model must have; plain http:// is taken only with"
        " it.",
    )
    model_cache: Path = Field(
        default=Path("~/.cache/imagefleet/models"),
        description="Where a fetched model is kept; workers may share it.",
    )
    config: Path | None = Field(
        default=None,
        description="For a single-file checkpoint: the folder with its tokenizer and, unless it"
        " is SD1.5's, its configuration; by default the folder of the file's own name beside it.",
    )
    precision: Literal["auto", "float16", "bfloat16", "float32"] = Field(
        default="auto", description="Of the weights; auto is float16 on a GPU, float32 on a CPU."
    )
    lora_directory: Path | None = Field(
        default=None,
        description="Folder of NAME.safetensors files, looked in before the store's loras/.",
    )
    lora_cache: Path = Field(
        default=Path("~/.cache/imagefleet/loras"),
        description="Where LoRAs fetched from the store are kept; workers may share it.",
    )
    lora_cache_megabytes: int = Field(
        default=20_480,
        ge=1,
        le=16_777_216,
        description="LoRA files kept there, the latest used; those of the last minute always.",
    )
    lora_megabytes: int = Field(
        default=1024, ge=1, le=1024, description="The largest LoRA file that is accepted."
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto, cpu, cuda or cuda:N; auto takes the GPU where there is one.",
    )
    slots: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Images drawn at once; by default as many as fit the GPU's memory, at most 16.",
    )
    compile: Literal["auto", "off"] = Field(
        default="auto",
        description="auto compiles for a GPU: a minute or two at the start, far faster after.",
    )
    fp16_accumulate: bool = Field(
        default=False,
        description="Sum matrix products in float16: up to twice as fast on GeForce cards, images"
        " some 50 dB from those without.",
    )
    lease_seconds: float = Field(
        default=120,
        ge=2,
        le=MAX_LEASE_SECONDS,
        description="A dead worker's jobs come back after this long; renewed at half of it.",
    )
    max_attempts: int = Field(
        default=5, ge=1, le=100, description="Deliveries of a job before it counts as failed."
    )
    prefetch_seconds: float = Field(
        default=10,
        ge=0,
        le=600,
        description="Work pulled ahead of the GPU; more rides out slow storage, less leaves"
        " other workers their share near the end of a queue.",
    )
    encode_threads: int = Field(default=2, ge=1, le=64, description="Threads that encode images.")
    uploads: int = Field(default=16, ge=1, le=256, description="Uploads in flight at once.")
    grace_seconds: float = Field(
        default=20,
        ge=0,
        le=3600,
        description="After SIGTERM: time to finish what the GPU has begun; the rest is handed"
        " back, which may take 10 s more where the storage does not answer.",
    )
    poll_seconds: float = Field(
        default=10, ge=0.1, le=600, description="Longest pause between looks at an empty queue."
    )
    until_empty: bool = Field(
        default=False, description="Exit once the queue is empty and nothing is leased any more."
    )
    stall_seconds: float = Field(
        default=300, ge=1, description="A GPU call longer than this means a broken node."
    )
    engine_failures: int = Field(
        default=10,
        ge=1,
        description="Failed images in a row after which a plain image is drawn; if that fails as"
        " well, the node counts as broken.",
    )
    host: str = Field(
        default="127.0.0.1",
        description="Address of /metrics, /started, /live and /ready; 0.0.0.0 for all.",
    )
    port: int = Field(
        default=0,
        ge=0,
        le=65_535,
        description="Port of /metrics, /started, /live and /ready; 0 takes any free one and logs"
        " it; probes (`imagefleet health`) need one of your choice.",
    )
    start_up_seconds: float | None = Field(
        default=None,
        ge=0,
        le=86_400,
        description="Longest start-up (the model's loading and the node's check) before a node"
        " counts as broken; by default 1200 on SaladCloud and 0, no limit, elsewhere.",
    )
    min_images_per_second: float | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="A slower node counts as broken, measured at the start and over 15 minutes of"
        " work, in images of 512x512 and 15 steps; by default an eighth of the GPU class's record"
        " on SaladCloud and 0, unchecked, elsewhere.",
    )
    min_upload_megabits: float | None = Field(
        default=None,
        ge=0,
        le=100_000,
        description="Megabits a second to the store; a node with less counts as broken. By"
        " default 2 on SaladCloud and 0, unchecked, elsewhere.",
    )
    setup_patience_seconds: float = Field(
        default=3600,
        ge=0,
        le=604_800,
        description="On SaladCloud: how long a worker waits for storage, a queue or credentials"
        " that no other node would have either, before it ends with exit code 0.",
    )
    metadata_url: str | None = Field(
        default=None,
        pattern=r"^http://\S+$",
        description="SaladCloud's metadata service; its own address on SaladCloud, none elsewhere."
        " Another one, for tests, makes a worker behave as on SaladCloud.",
    )
    depth_seconds: float = Field(
        default=60, ge=0, description="How often the queues' depth is measured; 0 for never."
    )
    price_per_hour: float | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Dollars per hour of this machine; by default the price table's.",
    )
    priority: Priority = Field(
        default="batch", description="SaladCloud's priority of this replica, for its price."
    )
    gpu: str | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="GPU class, for its price and the metrics; by default the driver is asked.",
    )
    price_file: Path | None = Field(
        default=None, description="YAML of GPU and storage prices in place of the built-in ones."
    )
    group: str = Field(
        default_factory=lambda: os.environ.get("SALAD_CONTAINER_GROUP_NAME", ""),
        max_length=128,
        description="The container group, for the metrics; SaladCloud tells it by itself.",
    )
    name: str = Field(
        default_factory=_name_of_this_worker,
        min_length=1,
        max_length=128,
        description="This worker's name in failed jobs and logs; machine and process by default.",
    )
