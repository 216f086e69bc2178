"""The fleet file rendered as groups, checked with the SDK's models, and its common mistakes."""

import io
import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from salad_cloud_sdk import models

from cli import console
from fleet.salad import file as salad_file
from fleet.salad import gpus
from fleet.salad import groups as salad_groups
from imagefleet import errors
from imagefleet.pricing import prices
from imagefleet.signing import SigningKey
from in_process import Imagefleet

EXAMPLE = Path(__file__).parents[3] / "deploy" / "salad" / "fleet.yaml"

FULL = """
countries: [us, ca]
command: [imagefleet, worker, --slots, "4"]
logging:
  axiom: {host: api.axiom.co, dataset: fleet, api_token: {env: TOKEN}}
registry:
  basic: {username: acme, password: {env: TOKEN}}
"""


def read(folder: Path, text: str) -> salad_file.FleetFile:
    path = folder / "fleet.yaml"
    path.write_text(text)
    return salad_file.read_file(path)


def rendered(file: salad_file.FleetFile, secret: str = "secret", **more: Any) -> Any:
    classes = gpus.find(file.gpus, gpus.built_in())
    return salad_groups.render(
        file, classes, read_secret=lambda _: SecretStr(secret), **more
    )


@pytest.mark.parametrize("more", ["", FULL])
def test_the_sdks_models_accept_the_groups(more: str, tmp_path):
    bodies = salad_groups.plain(rendered(read(tmp_path, EXAMPLE.read_text() + more)))

    assert [body["replicas"] for body in bodies] == [375, 375]
    for body in bodies:
        assert models.ContainerGroupCreationRequest._unmap(body)._map() == body


def test_the_fake_answers_as_the_sdk_expects(salad, in_process: Imagefleet):
    """The fake of the other tests follows the published specification."""
    in_process("deploy", "apply", "--yes")

    for group in salad.groups.values():
        record = group.record()
        assert models.ContainerGroup._unmap(record)._map() == record
    for path, model in (
        ("quotas", models.Quotas),
        ("gpu-classes", models.GpuClassesList),
    ):
        request = urllib.request.Request(
            f"{salad.url}/organizations/acme/{path}",
            headers={"Salad-Api-Key": os.environ["SALAD_API_KEY"]},
        )
        record = json.load(urllib.request.urlopen(request))
        assert model._unmap(record)._map() == record


@given(st.integers(0, 6_000), st.integers(1, 20))
def test_replicas_are_spread_evenly_within_the_limit(replicas: int, groups: int):
    shares = salad_groups.split(replicas, [0] * groups)

    assert sum(shares) == replicas
    assert max(shares) <= salad_groups.MAX_REPLICAS
    assert max(shares) - min(shares) <= 1
    assert len(shares) == max(groups, -(-replicas // 500))


@given(st.integers(0, 6_000), st.lists(st.integers(0, 500), max_size=12))
def test_a_split_stops_no_replica_that_can_stay(replicas: int, now: list[int]):
    shares = salad_groups.split(replicas, now)

    before = [*now, *[0] * (len(shares) - len(now))]
    assert sum(shares) == replicas
    assert max(shares, default=0) <= salad_groups.MAX_REPLICAS
    assert sum(map(min, shares, before)) == min(replicas, sum(now))


def test_the_name_of_a_group_identifies_its_fleet():

    assert salad_groups.parse_name("sd15", "sd15-0123abcd-2") == ("0123abcd", 2)
    assert salad_groups.parse_name("sd1", "sd15-0123abcd-2") is None
    assert salad_groups.parse_name("sd15", "sd15-batch-1") is None


def test_the_revision_changes_with_what_restarts_workers(tmp_path):
    file = read(tmp_path, EXAMPLE.read_text())
    other_model = read(
        tmp_path, EXAMPLE.read_text().replace("/models/checkpoint", "/models/b")
    )

    def revision(bodies: Any) -> str:
        return str(bodies[0]["name"]).split("-")[-2]

    assert revision(rendered(file)) == revision(rendered(file, replicas=20))
    assert revision(rendered(file)) != revision(rendered(other_model))
    assert revision(rendered(file)) != revision(rendered(file, secret="a newer token"))


def test_every_class_with_a_price_has_its_uuid():
    known = gpus.built_in()

    assert {each.name for each in known} == set(prices.BUILT_IN.gpus)
    assert len({each.id for each in known}) == len(known)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("priority: batch", "priorty: batch", "did you mean 'priority'"),
        ("replicas: 750", "replicas: 0", "replicas"),
        ("replicas: 750", "replicas: many", "replicas"),
        ("cpu: 4", "cpu: 32", "cpu"),
        ("name: sd15-batch", "name: SD15", "name"),
        ("IMAGEFLEET_QUEUE:", "IMAGEFLEET_QEUE:", "did you mean 'IMAGEFLEET_QUEUE'"),
        (
            "IMAGEFLEET_QUEUE:",
            "IMAGEFLEET_SIGNING_KEY:",
            "do not write secrets into this file",
        ),
        (
            "IMAGEFLEET_QUEUE: jobs",
            "IMAGEFLEET_SIGNING_KEY: {env: X}",
            "not for machines of stra",
        ),
        (
            "{env: IMAGEFLEET_TRUSTED_KEY}",
            "jobs",
            "IMAGEFLEET_TRUSTED_KEY: should be a pub",
        ),
        ("IMAGEFLEET_QUEUE: jobs", "IMAGEFLEET_QUEUE: No Queue", "IMAGEFLEET_QUEUE"),
        (
            "IMAGEFLEET_MODEL: /models/checkpoint",
            "IMAGEFLEET_COMPILE: off",
            "in quotes",
        ),
        (
            "{env: BROKER_URL}",
            "https://x.example.com?sig=x",
            "do not write secrets into this file",
        ),
        ("{env: BROKER_URL}", "{env: A, file: b}", "or {env: VARIABLE}"),
        (
            "https://acmeimages.blob",
            "https://key@acmeimages.blob",
            "do not write secrets",
        ),
        ("IMAGEFLEET_STORAGE:", "OTHER:", "IMAGEFLEET_STORAGE should be"),
        ("imagefleet@sha256:", "imagefleet:1.0#", "should end in @sha256:DIGEST"),
    ],
)
def test_a_mistake_in_the_file_is_named(old: str, new: str, message: str, tmp_path):
    text = EXAMPLE.read_text()
    assert old in text

    with pytest.raises(errors.SetupError) as caught:
        read(tmp_path, text.replace(old, new, 1))

    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert "sig=x" not in caught.value.message


