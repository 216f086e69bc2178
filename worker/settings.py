"""Worker settings: each field is a flag and an IMAGEFLEET_ variable."""

import functools
import importlib.util
import os
import socket
from importlib import metadata
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from imagefleet.errors import SetupError
from imagefleet.pricing.prices import Priority
from imagefleet.storage.protocol import MAX_LEASE_SECONDS
from imagefleet.storage.settings import PublicKeys
from imagefleet.telemetry.settings import TelemetrySettings

#: The settings of a worker by subject, in the order of the help and the documentation.
SUBJECTS: dict[str, tuple[str, ...]] = {
    "Model and LoRAs": (
        "model",
        "model_sha256",
        "config",
        "accelerator",
        "vae",
        "taesd",
        "lora_directory",
        "embedding_directory",
    ),
    "GPU": (
        "gpus",
        "device",
        "precision",
        "slots",
        "compile",
        "kernels",
        "fp16_accumulate",
    ),
    "Jobs and leases": (
        "trusted_key",
        "signing_key",
        "input_campaigns",
        "lease_seconds",
        "max_attempts",
        "prefetch_seconds",
        "grace_seconds",
        "until_empty",
        "no_marks",
    ),
    "Node": (
        "cache",
        "cache_megabytes",
        "start_up_seconds",
        "min_images_per_second",
        "host",
        "port",
    ),
    "Cost and labels": (
        "name",
        "group",
        "gpu",
        "priority",
        "price_per_hour",
        "price_file",
    ),
}


#: A path ends in .safetensors.
FileOrName = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]


def machine_name() -> str:
    """The machine's id on SaladCloud, else its host name."""
    return os.environ.get("SALAD_MACHINE_ID") or socket.gethostname()


_LIBRARIES = "torch diffusers transformers peft safetensors numpy PIL isal pynvml"


@functools.cache
def version() -> str:
    try:
        return metadata.version("imagefleet")
    except metadata.PackageNotFoundError:
        return "unknown"  # a checkout that is not installed


def require_libraries() -> None:
    """Raises SetupError, with the command to run, where only the console is installed."""
    for name in _LIBRARIES.split():
        if importlib.util.find_spec(name) is None:
            raise SetupError(
                f"{name} is not installed; to generate images: pip install '.[worker]'"
            )


