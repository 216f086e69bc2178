import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
import write_settings
from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from typer.testing import CliRunner

from cli import console, options
from imagefleet import errors
from imagefleet.telemetry.settings import TelemetrySettings
from worker import settings as worker_settings
from worker.settings import MachineSettings, WorkerSettings

runner = CliRunner()

MODELS = list(options.PROJECT_SETTINGS)


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="IMAGEFLEET_", env_ignore_empty=True, extra="forbid"
    )

    folder: Path = Field(default=Path("here"), description="Where it lies.")
    lease_seconds: float = Field(default=30, ge=5, description="How long it is kept.")
    attempts: int | None = Field(default=None, ge=1, description="Tries.")
    kind: Literal["local", "azure"] = Field(default="local", description="Which.")
    colour: Literal["red", "blue"] = Field(default="red", description="The colour.")
    eager: bool = Field(default=False, description="At once.")
    token: SecretStr | None = Field(default=None, description="A secret.")
    address: str = Field(default="local:", description="An address.")

    @field_validator("address")
    @classmethod
    def _has_a_scheme(cls, address: str) -> str:
        if ":" not in address or "AccountKey=no" in address:
            raise ValueError("has no scheme")
        return address


class Required(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="IMAGEFLEET_")

    model: Path = Field(description="The checkpoint.")


@pytest.fixture
def seen() -> dict[str, Any]:
    return {}


@pytest.fixture
def app(seen: dict[str, Any]) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @options.flat
    def command(
        settings: Settings, loud: Annotated[bool, typer.Option(help="Shout.")] = False
    ) -> None:
        """Does it."""
        seen.update(settings=settings, loud=loud)

    return app


def test_every_kind_of_setting_is_a_flag(app: typer.Typer, seen: dict[str, Any]):
    result = runner.invoke(
        app,
        [
            "--folder",
            "there",
            "--lease-seconds",
            "7.5",
            "--attempts",
            "3",
            "--kind",
            "azure",
            "--colour",
            "blue",
            "--eager",
            "--token",
            "hush",
            "--address",
            "a:b",
            "--loud",
        ],
    )

    assert result.exit_code == 0, result.output
    assert seen["loud"] is True
    settings = seen["settings"]
    assert settings.folder == Path("there")
    assert settings.lease_seconds == 7.5
    assert settings.attempts == 3
    assert settings.kind == "azure"
    assert settings.colour == "blue"
    assert settings.eager is True
    assert settings.token.get_secret_value() == "hush"
    assert settings.address == "a:b"


def test_a_flag_overrides_the_variable_and_the_variable_the_default(
    app: typer.Typer, seen: dict[str, Any]
):
    variables = {
        "IMAGEFLEET_ATTEMPTS": "4",
        "IMAGEFLEET_EAGER": "yes",
        "IMAGEFLEET_KIND": "azure",
    }

    runner.invoke(app, ["--attempts", "9", "--no-eager"], env=variables)

    settings = seen["settings"]
    assert (settings.attempts, settings.eager, settings.kind) == (9, False, "azure")
    assert settings.lease_seconds == 30


def test_a_repeated_flag_has_the_values_of_one_variable(
    monkeypatch,
):
    seen: list[str] = []
    app = typer.Typer()

    @app.command()
    @options.flat
    def command(settings: WorkerSettings) -> None:
        seen.append(settings.model)

    assert runner.invoke(app, ["--model", "a", "--model", "store:b.tar"]).exit_code == 0
    monkeypatch.setenv("IMAGEFLEET_MODEL", "a,store:b.tar")
    assert runner.invoke(app, []).exit_code == 0
    assert seen == ["a,store:b.tar"] * 2


