"""Settings as command-line options: a setting is declared once, in its pydantic model.

Each field becomes a flag and an `IMAGEFLEET_` variable; a flag overrides the variable, which
overrides the default. An invalid value is one line that names the setting both ways.
"""

import asyncio
import dataclasses
import functools
import inspect
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from inspect import Parameter, Signature
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from typer import Argument, BadParameter, Option

from cli import console
from imagefleet import redaction, validation
from imagefleet.concurrency import Result
from imagefleet.errors import SetupError
from imagefleet.keeping.rule import Keep
from imagefleet.storage.settings import Priority, StorageSettings
from imagefleet.telemetry.settings import TelemetrySettings
from imagefleet.validation import JSONDict, JSONObject

PREFIX = "IMAGEFLEET_"

AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
AsJsonLines = Annotated[bool, Option("--json", help="Print JSON, one object per line.")]
JsonFile = Annotated[
    Path | None,
    Option("--json-file", metavar="FILE", help="Also write the JSON to this file."),
]
JobFormat = Annotated[
    str | None,
    Option(
        "--format",
        metavar="jsonl|json|csv|txt|parquet",
        help="Format of FILE; default: by its name, and jsonl for standard input.",
    ),
]
Device = Annotated[str, Option("--device", help="auto, cpu, cuda or cuda:N.")]
#: No setting: IMAGEFLEET_PRIORITY is that of a worker on SaladCloud.
JobPriority = Annotated[
    Priority,
    Option(
        "--priority",
        help="Priority of the jobs: workers take high ones first and low ones last.",
    ),
]
Yes = Annotated[bool, Option("--yes", help="Do not ask.")]
PriceFile = Annotated[
    Path | None,
    Option("--price-file", metavar="FILE", help="Your own prices, as YAML."),
]


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError, OSError):
        raise BadParameter(
            f"should be a date and a time, such as 2026-12-01T08:00, not {text[:80]}"
        ) from None


def moment(what: str) -> Any:
    """An option of a date and time."""
    return option(
        f"{what}: 2026-12-01T08:00, in local time, or with its zone, 2026-12-01T08:00Z.",
        metavar="TIME",
        parser=_moment,
    )


def _rule(text: str) -> Keep:
    try:
        return Keep.model_validate(text)
    except ValidationError as error:
        raise BadParameter(validation.sentence(error)) from None


def keep(text: str) -> Any:
    """An option with a rule of what is kept."""
    return option(
        f"{text} Minimum scores, and best=, by=, distinct=.",
        metavar="RULE",
        parser=_rule,
    )


#: The settings models of all commands, each with its subject and its commands for the
#: documentation; `fleet.settings` adds those of the packages above. A variable that is in none of
#: them is refused: it is most likely a typing error.
PROJECT_SETTINGS = {
    StorageSettings: ("Storage", "all commands"),
    TelemetrySettings: ("Metrics and logs", "`worker`, `exporter`, `webhooks`"),
}

#: Characters of a value that are enough to recognise it.
_SHOWN_CHARACTERS = 60

#: A connection string, SAS token or password in the wrong place must not end up in a log.
SECRET_VALUE = re.compile(
    r"accountkey=|sharedaccesssignature=|\bsig=|//[^/\s]+@", re.IGNORECASE
)

_METAVARS: Mapping[object, str] = {
    str: "TEXT",
    int: "INTEGER",
    float: "NUMBER",
    Path: "PATH",
    SecretStr: "SECRET",
}

Settings = TypeVar("Settings", bound=BaseSettings)
Value = TypeVar("Value")
Command = Callable[..., Result]


def option(
    text: str, default: Any = None, *flags: str, make: Any = Option, **terms: Any
) -> Any:
    """An option of a command, or of its dataclass: help, default (...: none), typer's terms."""
    return dataclasses.field(
        default=dataclasses.MISSING if default is ... else default,
        metadata={"flags": flags, "info": make(*flags, help=text, **terms)},
    )


def argument(text: str, default: Any = ..., **terms: Any) -> Any:
    return option(text, default, make=Argument, **terms)


def dry_run(what: str) -> Any:
    """The option --dry-run, which means the same everywhere; *what* it shows differs."""
    return option(f"Show {what}; change nothing.", default=False)


def flat(command: Command[Result]) -> Command[Result]:
    """A typer command, maybe a coroutine, that has one option for each field of its dataclasses.

    And of its settings, which it gets validated:

        @app.command()
        @options.flat
        def failed(settings: StorageSettings, which: Selected, limit: Limit = 20) -> None: ...
    """
    groups: dict[str, tuple[Any, list[Parameter]]] = {}
    flattened: list[Parameter] = []
    of_settings: list[Parameter] = []
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, BaseSettings):
            of_settings = list(_parameters(kind))
            groups[name] = kind, of_settings
        elif dataclasses.is_dataclass(kind):
            hints = get_type_hints(kind, include_extras=True)
            own = [
                _as_typer_does(hints[each.name], each)
                for each in dataclasses.fields(kind)
            ]
            groups[name] = kind, own
            flattened += own
        elif isinstance(field := parameter.default, dataclasses.Field):
            field.name = name
            flattened.append(_as_typer_does(kind, field))
        else:
            flattened.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
    flattened += of_settings

    @functools.wraps(command)
    def wrapper(**given: Any) -> Result:
        with console.one_line_errors():
            made = {}
            for name, (kind, fields) in groups.items():
                taken = {each.name: given.pop(each.name) for each in fields}
                made[name] = (
                    read(kind, taken) if fields is of_settings else kind(**taken)
                )
            result = command(**made, **given)
            return asyncio.run(result) if inspect.iscoroutine(result) else result

    wrapper.__signature__ = Signature(flattened)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {each.name: each.annotation for each in flattened}
    return wrapper


