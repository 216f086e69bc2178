from __future__ import annotations

from pathlib import Path

import pytest

from imagefleet import errors
from loadgen import checkpoint
from loadgen.checkpoint import Checkpoint, CheckpointFile

HERE = Checkpoint(source="s", storage="local:/data", queue="jobs")


def test_a_load_resumes_at_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    HERE.model_copy(update={"confirmed": 700_000}).write(path)

    assert checkpoint.resume(path, HERE).confirmed == 700_000
    assert [each.name for each in tmp_path.iterdir()] == ["c.json"]


def test_without_a_checkpoint_a_load_begins_with_the_first_job(tmp_path: Path) -> None:
    assert checkpoint.resume(tmp_path / "c.json", HERE) == HERE


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"source": "other"}, "the file has changed since, or the seed"),
        ({"queue": "others"}, "another queue"),
        ({"storage": "local:/other"}, "another storage"),
    ],
)
def test_the_checkpoint_of_another_load_is_refused(
    tmp_path: Path, change: dict[str, str], sentence: str
) -> None:
    path = tmp_path / "c.json"
    HERE.model_copy(update=change).write(path)

    with pytest.raises(errors.SetupError, match=f"{sentence}.*--restart"):
        checkpoint.resume(path, HERE)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"confirmed": -1}', '{"source": "s"}', "\0"])
def test_a_damaged_checkpoint_is_never_trusted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)

    with pytest.raises(errors.SetupError, match="--restart"):
        checkpoint.resume(path, HERE)


def test_a_path_that_is_not_writable_is_a_setup_error(tmp_path: Path) -> None:
    with pytest.raises(errors.SetupError, match="--checkpoint FILE"):
        HERE.write(tmp_path / "none" / "c.json")


def test_the_file_is_not_written_for_each_batch_but_never_more_than_a_window_behind(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.json"
    kept = CheckpointFile(path, HERE)
    kept.write()
    written = set()
    for confirmed in range(100, 10_001, 100):
        kept.confirm(confirmed)
        found = Checkpoint.read(path)
        assert found is not None
        assert confirmed - found.confirmed < checkpoint.POSITIONS_BETWEEN_WRITES
        written.add(found.confirmed)

    assert len(written) < 20


def test_each_queue_has_its_own_checkpoint_beside_the_file() -> None:
    path = checkpoint.default_path(Path("folder/t.yaml"), "jobs")

    assert path == Path("folder/.t.yaml.jobs.checkpoint.json")