@pytest.mark.parametrize(
    ("secret", "message"),
    [
        ("x" * 1001, "IMAGEFLEET_BROKER_URL has 1,001 characters"),
        ("two\nlines", "several lines"),
        ("AccountName=a;AccountKey=b", "contains the storage account's key"),
    ],
)
def test_a_value_that_salad_would_refuse_is_reported(secret: str, message: str):
    with pytest.raises(errors.SetupError, match=message) as caught:
        rendered(salad_file.read_file(EXAMPLE), secret)

    assert secret not in caught.value.message


def test_a_trusted_key_is_no_secret(tmp_path):
    public = SigningKey.create(tmp_path / "key.pem").public
    text = EXAMPLE.read_text().replace("{env: IMAGEFLEET_TRUSTED_KEY}", public)
    assert read(tmp_path, text).environment["IMAGEFLEET_TRUSTED_KEY"] == public


def test_a_value_of_the_maximum_length_is_accepted():
    rendered(salad_file.read_file(EXAMPLE), "x" * 1000)


def test_secrets_come_from_variables(monkeypatch):
    monkeypatch.setenv("SAS", "from the variable")

    found = salad_file.SecretSource(env="SAS").read()

    assert found.get_secret_value() == "from the variable"
    with pytest.raises(errors.SetupError, match="NONE is not set"):
        salad_file.SecretSource(env="NONE").read()


def test_rendering_needs_no_account(in_process: Imagefleet, tmp_path):
    (tmp_path / "fleet.yaml").write_text(EXAMPLE.read_text())

    ended = in_process("deploy", "apply", "--render", "--replicas", "1001", "--json")

    found = json.loads(ended.stdout)
    assert [group["replicas"] for group in found["groups"]] == [334, 334, 333]
    assert found["dollars_per_hour"] == pytest.approx({"least": 30.03, "most": 40.04})
    assert found["gpus"][0] == {"gpu": "RTX 3060 Ti 8GB", "dollars_per_hour": 0.03}
    assert "BROKER_URL is not set" in ended.stderr


def test_rendering_shows_the_price(in_process: Imagefleet, tmp_path):
    (tmp_path / "fleet.yaml").write_text(EXAMPLE.read_text())

    ended = in_process("deploy", "apply", "--render")

    assert ended.returncode == 0, ended.stderr
    assert "750 replicas at batch priority: $22.50 to $30.00/h" in ended.stdout
    assert "$540.00 to $720.00/day" in ended.stdout
    assert "2025-09-22" in ended.stdout


@pytest.mark.parametrize("answer", [True, False])
def test_the_operator_is_asked(answer: bool, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr(
        typer, "confirm", lambda question, err: asked.append(question) or answer
    )

    if answer:
        console.confirm("Apply?", yes=False)
    else:
        with pytest.raises(typer.Exit):
            console.confirm("Apply?", yes=False)

    assert asked == ["Apply?"]


def test_a_missing_fleet_file_is_reported_with_the_paths_tried(
    in_process: Imagefleet,
):
    ended = in_process("deploy", "apply", "--render")

    assert ended.returncode == 2
    assert all(str(path) in ended.stderr for path in salad_file.DEFAULT_FILES)
