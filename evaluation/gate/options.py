"""The options of `imagefleet gate`, and what they ask for."""

from dataclasses import dataclass
from pathlib import Path

from cli import options
from cli.options import option
from evaluation.gate.sides import Engine, Side
from evaluation.gate.verdict import Bounds
from imagefleet.storage.settings import StorageSettings


@dataclass(frozen=True)
class DrawOptions:
    """Options: which images are compared, and how missing ones are drawn."""

    other_storage: str | None = option(
        "Storage of B's campaign, if it is another one.", metavar="ADDRESS"
    )
    jobs: Path | None = option(
        "Captions, or whole jobs, to draw, as for `load`. [default: the demo's jobs]",
        metavar="FILE",
    )
    count: int | None = option(
        "Images to compare. [default: all; of --jobs the first 24]", min=2
    )
    steps: int | None = option(
        "Steps of all drawn jobs, whatever the jobs say.", min=1, max=150
    )
    model: Path | None = option(
        "Checkpoint to draw with. [default: the small demo checkpoint]"
    )
    lora_directory: Path | None = option(
        "Folder of LoRAs. [default: the demo's, with its model]"
    )
    embedding_directory: Path | None = option("Folder of textual inversion embeddings.")
    device: options.Device = "auto"
    keep: Path | None = option("Keep drawn images in a and b there.", metavar="FOLDER")


@dataclass(frozen=True)
class JudgeOptions:
    """Options: the networks that judge the images, and the bounds."""

    extractor: str | None = option(
        "Network for FID and the feature distance, as for `score`; demo, or none."
        " [default: demo where the demo's model draws]",
        metavar="FILE",
    )
    clip: str | None = option(
        "CLIP of transformers for the CLIP score; demo, or none. [default:"
        " demo with that --extractor]",
        metavar="FOLDER",
    )
    reference: str | None = option(
        "Pictures or their statistics for FID, as for `score`. [default: demo with that"
        " extractor, else the halves of A]",
        metavar="FOLDER|STATISTICS",
    )
    set_: list[str] | None = option(
        "A bound: psnr, the least over all pairs (30 dB); alike, the least share of pairs alike"
        " (100 %), each by ssim, the least of a region (0.5), and detail, colour and light, the"
        " largest changes of sharpness (25 %), colours (20 %) and brightness (3 of 255); of all"
        " together brightness (1 of 255), contrast (2 %), sharpness (5 %),"
        " displacement (0.1 pixels); features, of the distance between images of different jobs"
        " (2 %); fid and clip, the largest change (2 % and 0.2 %). Repeatable.",
        None,
        "--set",
        metavar="NAME=NUMBER",
    )
    limit: int = option(
        "Worst pairs to list and to show.", 8, min=0, max=200, metavar="COUNT"
    )


@dataclass(frozen=True)
class GateRequest:
    """Both sides, and how they are drawn and judged."""

    a: Side
    b: Side
    #: Storages of A's and of B's campaign.
    storages: tuple[StorageSettings, StorageSettings]
    drawn: DrawOptions
    judged: JudgeOptions
    bounds: Bounds

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.a, self.b

    @property
    def engines(self) -> dict[int, Engine]:
        """The sides that are drawn here, by their place."""
        return {
            at: side for at, side in enumerate(self.sides) if isinstance(side, Engine)
        }