class WorkerSettings(TelemetrySettings):
    """Settings of one worker, which uses one GPU."""

    SUBJECTS: ClassVar = SUBJECTS

    model: Annotated[str, BeforeValidator(str)] = Field(
        repr=False,  # an address may hold a token
        description="The checkpoint, of Stable Diffusion 1.x, 2.x or SDXL: a .safetensors file or"
        " a folder in diffusers format. Or one to fetch at the start, as a .safetensors file or a"
        " .tar of such a folder: an https:// URL, or store:NAME for models/NAME in the storage,"
        " store:* for all models there. Repeatable (in the variable separated by commas): the"
        " worker changes between them as their jobs wait; jobs without a model are drawn with the"
        " first.",
        json_schema_extra={"repeatable": True},
    )
    model_sha256: str | None = Field(
        default=None,
        pattern=r"^[0-9a-fA-F]{64}$",
        description="SHA-256 of a fetched model; required for plain http://.",
    )
    config: Path | None = Field(
        default=None,
        description="For a single-file checkpoint whose configuration or tokenizer is not its"
        " family's usual one: the folder with them; by default a folder next to it with the file's"
        " name.",
    )
    precision: Literal["auto", "float16", "bfloat16", "float32", "int8"] = Field(
        default="auto",
        description="Precision of the weights; auto is float16 on a GPU, for FLUX.2-klein bfloat16,"
        " or int8 under 12 GB, and float32 on a CPU. int8 is for FLUX.2-klein alone.",
    )
    accelerator: FileOrName | None = Field(
        default=None,
        description="A LoRA for few steps that all jobs are drawn with: a .safetensors file, or a"
        " name as in prompts. The kind follows from the name (LCM, Lightning, Hyper, DMD2, PCM);"
        " jobs without steps, sampler and guidance get the kind's.",
    )
    vae: FileOrName | None = Field(
        default=None,
        description="The VAE of all jobs that name none (sd_vae), in place of the checkpoint's: a"
        " .safetensors file, or a name as in jobs.",
    )
    taesd: Path | None = Field(
        default=None,
        description="Folder of a tiny autoencoder (TAESD) in diffusers format, of the model's"
        " family, that decodes in place of the VAE, unless a job asks for that: faster, visibly"
        " softer.",
    )
    lora_directory: Path | None = Field(
        default=None,
        description="Folder of NAME.safetensors files, searched before loras/ in the storage.",
    )
    embedding_directory: Path | None = Field(
        default=None,
        description="Folder of NAME.safetensors files with textual inversion embeddings, searched"
        " before embeddings/ in the storage.",
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto, cpu, cuda or cuda:N; auto is the GPU if there is one.",
    )
    slots: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Images generated at once; by default as many as fit the GPU's memory, at"
        " most 16.",
    )
    compile: Literal["auto", "off"] = Field(
        default="auto",
        description="auto compiles for a GPU beside the first images: slower for a minute or two,"
        " far faster after.",
    )
    kernels: Path | None = Field(
        default=None,
        description="Folder of compiled kernels (`imagefleet files make kernels`), searched before"
        " kernels/ in the storage. Programs are in them: only a folder of your own.",
    )
    fp16_accumulate: bool = Field(
        default=False,
        description="Accumulate matrix products in float16: up to twice as fast on GeForce"
        " cards; images differ slightly (about 50 dB PSNR).",
    )
    trusted_key: PublicKeys | None = Field(
        default=None,
        repr=False,  # the private key, if somebody mistakes the two
        description="Public key (`imagefleet keys mint signing`) with which each job, and the"
        " list of LoRAs and models, must be signed; several, separated by commas, during a change"
        " of keys. By default nothing need be signed.",
    )
    signing_key: Path | None = Field(
        default=None,
        description="File of the private key (`imagefleet keys mint signing`) that signs, for"
        " workers with --trusted-key, jobs, the lists of files, and, on a worker, the kernels that"
        " it shares: only on machines of your own.",
    )
    input_campaigns: str = Field(
        default="own",
        pattern=r"^(own|\*|[\w.-]+(\s*,\s*[\w.-]+)*)$",
        description="Campaigns whose images jobs of any other may begin with, separated by commas;"
        " * for all, own for none but the job's own.",
    )
    lease_seconds: float = Field(
        default=120,
        ge=2,
        le=MAX_LEASE_SECONDS,
        description="Lease of a job, renewed at half of it; a dead worker's jobs are delivered"
        " again after this time.",
    )
    max_attempts: int = Field(
        default=5, ge=1, le=100, description="Attempts at a job before it has failed."
    )
    prefetch_seconds: float = Field(
        default=10,
        ge=0,
        le=600,
        description="Work pulled ahead of the GPU; more tolerates slow storage, less shares the"
        " end of a queue more evenly among workers.",
    )
    grace_seconds: float = Field(
        default=20,
        ge=0,
        le=3600,
        description="Time after SIGTERM to finish what the GPU has begun; the rest is handed"
        " back, which may take 10 s more if the storage does not answer.",
    )
    until_empty: bool = Field(
        default=False,
        description="Exit once the queue is empty and no message is leased.",
    )
    no_marks: bool = Field(
        default=False,
        description="Leaves out what each image file says of its origin to programs: that it is"
        " generated, as the European Union's AI Act requires.",
    )
    cache: Path = Field(
        default=Path("~/.cache/imagefleet"),
        description="Folder for fetched models, LoRAs, embeddings and compiled kernels; workers may"
        " share it.",
    )
    cache_megabytes: int = Field(
        default=20_480,
        ge=1,
        le=16_777_216,
        description="Size limit of the cached LoRAs; the least recently used are removed first."
        " Models do not count and are not removed.",
    )
    start_up_seconds: float | None = Field(
        default=None,
        ge=0,
        le=86_400,
        description="Limit for the start-up (loading the model and checking the node); a node"
        " that exceeds it is broken. By default 1200 on SaladCloud and 0, no limit, elsewhere.",
    )
    min_images_per_second: float | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="A node below this speed is broken, measured over 15 minutes of work in 512x512"
        " images of 15 steps. By default an eighth of the GPU class's record on"
        " SaladCloud and 0, unchecked, elsewhere.",
    )
    host: str = Field(
        default="127.0.0.1",
        description="Address to serve /metrics, /started, /live and /ready on; 0.0.0.0 for all.",
    )
    port: int = Field(
        default=0,
        ge=0,
        le=65_535,
        description="Port of /metrics, /started, /live and /ready; 0 picks a free one and logs"
        " it. Probes (`imagefleet health`) need a fixed one.",
    )
    name: str = Field(
        default_factory=lambda: f"{machine_name()}-{os.getpid()}",
        min_length=1,
        max_length=128,
        description="This worker's name in metrics, failed jobs and images; by default machine"
        " and process.",
    )
    group: str = Field(
        default_factory=lambda: os.environ.get("SALAD_CONTAINER_GROUP_NAME", ""),
        max_length=128,
        description="Container group, for the metrics; set by SaladCloud itself.",
    )
    gpu: str | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="GPU class, for its price and the metrics; by default the driver's.",
    )
    priority: Priority = Field(
        default="batch",
        description="This replica's priority on SaladCloud, for its price.",
    )
    price_per_hour: float | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Price of this machine in $/h; by default from the price table.",
    )
    price_file: Path | None = Field(
        default=None,
        description="YAML file of GPU and storage prices that replaces the built-in table.",
    )


class MachineSettings(WorkerSettings):
    """Settings of the workers of one machine: those of each, and which GPUs they use."""

    gpus: str | None = Field(
        default=None,
        pattern=r"^(all|[^\s,]+(\s*,\s*[^\s,]+)*)$",
        description="all, or the numbers of GPUs, separated by commas: one worker process for each"
        " GPU. With --device cpu, a process for each number. By default one worker, on the"
        " GPU of --device.",
    )
