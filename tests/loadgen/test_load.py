import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import polling
from imagefleet import errors
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from loadgen import load
from loadgen.load import Checkpoint, Load
from loadgen.settings import LoadSettings

HERE = Checkpoint(source="s", storage="local:/data", queue="jobs")


def test_a_load_resumes_at_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    HERE.model_copy(update={"confirmed": 700_000}).write(path)

    assert load.resume(path, HERE).confirmed == 700_000
    assert [each.name for each in tmp_path.iterdir()] == ["c.json"]


def test_without_a_checkpoint_a_load_begins_with_the_first_job(tmp_path: Path) -> None:
    assert load.resume(tmp_path / "c.json", HERE) == HERE


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
        load.resume(path, HERE)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"confirmed": -1}', '{"source": "s"}', "\0"]
)
def test_a_damaged_checkpoint_is_never_trusted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)

    with pytest.raises(errors.SetupError, match="--restart"):
        load.resume(path, HERE)


def test_a_path_that_is_not_writable_is_a_setup_error(tmp_path: Path) -> None:
    with pytest.raises(errors.SetupError, match="--state FILE"):
        HERE.write(tmp_path / "none" / "c.json")


def test_each_queue_has_its_own_checkpoint_beside_the_file() -> None:
    path = load.default_path(Path("folder/t.yaml"), "jobs")

    assert path == Path("folder/.t.yaml.jobs.checkpoint.json")


class ManyJobs:
    """A source of jobs that are made at once."""

    identity = "many"
    campaign = "spring"
    path = Path("many")

    def __init__(self, count: int) -> None:
        self.count = count

    def bodies(self, start: int) -> Iterator[str]:
        rest = f'"campaign":"spring","digest":"{"0" * 64}"}}'
        return (f'{{"id":"{number}",{rest}' for number in range(start, self.count))


async def test_ten_million_jobs_take_no_more_memory_than_ten_thousand(
    local_settings: StorageSettings, tmp_path: Path
) -> None:
    """Its objects are counted: a list of what was sent would show after a thousandth of them."""
    objects: dict[int, int] = {}

    async def instantly(_bodies: object, **_: object) -> None:
        await polling.turn()

    def count(confirmed: int) -> None:
        if confirmed in (1_600, 8_000):
            gc.collect()
            objects[confirmed] = len(gc.get_objects())

    async with open_storage(local_settings) as storage:
        storage.models.send = instantly  # type: ignore[method-assign]
        settings = LoadSettings(storage=local_settings.storage)
        source: Any = ManyJobs(10_000)
        summary = await Load(
            storage, source, settings, tmp_path / "c", restart=True
        ).run(count)
    assert summary.sent == 10_000
    assert objects[8_000] - objects[1_600] < 500
