"""A short storm on each storage; `make chaos` makes long ones."""

from collections.abc import Iterator, Mapping
from typing import TypedDict

import pytest

import forks
import storm
from imagefleet.storage.settings import StorageSettings

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[forks.Forks]:
    with storm.commands(tmp_path_factory.mktemp("forks")) as made:
        yield made


def test_commands_and_workers_of_a_storm_have_every_part_of_its_storage(
    storage_settings: StorageSettings, monkeypatch
):
    for name, value in forks.environment(storage_settings).items():
        monkeypatch.setenv(name, value)
    assert StorageSettings() == storage_settings


class Storm(TypedDict):
    jobs: int
    kills: int
    faults: int
    seconds: float
    seed: int


#: Storms, and counts of the tally that show that there was one.
STORMS: Mapping[storm.StormKind, tuple[Storm, Mapping[str, int]]] = {
    "jobs": (
        Storm(jobs=80, kills=5, faults=25, seconds=4, seed=1),
        {"faults": 25, "other_kills": 3, "images_generated": 79},
    ),
    "bundles": (Storm(jobs=160, kills=8, faults=25, seconds=5, seed=4), {}),
    "chains": (
        Storm(jobs=16, kills=4, faults=25, seconds=4, seed=2),
        {"kills": 4, "images_generated": 3 * 16},
    ),
    # Two jobs of one id have an outcome each, and all commands say so.
    "clashes": (
        Storm(jobs=200, kills=8, faults=60, seconds=6, seed=3),
        {"faults": 60, "names_taken": 5},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORMS)
async def test_killed_workers_and_faults_lose_no_job_and_show_none_twice(
    kind: storm.StormKind, storage_settings: StorageSettings, server: forks.Forks
):
    given, least = STORMS[kind]
    tally = await storm.weather(storage_settings, server, kind=kind, **given)

    assert tally.is_clean, str(tally)
    assert tally.kills + tally.freezes + tally.terms >= given["kills"]
    for name, count in least.items():
        assert getattr(tally, name) >= count, name
