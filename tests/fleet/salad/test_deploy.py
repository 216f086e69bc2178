"""`imagefleet deploy` against a fake SaladCloud."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli import console
from fleet.salad import client
from imagefleet.validation import JSONDict
from in_process import Imagefleet, assert_refused, told


def edit(folder: Path, old: str, new: str) -> None:
    path = folder / "fleet.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def replicas(salad: Any) -> list[int]:
    return [group.replicas for group in salad.groups.values()]


def test_a_half_created_deployment_is_resumed(
    salad, salad_module, in_process: Imagefleet
):
    salad.faults = [
        salad_module.Fault(403, '{"title": "Forbidden"}', method="POST", skips=1)
    ]
    assert_refused(in_process("deploy", "apply", "--yes"), "Forbidden")
    assert replicas(salad) == [375]

    ended = in_process("deploy", "apply", "--yes")

    assert ended.returncode == 0, ended.stderr
    assert replicas(salad) == [375, 375]
    assert ended.stderr.count("to create:") == 1


def test_the_price_to_confirm_is_the_whole_fleets_before_and_after_an_interruption(
    salad, salad_module, in_process: Imagefleet, tmp_path
):
    """It is what `imagefleet exporter --dollars-per-hour` is given."""
    in_process("deploy", "apply", "--yes")
    edit(tmp_path, "environment:", "priority: high\nenvironment:")
    planned = in_process("deploy", "apply", "--dry-run", "--json")
    salad.faults = [salad_module.Fault(403, method="POST", skips=1)]
    assert in_process("deploy", "apply", "--yes").returncode == 2

    resumed = in_process("deploy", "apply", "--yes", "--json")

    for _ in range(2):
        status = in_process("deploy", "status", "--json")
    paid = [
        json.loads(ended.stdout)["dollars_per_hour"]
        for ended in (planned, resumed, status)
    ]
    assert [each["most"] for each in paid] == pytest.approx([750 * 0.08] * 3)


def test_a_creation_whose_answer_is_lost_happens_once(
    salad, salad_module, in_process: Imagefleet
):
    salad.faults = [
        salad_module.Fault(0, method="POST", lands=True, cuts_the_line=True),
        salad_module.Fault(504, method="POST", lands=True),
    ]

    ended = in_process("deploy", "apply", "--yes")

    assert ended.returncode == 0, ended.stderr
    assert replicas(salad) == [375, 375]


def test_a_second_apply_of_a_file_is_told_and_ends(
    salad, in_process: Imagefleet, tmp_path
):
    with console.only_one(tmp_path / "fleet.yaml"):
        assert_refused(
            in_process("deploy", "apply", "--yes"),
            "another `imagefleet` is at work with fleet.yaml",
        )
    assert salad.count("POST") == 0


@pytest.mark.parametrize("command", ["apply", "drain"])
def test_what_another_machine_starts_meanwhile_is_not_waited_for(
    salad, in_process: Imagefleet, tmp_path, monkeypatch, command: str
):
    in_process("deploy", "apply", "--yes")
    edit(tmp_path, "environment:", "priority: high\nenvironment:")
    patch = client.SaladClient.patch

    async def and_another_scales(
        self: client.SaladClient, name: str, body: JSONDict
    ) -> None:
        await patch(self, name, body)
        salad.groups[name].body["replicas"] = 400

    monkeypatch.setattr(client.SaladClient, "patch", and_another_scales)
    assert_refused(
        in_process("deploy", command, "--yes"),
        "somebody else changes the fleet: sd15-batch-",
        "has 400 replicas now",
    )


def test_a_quota_that_is_too_small_is_reported_before_anything_is_created(
    salad, in_process: Imagefleet
):
    salad.quota = 500

    assert_refused(
        in_process("deploy", "apply", "--yes"),
        "quota is 500 replicas",
        "750 do not fit",
    )
    assert salad.count("POST") == 0


def test_a_misspelled_gpu_class_gets_a_suggestion(
    salad, in_process: Imagefleet, tmp_path
):
    edit(tmp_path, "RTX 3060 Ti", "RTX 3060 Tii")

    for arguments in (["apply", "--yes"], ["apply", "--render"]):
        assert_refused(
            in_process("deploy", *arguments), "did you mean", "RTX 3060 Ti 8GB"
        )


def test_a_gpu_class_that_is_not_in_our_table_comes_from_the_api(
    salad, in_process: Imagefleet, tmp_path
):
    edit(tmp_path, "RTX 3060 Ti", "RTX 6070")

    ended = in_process("deploy", "apply", "--yes")

    assert ended.returncode == 0, ended.stderr
    group = next(iter(salad.groups.values()))
    assert group.body["container"]["resources"]["gpu_classes"] == [
        "11111111-2222-4333-8444-555555555555"
    ]


def test_more_replicas_restart_nothing(salad, in_process: Imagefleet, tmp_path):
    in_process("deploy", "apply", "--yes")
    names = set(salad.groups)
    edit(tmp_path, "replicas: 750", "replicas: 900")

    in_process("deploy", "apply", "--yes")

    assert set(salad.groups) == names
    assert replicas(salad) == [450, 450]


def test_a_changed_file_replaces_the_groups_a_quarter_at_a_time(
    salad, in_process: Imagefleet, tmp_path
):
    salad.quota = 750
    in_process("deploy", "apply", "--yes")
    for _ in range(3):
        in_process("deploy", "status")
    first = set(salad.groups)
    assert sum(group.running for group in salad.groups.values()) == 750
    edit(tmp_path, "environment:", "environment:\n  IMAGEFLEET_SLOTS: 4")

    ended = in_process("deploy", "apply", "--yes")

    assert ended.returncode == 0, ended.stderr
    assert "in 4 steps, old replicas first, 750 at most: 562 stay" in ended.stderr
    assert not first & set(salad.groups)
    assert replicas(salad) == [375, 375]
    # No restart in place: the fake accepts only patches of replicas.
    assert sum(group.running for group in salad.groups.values()) >= 562
    assert salad.most_at_once == 750


def test_one_replica_is_replaced_by_none_and_the_plan_says_so(
    salad, in_process: Imagefleet, tmp_path
):
    in_process("deploy", "apply", "--yes", "--replicas", "1")
    for _ in range(3):
        in_process("deploy", "status")
    edit(tmp_path, "environment:", "environment:\n  IMAGEFLEET_SLOTS: 4")

    ended = in_process("deploy", "apply", "--dry-run", "--replicas", "1")

    assert "1 at most: for a while none runs" in ended.stderr


def test_new_groups_that_do_not_start_leave_three_quarters_of_the_old_ones(
    salad, in_process: Imagefleet, tmp_path
):
    in_process("deploy", "apply", "--yes")
    for _ in range(3):
        in_process("deploy", "status")
    old = dict(salad.groups)
    salad.nodes = 600
    edit(tmp_path, "environment:", "environment:\n  IMAGEFLEET_SLOTS: 4")

    ended = in_process("deploy", "apply", "--yes", "--wait-minutes", "0.005")

    assert ended.returncode == 1
    assert "Nothing was undone" in ended.stderr
    assert sum(group.running for group in old.values()) == 562

    # The next try leaves as many as this one.
    edit(tmp_path, "IMAGEFLEET_SLOTS: 4", "IMAGEFLEET_SLOTS: 5")
    again = in_process("deploy", "apply", "--yes", "--wait-minutes", "0.005")
    assert again.returncode == 1
    assert sum(group.running for group in salad.groups.values()) >= 562

    salad.nodes = 10_000
    last = in_process("deploy", "apply", "--yes")

    assert last.returncode == 0, last.stderr
    assert not set(old) & set(salad.groups)


def test_new_replicas_wait_for_those_that_are_still_to_stop(
    salad, in_process: Imagefleet
):
    in_process("deploy", "apply", "--yes")
    for _ in range(3):
        in_process("deploy", "status")
    salad.most_stops = 50
    in_process("deploy", "apply", "--replicas", "300")

    ended = in_process("deploy", "apply", "--replicas", "700", "--yes")

    assert "instances still to stop" in ended.stderr
    assert max(billed for billed, _ in salad.billed) == 750


def test_resizing_spreads_over_the_groups(salad, in_process: Imagefleet):
    in_process("deploy", "apply", "--yes")

    down = in_process("deploy", "apply", "--replicas", "301")
    assert down.returncode == 0, down.stderr
    assert replicas(salad) == [151, 150]

    up = in_process("deploy", "apply", "--replicas", "900")
    assert up.returncode == 2  # there is no terminal to ask on
    assert replicas(salad) == [151, 150]


@pytest.mark.parametrize(
    "arguments", [["apply", "--yes"], ["apply", "--replicas", "3"], ["status"]]
)
@pytest.mark.parametrize("skips", [0, 1, 2])
def test_one_refused_call_of_several_is_the_only_line(
    salad,
    salad_module,
    in_process: Imagefleet,
    arguments: list[str],
    skips: int,
    caplog,
):
    in_process("deploy", "apply", "--yes")
    salad.slow_seconds = 0.05  # the others are under way when one is refused
    salad.faults = [
        salad_module.Fault(403, '{"title": "Forbidden"}', method="GET", skips=skips)
    ]

    ended = in_process("deploy", *arguments)

    assert ended.returncode == 2
    assert ended.stdout == ""
    logged = [each.message for each in caplog.records if each.name == "imagefleet"]
    [line] = [*logged, *ended.stderr.splitlines()]
    assert line.startswith("error: SaladCloud refuses GET /organizations/acme/")
    assert "Forbidden" in line


def test_each_change_has_its_json(salad, in_process: Imagefleet):
    def read(*arguments: str) -> Any:
        ended = in_process("deploy", *arguments, "--json")
        return told(ended)

    planned = read("apply", "--dry-run")
    assert planned["dry_run"] is True
    assert not salad.groups
    applied = read("apply", "--yes")
    assert applied == {**planned, "dry_run": False}
    names = list(salad.groups)
    assert applied["create"] == dict.fromkeys(names, 375)
    assert applied["dollars_per_hour"]["most"] == pytest.approx(22.5)
    again = read("apply")
    assert (again["create"], again["resize"], again["new_replicas"]) == ({}, {}, 0)
    resized = read("apply", "--replicas", "301")
    assert resized["resize"] == dict(zip(names, [151, 150], strict=True))
    assert resized["new_replicas"] == 0
    assert read("drain", "--yes") == {"drained": names, "deleted": []}
    assert read("drain", "--delete", "--yes") == {"drained": names, "deleted": names}


def test_draining_waits_for_the_instances_and_stops_the_groups(
    salad, in_process: Imagefleet
):
    in_process("deploy", "apply", "--yes")
    for _ in range(3):
        in_process("deploy", "status")

    ended = in_process("deploy", "drain", "--yes")

    assert ended.returncode == 0, ended.stderr
    assert replicas(salad) == [0, 0]
    assert all(
        group.is_stopped and not group.running for group in salad.groups.values()
    )

    again = in_process("deploy", "apply", "--yes")
    assert again.returncode == 0, again.stderr
    assert replicas(salad) == [375, 375]
    assert not any(group.is_stopped for group in salad.groups.values())


def test_deleting_leaves_other_fleets_alone(salad, in_process: Imagefleet):
    in_process("deploy", "apply", "--yes")
    other = next(iter(salad.groups.values()))
    salad.groups["sd15-batch-two-1"] = type(other)(
        {**other.body, "name": "sd15-batch-two-1"}
    )

    assert in_process("deploy", "drain", "--delete").returncode == 2
    ended = in_process("deploy", "drain", "--delete", "--yes")

    assert ended.returncode == 0, ended.stderr
    assert set(salad.groups) == {"sd15-batch-two-1"}


def test_status_shows_what_runs_and_what_it_costs(salad, in_process: Imagefleet):
    in_process("deploy", "apply", "--yes")
    in_process("deploy", "status")

    found = json.loads(in_process("deploy", "status", "--json").stdout)

    assert found["replicas"] == found["running"] == 750
    assert found["dollars_per_hour"]["most"] == pytest.approx(22.5)
    assert found["groups"][0]["gpus"] == ["RTX 3060 Ti 8GB"]
    assert found["quota"] == {"replicas": 2000, "used": 750}

    screen = in_process("deploy", "status").stdout
    assert "750 of 750 replicas run: $22.50/h now" in screen


@pytest.mark.parametrize(
    ("key", "said", "secret"),
    [
        ("wrong-key", "does not know the API key", "wrong-key"),
        (
            "half-a-key\nanother-half",
            "the variable SALAD_API_KEY, has a line break",
            "half",
        ),
    ],
)
def test_an_api_key_of_no_use_is_reported_without_it(
    salad,
    in_process: Imagefleet,
    monkeypatch,
    key: str,
    said: str,
    secret: str,
):
    monkeypatch.setenv("SALAD_API_KEY", key)

    ended = in_process("deploy", "status")

    assert_refused(ended, said)
    assert secret not in ended.stderr


def test_an_unknown_project_is_reported_with_where_it_stands(
    salad, in_process: Imagefleet, tmp_path
):
    edit(tmp_path, "project: default", "project: defualt")

    assert_refused(
        in_process("deploy", "status"),
        "check the organization and the project of the fleet file",
    )
