"""The options of `imagefleet gate`, and what they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from evaluation.gate.sides import Engine, Side
from evaluation.gate.verdict import Bounds
from imagefleet.storage.settings import StorageSettings


@dataclass(frozen=True, slots=True)
class Drawn:
    """What is drawn here and now, and compared."""

    other_storage: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Storage of B's campaign, if it is another one."),
    ] = None
    jobs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Captions, or whole jobs, to draw, as for `load`. [default: the demo's jobs]",
        ),
    ] = None
    count: Annotated[
        int | None,
        typer.Option(min=2, help="Images to compare. [default: all; of --jobs the first 24]"),
    ] = None
    steps: Annotated[
        int | None, typer.Option(min=1, max=150, help="Of all drawn jobs, whatever these say.")
    ] = None
    model: Annotated[
        Path | None,
        typer.Option(help="Checkpoint to draw with. [default: the small demo checkpoint]"),
    ] = None
    lora_directory: Annotated[
        Path | None, typer.Option(help="Folder of LoRAs. [default: the demo's, with its model]")
    ] = None
    embedding_directory: Annotated[
        Path | None, typer.Option(help="Folder of textual inversion embeddings.")
    ] = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    keep: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep drawn images in a and b there.")
    ] = None


@dataclass(frozen=True, slots=True)
class Judged:
    """What judges the images, and within which bounds."""

    extractor: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Network for FID and the feature distance, as for `score`; demo, or none."
            " [default: demo where the demo's model draws]",
        ),
    ] = None
    clip: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="CLIP of transformers or open_clip for the CLIP score; demo, or none. [default:"
            " demo with that --extractor]",
        ),
    ] = None
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|STATISTICS",
            help="Pictures or their statistics for FID, as for `score`. [default: demo with that"
            " extractor, else the halves of A]",
        ),
    ] = None
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=NUMBER",
            help="A bound: psnr, the least over all pairs (30 dB); alike, the least share of pairs"
            " alike (95 %); features, the largest feature distance of that between images of"
            " different jobs (2 %); fid and clip, the largest change (2 % and 0.2 %). Repeatable.",
        ),
    ] = None
    limit: Annotated[
        int, typer.Option(min=0, max=200, metavar="COUNT", help="Worst pairs to list and to show.")
    ] = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare and how."""

    a: Side
    b: Side
    storages: tuple[StorageSettings, StorageSettings]
    """Of the campaigns of A and of B."""
    drawn: Drawn
    judged: Judged
    bounds: Bounds

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.a, self.b

    @property
    def engines(self) -> dict[int, Engine]:
        """The sides that are drawn here, by their place."""
        return {at: side for at, side in enumerate(self.sides) if isinstance(side, Engine)}