def test_an_empty_variable_is_ignored(app: typer.Typer, seen: dict[str, Any]):
    runner.invoke(app, [], env={"IMAGEFLEET_LEASE_SECONDS": ""})

    assert seen["settings"].lease_seconds == 30


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_an_invalid_value_is_one_line_that_names_flag_and_variable(
    app: typer.Typer, way: str
):
    arguments = ["--lease-seconds", "2"] if way == "flag" else []
    variables = {} if way == "flag" else {"IMAGEFLEET_LEASE_SECONDS": "2"}

    result = runner.invoke(app, arguments, env=variables)

    assert result.exit_code == console.EXIT_OPERATOR_MUST_ACT
    assert result.stderr == (
        "error: --lease-seconds / IMAGEFLEET_LEASE_SECONDS: should be greater than or equal to 5,"
        " not 2\n"
    )
    assert result.stdout == ""


def test_a_missing_setting_is_named():
    with pytest.raises(
        errors.SetupError, match=r"^--model / IMAGEFLEET_MODEL: is required$"
    ):
        options.read(Required, {"model": None})


@pytest.mark.parametrize(
    "secret",
    [
        "x;AccountKey=no;y",
        "SharedAccessSignature=sv",
        "https//x?sv=1&sig=abc",
        "htp://me:word@x",
    ],
)
def test_an_error_does_not_repeat_a_secret(secret: str):
    with pytest.raises(errors.SetupError) as caught:
        options.read(Settings, {"attempts": secret})

    assert secret not in caught.value.message
    assert "--attempts" in caught.value.message


def test_an_unknown_variable_is_refused_with_a_suggestion(
    monkeypatch,
):
    monkeypatch.setenv("IMAGEFLEET_QUEU", "jobs")

    with pytest.raises(errors.SetupError) as caught:
        options.read(Settings, {})

    assert caught.value.message == (
        "unknown setting IMAGEFLEET_QUEU; did you mean 'IMAGEFLEET_QUEUE'?"
    )


def test_a_variable_of_another_command_is_accepted(
    monkeypatch,
):
    monkeypatch.setenv("IMAGEFLEET_MAX_ATTEMPTS", "8")

    assert options.read(Settings, {}).attempts is None


def test_help_shows_description_variable_and_default(app: typer.Typer):
    text = " ".join(runner.invoke(app, ["--help"]).stdout.split())

    assert (
        "--lease-seconds NUMBER How long it is kept."
        " [env: IMAGEFLEET_LEASE_SECONDS; default: 30]" in text
    )
    assert "--kind local|azure" in text
    assert "--eager / --no-eager" in text
    assert "A secret. [env: IMAGEFLEET_TOKEN]" in text


def test_the_table_has_each_setting_once():
    flags = re.findall(r"^\| `(--[a-z0-9-]+)`", write_settings.table(), re.MULTILINE)

    assert len(flags) == len(set(flags))
    assert {"--storage", "--max-attempts", "--rate"} <= set(flags)


def test_the_table_has_a_heading_for_each_subject():
    headings = re.findall(r"^## (.*)$", write_settings.table(), re.MULTILINE)

    assert headings[:4] == ["Storage", "Metrics and logs", "Model and LoRAs", "GPU"]
    assert len(headings) == len(set(headings))


def test_every_setting_of_a_worker_has_one_subject():
    own = MachineSettings.model_fields.keys() - TelemetrySettings.model_fields.keys()
    named = [name for names in worker_settings.SUBJECTS.values() for name in names]

    assert len(named) == len(set(named))
    assert set(named) == own
    assert all(
        options.subject(model, name) for model in MODELS for name in model.model_fields
    )


def test_a_default_that_differs_from_machine_to_machine_is_not_shown():
    row = next(row for row in write_settings.table().splitlines() if "`--name`" in row)

    assert row.split("|")[2].strip() == ""


class Short(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="IMAGEFLEET_", extra="forbid")

    timeout: float = Field(default=30)


def test_variables_from_a_file_are_sorted_by_setting():
    variables = {"IMAGEFLEET_TIMEOUT": "7", "HOME": "/root"}

    assert options.by_setting(Short, variables) == {"timeout": "7"}
    with pytest.raises(ValueError, match="unknown setting IMAGEFLEET_QUEUE"):
        options.by_setting(Short, {"IMAGEFLEET_QUEUE": "jobs"})
