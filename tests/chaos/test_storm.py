"""A short storm on each storage; `make chaos` makes long ones."""

from collections.abc import Iterator

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


@pytest.mark.slow
async def test_killed_workers_and_faults_lose_no_job_and_show_none_twice(
    storage_settings: StorageSettings, server: forks.Forks
):
    tally = await storm.weather(
        storage_settings, server, jobs=80, kills=5, faults=25, seconds=4, seed=1
    )

    assert tally.is_clean, str(tally)
    assert tally.kills + tally.freezes + tally.terms >= 5
    assert tally.faults >= 25
    assert tally.other_kills >= 3
    assert tally.images_generated >= 79


@pytest.mark.slow
async def test_killed_workers_and_faults_lose_no_job_of_a_bundle_and_show_none_twice(
    storage_settings: StorageSettings, server: forks.Forks
):
    tally = await storm.weather(
        storage_settings,
        server,
        jobs=160,
        kills=8,
        faults=25,
        seconds=5,
        seed=4,
        kind="bundles",
    )

    assert tally.is_clean, str(tally)
    assert tally.kills + tally.freezes + tally.terms >= 8


@pytest.mark.slow
async def test_each_stage_of_a_chain_is_drawn_once_and_none_is_lost(
    storage_settings: StorageSettings, server: forks.Forks
):
    tally = await storm.weather(
        storage_settings,
        server,
        jobs=16,
        kills=4,
        faults=25,
        seconds=4,
        seed=2,
        kind="chains",
    )

    assert tally.is_clean, str(tally)
    assert tally.kills >= 4
    assert tally.images_generated >= 3 * 16


@pytest.mark.slow
async def test_two_jobs_of_one_id_have_an_outcome_each_and_all_commands_say_so(
    storage_settings: StorageSettings, server: forks.Forks
):
    tally = await storm.weather(
        storage_settings,
        server,
        jobs=200,
        kills=8,
        faults=60,
        seconds=6,
        seed=3,
        kind="clashes",
    )

    assert tally.is_clean, str(tally)
    assert tally.kills + tally.freezes + tally.terms >= 8
    assert tally.faults >= 60
    assert tally.names_taken >= 5