def _as_typer_does(hint: Any, field: dataclasses.Field[Any]) -> Parameter:
    if info := field.metadata.get("info"):
        info.metavar = info.metavar or _METAVARS.get(_bare_type(hint))
        if hint is bool and not (field.default or field.metadata["flags"]):
            info.param_decls = (flag(field.name),)  # without a --no-
        hint = Annotated[hint, info]
    default = field.default
    return Parameter(
        field.name,
        Parameter.KEYWORD_ONLY,
        default=Parameter.empty if default is dataclasses.MISSING else default,
        annotation=hint,
    )


def read(model: type[Settings], given: JSONObject) -> Settings:
    """Settings by flags (None: not given), variables and defaults; raises SetupError."""
    try:
        flags = {
            # Of a repeatable flag, the values as its variable has them.
            name: ",".join(value) if isinstance(value, list) else value
            for name, value in given.items()
            if value not in (None, "", [])
        }
        settings: JSONDict = {
            **by_setting(model, os.environ, PROJECT_SETTINGS),
            **flags,
        }
        return model(**settings)
    except ValidationError as error:
        raise SetupError(
            "\n".join(
                _complaint(model, detail) for detail in error.errors(include_url=False)
            )
        ) from None
    except ValueError as error:
        raise SetupError(str(error)) from None


def by_setting(
    model: type[BaseSettings],
    variables: Mapping[str, Value],
    other_models: Iterable[type[BaseSettings]] = (),
) -> dict[str, Value]:
    """The values of the IMAGEFLEET_ variables by the setting of *model* that each is for.

    Leaves out empty values and those of *other_models*; raises ValueError for an unknown variable.
    """
    own = {variable(name): name for name in model.model_fields}
    known = own.keys() | {
        variable(name) for other in other_models for name in other.model_fields
    }
    named = {
        name.upper(): name for name in variables if name.upper().startswith(PREFIX)
    }
    for upper in sorted(named.keys() - known):
        hint = (
            validation.suggestion(upper, known)
            or "; `imagefleet worker --help` lists them"
        )
        raise ValueError(f"unknown setting {named[upper]}{hint}")
    return {
        own[upper]: variables[name]
        for upper, name in named.items()
        if upper in own and variables[name] not in (None, "")
    }


def variable(name: str) -> str:
    return PREFIX + name.upper()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def subject(model: type[BaseSettings], name: str) -> str:
    """The subject of *model*'s setting *name*, in help and documentation."""
    own: Mapping[str, Iterable[str]] = getattr(model, "SUBJECTS", {})
    for text, names in own.items():
        if name in names:
            return text
    for known, (text, _) in PROJECT_SETTINGS.items():
        if issubclass(model, known) and name in known.model_fields:
            return text
    return ""


def _parameters(model: type[BaseSettings]) -> Iterator[Parameter]:
    """Typer options that leave values as text, so that pydantic alone judges them."""
    for name, field in model.model_fields.items():
        kind = _bare_type(field.annotation)
        default = shown_default(field)
        is_switch = kind is bool
        extra = field.json_schema_extra
        is_repeatable = isinstance(extra, dict) and extra.get("repeatable")
        value = bool if is_switch else list[str] if is_repeatable else str
        metavar = _METAVARS.get(kind, "TEXT")
        if get_origin(kind) is Literal:
            metavar = "|".join(map(str, get_args(kind)))
        notes = f"env: {variable(name)}" + (f"; default: {default}" if default else "")
        made = option(
            f"{field.description or ''} [{notes}]",
            None,
            f"{flag(name)}/--no-{flag(name)[2:]}" if is_switch else flag(name),
            metavar=None if is_switch else metavar,
            show_default=False,
            rich_help_panel=subject(model, name) or None,
        )
        made.name = name
        yield _as_typer_does(value | None, made)


def _bare_type(annotation: object) -> object:
    """`X` of `X | None`, of `list[X]` and of `Annotated[X, ...]`."""
    if get_origin(annotation) in {Annotated, list, Union, types.UnionType}:
        return _bare_type(
            next(each for each in get_args(annotation) if each is not type(None))
        )
    return annotation


def shown_default(field: FieldInfo) -> str:
    # A factory's value differs from machine to machine; the description says what it is.
    if field.is_required() or field.default_factory or field.default is None:
        return ""
    if isinstance(field.default, bool):
        return "yes" if field.default else "no"
    return str(field.default)


def _complaint(model: type[BaseSettings], detail: JSONObject) -> str:
    what = validation.reason({**detail, "loc": ()})
    if not detail["loc"]:
        return what
    name = str(detail["loc"][0])
    where = f"{flag(name)} / {variable(name)}"
    value = str(detail["input"])
    field = model.model_fields[name]
    if (
        detail["type"] == "missing"
        or _bare_type(field.annotation) is SecretStr
        or not field.repr
        or SECRET_VALUE.search(value)
        or redaction.message(value) != value
    ):
        return f"{where}: {what}"
    return f"{where}: {what}, not {value[:_SHOWN_CHARACTERS] or 'empty'}"
