"""`imagefleet score`: the figures by group, and the same ones however the work is cut."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import sent_jobs
from cli import console
from evaluation.score import chunks, plan, session
from evaluation.sweep import manifest
from imagefleet.job.message import Job
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import BlobStore
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from in_process import assert_refused

pytestmark = pytest.mark.slow

Imagefleet = Callable[
    ..., "subprocess.CompletedProcess[str]"
]  # the fixture of conftest.py
Score = Callable[..., JSONDict]

ROOT = Path(__file__).parents[3]


def test_an_id_says_its_group():
    for group, number in [("cfg-3.0", 17), ("ddim-steps-50-cfg-1.5", 1_234_567)]:
        found = manifest.job_id(group, number)

        assert Job(prompt="x", id=found).id == found
        assert plan.group_of(found) == group
    assert manifest.job_id("cfg-3.0", 17) == "cfg-3.0_000017"


@pytest.mark.parametrize(
    "job_id", ["0001", "cfg-3.0", "cfg-3.0_17", "_000017", "a_b_000017", ""]
)
def test_the_id_of_a_job_of_no_sweep_says_no_group(job_id: str):
    assert plan.group_of(job_id) is None


@pytest.fixture
def score(score_command) -> Score:
    """The JSON of `imagefleet score ARGUMENTS`."""

    def run(*arguments: str, exit_code: int = 0, **where: str) -> JSONDict:
        ended = score_command(*arguments, "--json", **where)
        assert ended.returncode == exit_code, ended.stderr
        return dict(json.loads(ended.stdout), stderr=ended.stderr)

    return run


@pytest.fixture
def asked(small_reference: str) -> tuple[str, ...]:
    return "curve", "--extractor", "demo", "--reference", small_reference


def figures(found: JSONDict) -> Any:
    return found["groups"]


def test_a_sweep_has_its_figures_by_group(score: Score, tmp_path):
    found = score(
        "curve", "--extractor", "demo", "--output", "curve.svg", "--json-file", "a.json"
    )

    clean, noisy = found["groups"]
    assert (clean["group"], clean["cfg_scale"], clean["images"]) == ("cfg-1.5", 1.5, 24)
    assert (clean["sampler"], clean["steps"]) == ("plms", 50)
    assert clean["fid"] < noisy["fid"]
    assert clean["kid"] < noisy["kid"]
    assert clean["cmmd"] < noisy["cmmd"]
    assert clean["clip"] > noisy["clip"] > 10
    assert clean["kid_subset_size"] == 24
    for name in ("fid", "kid", "clip", "cmmd"):
        low, high = clean[f"{name}_interval"]
        assert low < clean[name] < high
    assert found["small"] == ["cfg-1.5", "cfg-7.0"]
    assert len(found["extractor"]["sha256"]) == 64
    assert "antialiasing" in found["extractor"]["resize"]
    assert (found["reference"], found["reference_images"]) == ("demo", 2000)
    del found["stderr"]
    assert json.loads((tmp_path / "a.json").read_text()) == found
    drawing = ET.parse(tmp_path / "curve.svg").getroot()
    texts = [each.text for each in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"1.5", "7", "FID", "CLIP score"} <= set(texts)


def test_people_get_a_table_and_what_the_figures_depend_on(
    score_command,
):
    ended = score_command("curve", "--extractor", "demo")

    assert "guidance" in ended.stdout
    assert "cfg-7.0" in ended.stdout
    assert "antialiasing" in ended.stdout
    assert "SHA-256" in ended.stdout
    assert "48 images in" in ended.stderr
    assert "images/s" in ended.stderr
    assert "±" in ended.stdout
    assert "fewer than 1,000 in cfg-1.5, cfg-7.0" in ended.stdout


def test_a_campaign_that_is_no_sweep_is_one_group(score: Score, asked: tuple[str, ...]):
    (group,) = figures(score("plain", *asked[1:]))
    swept = figures(score(*asked))[0]

    assert (group["group"], group["cfg_scale"], group["images"]) == ("all", 1.5, 24)
    # The same images and captions, without the tag of the LoRA; cut otherwise, as named otherwise.
    assert group["clip"] == pytest.approx(swept["clip"], rel=1e-6)
    assert group["fid"] == pytest.approx(swept["fid"], rel=1e-4)


#: Kills itself in the middle of a chunk, three times, then goes on to the end. With a network in
#: ONNX, torch is not imported, which takes seconds.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from evaluation.score import chunks, metrics, plan, session
from evaluation.score import run as running
from imagefleet.storage.protocol import BlobStore
from imagefleet.storage.settings import StorageSettings

plan.CHUNK_IMAGES = running._BATCH = 8
metrics.KID_SUBSETS = 3
settings, reference, extractor = StorageSettings(storage=sys.argv[1]), *sys.argv[2:4]
killed, whole = map(Path, sys.argv[4:])


def run(folder):
    networks = session.Networks(reference, extractor)
    computing = session.Computing(processes=1, state=folder)
    asked = session.ScoreRequest(settings, "curve", networks, computing, None, quiet=True)
    return session.run(asked).model_dump_json()


write = chunks.console.write_file
for writes in (2, 5, 7):
    if (child := os.fork()) == 0:
        left = iter(range(writes))
        def write_or_die(path, content):
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(path, content)
        chunks.console.write_file = write_or_die
        run(killed)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    print(len(list(killed.rglob("*.features.npy"))))
print(run(killed))
print(run(whole))
"""


