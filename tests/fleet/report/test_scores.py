"""The scores of a campaign on its report's page and in its JSON."""

import asyncio
import json
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from evaluation.score.figures import GroupScores, Scores
from fleet import console
from imagefleet.records.record import Record, RecordLog
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

Imagefleet = Callable[
    ..., "subprocess.CompletedProcess[str]"
]  # the fixture of conftest.py


def scores(campaign: str) -> Scores:
    extractor: dict[str, Any] = {
        "name": "<b>inception.pt",
        "kind": "TorchScript",
        "size": 299,
    }
    extractor |= {"dimensions": 2048, "resize": "PIL bicubic", "sha256": "ab" * 32}
    return Scores(
        campaign=campaign,
        reference="val2014",
        reference_images=30_000,
        extractor=extractor,
        clip_extractor=None,
        kid_subsets=100,
        small=("cfg-9.0", "the reference"),
        groups=tuple(
            GroupScores(
                group=f"cfg-{guidance}",
                cfg_scale=guidance,
                images=2_000,
                fid=fid,
                fid_interval=(fid - 0.5, fid + 0.5),
                clip=30 + guidance,
            )
            for guidance, fid in ((1.5, 21.25), (3.0, 12.5), (8.0, 15.75))
        ),
    )


@pytest.fixture
def storage(tmp_path: Path) -> str:
    """A storage with one image of the campaign `curve`."""
    address = f"local:{tmp_path / 'storage'}"

    async def fill() -> None:
        async with open_storage(StorageSettings(storage=address)) as storage:
            await storage.create()
            image = Record(
                outcome="completed",
                id="cfg-3.0_000001",
                campaign="curve",
                at=datetime.now(UTC),
                blob="curve/cfg-3.0_000001.png",
                size_bytes=10,
            )
            await RecordLog(storage.blobs, "w1").add([image])

    asyncio.run(fill())
    return address


def test_the_page_has_the_curve_and_the_figures(
    in_process: Imagefleet, storage: str, tmp_path: Path
) -> None:
    (tmp_path / "scores.json").write_text(scores("curve").model_dump_json())
    arguments = ("report", "curve", "--storage", storage, "--scores", "scores.json")

    ended = in_process(*arguments)
    assert ended.returncode == console.EXIT_DONE, ended.stderr
    page = (tmp_path / "curve-report.html").read_text()
    drawing = page[
        page.index('<div class="curve">') : page.index("Each point is named")
    ]
    assert drawing.count("<circle") == 3
    assert "cfg-3.0: FID 12.500 ±0.500, CLIP 33.000" in drawing
    assert "21.250 ±0.500" in page
    assert page.count("fewer than 1,000 in cfg-9.0, the reference") == 2, (
        "curve and facts"
    )
    assert "val2014, 30,000 images" in page
    assert "&lt;b&gt;inception.pt" in page
    assert "<b>inception" not in page

    found = json.loads(in_process(*arguments, "--json").stdout)
    assert [group["fid"] for group in found["scores"]["groups"]] == [21.25, 12.5, 15.75]


def test_a_report_without_scores_has_none(
    in_process: Imagefleet, storage: str, tmp_path: Path
) -> None:
    found = in_process("report", "curve", "--storage", storage)
    assert found.returncode == console.EXIT_DONE, found.stderr
    assert "FID" not in (tmp_path / "curve-report.html").read_text()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (scores("spring").model_dump_json(), "has the scores of spring, not of curve"),
        ('{"groups": []}', "is no JSON of `imagefleet score`"),
        ("no JSON", "is no JSON of `imagefleet score`"),
        (None, "cannot read scores.json"),
    ],
)
def test_other_files_are_refused(
    in_process: Imagefleet,
    storage: str,
    tmp_path: Path,
    content: str | None,
    reason: str,
) -> None:
    if content is not None:
        (tmp_path / "scores.json").write_text(content)
    ended = in_process(
        *("report", "curve", "--storage", storage, "--scores", "scores.json")
    )
    assert ended.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert reason in ended.stderr
