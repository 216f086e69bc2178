"""Settings as command-line options: a setting is declared once, in its pydantic model.

Each field becomes a flag and an `IMAGEFLEET_` variable; a flag overrides the variable, which
overrides the default. What is wrong is said in one line that names the setting both ways.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import types
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsError

from fleet import console
from fleet.settings import ExporterSettings, MonitorSettings
from imagefleet import errors
from imagefleet.storage.settings import StorageSettings
from imagefleet.telemetry.settings import TelemetrySettings
from loadgen.settings import LoadSettings
from worker.settings import WorkerSettings

PREFIX = "IMAGEFLEET_"

#: Every settings model and the command it is for. A variable that none of them knows is refused:
#: it is most likely a slip of the fingers.
PROJECT_SETTINGS: Mapping[str, type[BaseSettings]] = {
    "every command": StorageSettings,
    "worker, exporter": TelemetrySettings,
    "worker": WorkerSettings,
    "load": LoadSettings,
    "status, top, exporter": MonitorSettings,
    "exporter": ExporterSettings,
}

#: Longer values say no more about what is wrong with them.
_SHOWN_CHARACTERS = 60

#: A connection string, SAS token or password in the wrong place must not end up in a log.
_SECRET = re.compile(r"accountkey=|sharedaccesssignature=|\bsig=|//[^/\s]+@", re.IGNORECASE)

_METAVARS: Mapping[object, str] = {
    int: "INTEGER",
    float: "NUMBER",
    Path: "PATH",
    SecretStr: "SECRET",
}

Settings = TypeVar("Settings", bound=BaseSettings)
Result = TypeVar("Result")
Command = Callable[..., Result]


def from_settings(model: type[BaseSettings]) -> Callable[[Command[Result]], Command[Result]]:
    """Gives a typer command one option for each field of *model*.

    The command takes the validated settings first and its own typer options after them:

        @app.command()
        @options.from_settings(StorageSettings)
        def status(settings: StorageSettings, watch: bool = False) -> None: ...
    """

    def decorate(command: Command[Result]) -> Command[Result]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        fields = [_parameter(model, name) for name in model.model_fields]

        @functools.wraps(command)
        def wrapper(**arguments: Any) -> Result:
            given = {name: arguments.pop(name) for name in model.model_fields}
            with console.one_line_errors():
                settings = read(model, given)
                return command(settings, **arguments)

        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *fields)
        ]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
        return wrapper

    return decorate


def read(model: type[Settings], given: Mapping[str, Any]) -> Settings:
    """Reads settings from flags (None: not given) over the environment over the defaults.

    Raises:
        SetupError: a value is wrong or a variable unknown; one line for each.
    """
    _refuse_unknown_variables(model)
    try:
        return model(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        lines = [_complaint(model, detail) for detail in error.errors(include_url=False)]
        raise errors.SetupError("\n".join(lines)) from None
    except SettingsError as error:
        raise errors.SetupError(f"{error}: {error.__cause__}") from None


def variable(name: str) -> str:
    return PREFIX + name.upper()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def markdown_table() -> str:
    """The table of all settings that the README shows."""
    rows = ["| flag and variable | for | default | what it is |", "| --- | --- | --- | --- |"]
    seen: set[str] = set()
    for command, model in PROJECT_SETTINGS.items():
        for name, field in model.model_fields.items():
            if name in seen:
                continue
            seen.add(name)
            default = _default(field)
            rows.append(
                f"| `{flag(name)}`<br>`{variable(name)}` | {command} |"
                f" {f'`{default}`' if default else ''} | {field.description} |"
            )
    return "\n".join(rows) + "\n"


def _parameter(model: type[BaseSettings], name: str) -> inspect.Parameter:
    """A typer option that leaves the value as text, so that pydantic alone judges it."""
    field = model.model_fields[name]
    kind = _bare_type(field.annotation)
    is_switch = kind is bool
    declaration = f"{flag(name)}/--no-{flag(name)[2:]}" if is_switch else flag(name)
    default = _default(field)
    notes = f"env: {variable(name)}" + (f"; default: {default}" if default else "")
    option = typer.Option(
        declaration,
        metavar=None if is_switch else _metavar(kind),
        help=f"{field.description or ''} [{notes}]",
        show_default=False,
    )
    annotation = Annotated[(bool if is_switch else str) | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _bare_type(annotation: object) -> object:
    """`X` of `X | None` and of `Annotated[X, ...]`."""
    if get_origin(annotation) is Annotated:
        return _bare_type(get_args(annotation)[0])
    if get_origin(annotation) in {Union, types.UnionType}:
        return _bare_type(next(each for each in get_args(annotation) if each is not type(None)))
    return annotation


def _metavar(kind: object) -> str:
    if get_origin(kind) is Literal:
        return "|".join(str(each) for each in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(each.value) for each in kind)
    return _METAVARS.get(kind, "TEXT")


def _default(field: FieldInfo) -> str:
    # A factory's value differs from machine to machine; the description tells what it is.
    if field.is_required() or field.default_factory or field.default is None:
        return ""
    value = field.default
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value.value if isinstance(value, Enum) else value)


def _complaint(model: type[BaseSettings], detail: Mapping[str, Any]) -> str:
    what = re.sub(r"^(Value error, |Input |String )", "", str(detail["msg"]))
    if not detail["loc"]:
        return what
    name = str(detail["loc"][0])
    where = f"{flag(name)} / {variable(name)}"
    if detail["type"] == "missing":
        return f"{where}: is required"
    kind = _bare_type(model.model_fields[name].annotation)
    value = str(detail["input"])
    if kind is SecretStr or _SECRET.search(value):
        return f"{where}: {what}"
    return f"{where}: {what}, not {value[:_SHOWN_CHARACTERS] or 'empty'}"


def _refuse_unknown_variables(model: type[BaseSettings]) -> None:
    known = {
        variable(name) for each in (model, *PROJECT_SETTINGS.values()) for name in each.model_fields
    }
    for name in sorted(os.environ):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            close = difflib.get_close_matches(name.upper(), known, n=1)
            hint = f"did you mean {close[0]}?" if close else "imagefleet worker --help lists them"
            raise errors.SetupError(f"{name} is no setting of imagefleet: {hint}")