def test_a_run_killed_three_times_has_the_same_figures_to_the_last_digit(
    stored: StorageSettings, pictures: Path, means_onnx: Path, tmp_path
):
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            KILLED,
            stored.storage,
            pictures,
            means_onnx,
            tmp_path / "killed",
            tmp_path / "whole",
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    *kept, killed, whole = ended.stdout.splitlines()

    assert [int(each) for each in kept] == sorted(map(int, kept))
    assert 0 < int(kept[0]) < int(kept[-1]) < 9  # of nine chunks
    assert killed == whole
    assert json.loads(whole)["groups"][1]["fid"] > 0


def test_a_second_run_computes_nothing_again(
    score: Score, asked: tuple[str, ...], monkeypatch
):
    first = score(*asked)
    monkeypatch.setattr(chunks, "write", None)  # would fail
    assert figures(score(*asked)) == figures(first)


def test_two_processes_give_the_figures_of_one(
    in_process: Imagefleet,
    score: Score,
    stored: StorageSettings,
    pictures: Path,
    means_onnx: Path,
):
    asked = ("curve", "--extractor", str(means_onnx), "--reference", str(pictures))
    ended = in_process(
        "score", *asked, "--storage", stored.storage, "--processes", "2", "--json"
    )
    two = json.loads(ended.stdout)
    assert two["extractor"]["kind"] == "ONNX"
    assert figures(two)[0]["fid"] > 0
    assert figures(score(*asked, "--state", "one")) == figures(two)


def test_missing_and_damaged_images_are_left_out_and_named(
    score: Score, asked: tuple[str, ...], stored: StorageSettings, tmp_path
):
    copy = tmp_path / "copy"
    shutil.copytree(stored.storage.removeprefix("local:"), copy)
    missing, damaged = (
        next(
            each
            for each in copy.rglob(f"cfg-1.5_00000{number}.png")
            if "curve" in each.parts
        )
        for number in (3, 4)
    )
    kept = {path: path.read_bytes() for path in (missing, damaged)}
    missing.unlink()
    damaged.write_bytes(b"x" * len(kept[damaged]))

    found = score(*asked, storage=f"local:{copy}", exit_code=console.EXIT_IMAGES_WRONG)

    assert sorted(found["left_out"]) == [
        "curve/cfg-1.5_000003.png",
        "curve/cfg-1.5_000004.png",
    ]
    assert [(each["images"], each["left_out"]) for each in figures(found)] == [
        (22, 2),
        (24, 0),
    ]
    assert "2 images missing, not as recorded or no images" in found["stderr"]

    for path, data in kept.items():
        path.write_bytes(data)
    again = score(*asked, storage=f"local:{copy}")
    assert figures(again) == figures(score(*asked, "--state", "whole"))


