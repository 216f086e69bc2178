"""The reference of a scoring run: a folder of pictures, or their statistics in a file."""

import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cli import console
from evaluation.score import chunks, extractors
from evaluation.score.extractors import DEMO, ExtractorFacts
from evaluation.score.plan import Chunk
from evaluation.score.statistics import UNREADABLE, Rows, Statistics
from imagefleet.errors import SetupError

#: 2,000 pictures of the drawn world; `benchmarks/scoring/reference.py` makes it.
_DEMO_FILE = Path(__file__).with_name(DEMO) / "reference.npz"


#: FID and KID are not defined for a single picture.
_LEAST = 2


@dataclass(frozen=True)
class Reference:
    """Statistics are for FID, features for KID, those of CLIP for CMMD; each may be missing."""

    name: str
    images: int | None
    #: SHA-256 of the file, or of a folder's pictures whatever their names.
    sha256: str
    statistics: Statistics | None = None
    features: Rows | None = None
    clip: Rows | None = None


def of_chunks(
    folder: Path,
    done: Sequence[Chunk],
    extractor: ExtractorFacts | None,
    clip: ExtractorFacts | None,
) -> Reference:
    """The reference in a folder whose chunks are computed; pictures that are none are named."""
    notes = [note for note in map(chunks.read_note, done) if note]
    if left_out := [name for note in notes for name in note.left_out]:
        shown = ", ".join(left_out[:3])
        console.print_warning(
            f"{console.counted(len(left_out), 'picture')} of {folder} cannot be read, or changed"
            f" meanwhile: {shown}"
        )
    images = sum(note.images for note in notes)
    if images < _LEAST:
        raise SetupError(
            f"the reference {folder} has fewer than {_LEAST} pictures to read"
        )
    rows = (
        chunks.StoredRows(done, "features", extractor.dimensions) if extractor else None
    )
    return Reference(
        str(folder),
        images,
        hash_of_all(row.sha256 or "" for chunk in done for row in chunk.rows()),
        Statistics.of(rows) if rows else None,
        rows,
        chunks.StoredRows(done, "clip", clip.dimensions) if clip else None,
    )


def hash_of_all(hashes: Iterable[str]) -> str:
    """The SHA-256 of a set of files by theirs, whatever their names and order."""
    return hashlib.sha256("\n".join(sorted(hashes)).encode()).hexdigest()


def read(
    path: str, extractor: ExtractorFacts | None, clip: ExtractorFacts | None
) -> Reference:
    """Statistics of pytorch-fid, clean-fid or `write`; raises SetupError for other ones."""
    file = _DEMO_FILE if path == DEMO else Path(path)
    if not file.is_file():
        raise SetupError(f"the reference {path!r} does not exist")
    statistics = None
    if extractor:
        statistics = Statistics.read(file)
        if (dimensions := len(statistics.mean)) != extractor.dimensions:
            raise SetupError(
                f"the reference {path} has {dimensions:,} features an image, and {extractor.name}"
                f" {extractor.dimensions:,}: they are of another extractor"
            )
    try:
        with np.load(file, allow_pickle=False) as stored:
            images = int(stored["count"]) if "count" in stored else None
            for which, facts in (("extractor", extractor), ("clip_extractor", clip)):
                if facts and which in stored and str(stored[which]) != facts.sha256:
                    raise SetupError(
                        f"the reference {path} was made with another {which.replace('_', ' ')}"
                        f" than {facts.name}: its SHA-256 is {stored[which]}"
                    )
            features = (
                stored["features"] if extractor and "features" in stored else None
            )
            seen = (
                stored["clip_features"] if clip and "clip_features" in stored else None
            )
    except UNREADABLE as error:
        raise SetupError(f"the reference {path} cannot be read: {error}") from None
    return Reference(
        path, images, extractors.sha256_of(file), statistics, features, seen
    )


def write(
    found: Reference,
    path: Path,
    extractor: ExtractorFacts | None,
    clip: ExtractorFacts | None,
) -> None:
    """Writes statistics that need no pictures any more, and that pytorch-fid reads, too."""
    arrays = {"count": np.array(found.images or 0)}
    if found.statistics:
        arrays |= {"mu": found.statistics.mean, "sigma": found.statistics.covariance}
    for name, rows in (("features", found.features), ("clip_features", found.clip)):
        if rows is not None:
            arrays[name] = rows[np.arange(rows.shape[0])]
    for name, facts in (("extractor", extractor), ("clip_extractor", clip)):
        if facts:
            arrays[name] = np.array(facts.sha256)
    stored = io.BytesIO()
    np.savez_compressed(stored, **arrays)  # type: ignore[arg-type]
    console.write_file(path, stored.getvalue())
