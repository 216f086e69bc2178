"""The options of `imagefleet bench`."""

from dataclasses import dataclass
from pathlib import Path

from cli.options import option
from imagefleet.pricing import families, prices


@dataclass(frozen=True)
class BenchOptions:
    """Options: the model, the machine and its price."""

    model: Path | None = option(
        "A checkpoint, as for the worker. By default SD1.5 with random weights on a GPU"
        " (2 GB in the temporary folder), and the small demo checkpoint on a CPU."
    )
    family: str = option(
        "Family of the checkpoint with random weights. SDXL takes 7 GB in the temporary"
        " folder.",
        families.SD1.slug,
        metavar="|".join(families.FAMILIES),
    )
    device: str = option("auto, cpu, cuda or cuda:N.", "auto")
    slots: int | None = option(
        "Images at once. [default: by free memory]", min=1, max=256
    )
    seconds: float | None = option(
        "Per measured rate. [default: 20 on a GPU, 3 on a CPU]", min=0.1
    )
    steps: int | None = option("Steps of each image. [default: 15]", min=1, max=150)
    baseline: bool = option(
        "Also measure diffusers + peft, one job at a time.", default=False
    )
    fp16_accumulate: bool = option("As the worker's setting.", default=False)
    price_per_hour: float | None = option(
        "This machine's price in $/h.", min=0.0001, metavar="DOLLARS"
    )
    gpu: str | None = option(
        "GPU class, for its price. [default: this machine's]", metavar="NAME"
    )
    priority: prices.Priority = option("SaladCloud's priority.", "batch")