def test_a_folder_and_its_statistics_are_the_same_reference(
    score: Score, score_command, pictures: Path, tmp_path
):
    asked = ("curve", "--extractor", "demo")
    by_folder = score(
        *asked, "--reference", str(pictures), "--write-reference", "seen.npz"
    )
    by_file = score(*asked, "--reference", "seen.npz")

    assert (by_folder["reference_images"], by_file["reference_images"]) == (24, 24)
    for one, other in zip(figures(by_folder), figures(by_file), strict=True):
        assert one["images"] == other["images"]
        assert (one["kid_std"], other["kid_std"]) == (None, None)
        for name in ("fid", "kid", "clip", "cmmd"):
            assert one[name] == pytest.approx(other[name], rel=1e-9)
    with np.load(tmp_path / "seen.npz") as written:
        np.savez(tmp_path / "pytorch-fid.npz", mu=written["mu"], sigma=written["sigma"])
        np.savez(tmp_path / "others.npz", **{**written, "extractor": "0" * 64})
    refused = score_command(*asked, "--reference", "others.npz")
    assert "was made with another extractor than demo" in refused.stderr
    alone = figures(score(*asked, "--reference", "pytorch-fid.npz"))[0]
    assert alone["fid"] == pytest.approx(figures(by_folder)[0]["fid"], rel=1e-6)
    assert (alone["kid"], alone["cmmd"]) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("curve",), "give --extractor for FID and KID, --clip"),
        (("curve", "--extractor", "inception.pt"), "folder with --reference"),
        (
            ("curve", "--extractor", "inception.pt", "--reference", "demo"),
            "does not exist",
        ),
        (
            ("curve", "--extractor", "demo", "--reference", "no.npz"),
            "'no.npz' does not exist",
        ),
        (("curve", "--extractor", "demo", "--reference", "empty"), "has no pictures"),
        (
            ("curve", "--extractor", "demo", "--reference", "text.npz"),
            "has no statistics",
        ),
        (
            ("curve", "--extractor", "demo", "--reference", "small.npz"),
            "of another extractor",
        ),
        (("curvs", "--extractor", "demo"), "did you mean 'curve'"),
        (("../x", "--extractor", "demo"), "CAMPAIGN"),
        (("curve", "--clip", "demo", "--output", "a.svg"), "--output needs FID"),
        (
            ("curve", "--clip", "demo", "--write-reference", "a.npz"),
            "needs --reference",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused_in_one_line(
    score_command, tmp_path, arguments: tuple[str, ...], reason: str
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.npz").write_text("no statistics")
    np.savez(tmp_path / "small.npz", mu=np.zeros(3), sigma=np.eye(3))
    ended = score_command(*arguments)

    assert ended.returncode == console.EXIT_OPERATOR_MUST_ACT
    (line,) = [each for each in ended.stderr.splitlines() if each.startswith("error: ")]
    assert reason in line


def test_the_end_of_a_campaign_is_waited_for(
    score: Score,
    stored: StorageSettings,
    tmp_path,
    monkeypatch,
):
    copy = StorageSettings(storage=f"local:{tmp_path / 'copy'}")
    shutil.copytree(stored.storage.removeprefix("local:"), tmp_path / "copy")
    polls = 0

    async def note(*ids: str) -> None:
        async with open_storage(copy) as storage:
            await sent_jobs.note(storage, "plain", len(ids), ids=ids)

    asyncio.run(
        note("late", *(manifest.job_id("cfg-1.5", number) for number in range(24)))
    )
    assert (
        "1 job of plain still to do"
        in score("plain", "--clip", "demo", storage=copy.storage)["stderr"]
    )

    async def sleep(_seconds: float) -> None:
        """The job that is left ends after some polls."""
        nonlocal polls
        polls += 1
        if polls == 12:
            async with open_storage(copy) as storage:
                await end_job(storage.blobs)

    monkeypatch.setattr(session.asyncio, "sleep", sleep)
    found = score("plain", "--clip", "demo", "--follow", storage=copy.storage)
    assert polls >= 12
    assert "still to do" not in found["stderr"]


async def end_job(blobs: BlobStore) -> None:
    ended = Record(
        outcome="failed", id="late", campaign="plain", at=datetime.now(UTC), error="E"
    )
    await RecordLog(blobs, "w2").add([ended])


def test_features_that_are_not_finite_are_refused(
    score_command, pictures: Path, means_onnx: Path
):
    means_onnx.with_name("means.onnx.json").write_text(
        '{"size": 20, "std": [1e-36, 1, 1]}'
    )
    networks = ("--extractor", str(means_onnx), "--reference", str(pictures))
    ended = score_command("curve", *networks)
    assert_refused(ended, "means.onnx gives features that are not finite")


def test_a_reference_of_damaged_pictures_is_refused(score_command, tmp_path):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "one.png").write_bytes(b"no picture")
    ended = score_command("curve", "--extractor", "demo", "--reference", "damaged")
    assert ended.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert (
        "1 picture of damaged cannot be read, or changed meanwhile: one.png"
        in ended.stderr
    )
    assert "has fewer than 2 pictures" in ended.stderr


async def test_a_chains_image_is_that_of_its_last_stage(storage: Storage, tmp_path):
    def record(name: str, stage: int, **changes: Any) -> Record:
        suffix = f"~s{stage}" if stage > 1 else ""
        known = {
            "campaign": "chained",
            "blob": f"chained/{name}{suffix}.png",
            "prompt": "a house",
        }
        return Record(
            outcome="completed",
            at=datetime.now(UTC),
            id=name,
            stage=stage,
            stages=2,
            **known | changes,
        )

    group = manifest.Group(name="cfg-3.0", guidance=3, sampler="ddpm", steps=30)
    of_captions = manifest.digest(["a house"] * 2)
    await manifest.write(
        storage,
        manifest.Sweep(campaign="chained", captions=of_captions, groups=[group]),
    )
    records = [record("cfg-3.0_000000", 1), record("cfg-3.0_000000", 2, cfg_scale=1.5)]
    records.append(record("cfg-3.0_000001", 1))  # whose second stage is still to do
    await RecordLog(storage.blobs, "w1").add(records)

    made = await plan.make(storage, "chained", tmp_path, lambda count: None)

    assert made.images == {"cfg-3.0": 1}
    rows = [row for chunk in made.chunks["cfg-3.0"] for row in chunk.rows()]
    assert [row.name for row in rows] == ["chained/cfg-3.0_000000~s2.png"]
    assert made.guidance == {"cfg-3.0": 3}
