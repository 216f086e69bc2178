"""Pydantic's errors as sentences that name the field and what to do."""

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, TypeAdapter, ValidationError

from imagefleet.errors import JobError, SetupError

Model = TypeVar("Model")
Value = TypeVar("Value")

#: A JSON object: names and values, which nobody has checked yet.
JSONDict = dict[str, Any]
#: The same, for those who only read it.
JSONObject = Mapping[str, Any]

MAX_REASONS = 5

_MAX_LOCATION_CHARACTERS = 120

_PATTERNS = {
    r"^https://[^\s@]+$": "should be a URL that begins with https://, without a password",
    r"^(auto|cpu|cuda(:\d+)?)$": "should be auto, cpu, cuda or cuda:N",
    r"^[0-9a-fA-F]{64}$": "should be 64 hexadecimal digits",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$": "use 1 to 128 letters, digits and . _ - only, beginning"
    " with a letter or a digit",
    r"^[A-Za-z0-9_][A-Za-z0-9_ .+()-]{0,127}$": "use 1 to 128 letters, digits, spaces and"
    " _ . + ( ) - only, without a path",
}

#: Pydantic calls it a dictionary, or an instance of a class.
_OBJECT = "should be an object of names and values"

_IN_WORDS = {
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), _OBJECT),
    "missing": "is required",
    "too_short": "the list is empty",
    "tuple_type": "should be a list",
}

_PREFIX = re.compile(r"^(Value error, |Input |String )")


class Strict(BaseModel, extra="forbid", frozen=True):
    """An object that refuses unknown names, and never changes."""


def sentence(error: ValidationError, known: Iterable[str] = ()) -> str:
    """One line that says what is wrong and where; *known* are field names to suggest."""
    details = error.errors(include_url=False)
    # No more than are shown: to look for the nearest of all names takes time.
    shown = details[:MAX_REASONS]
    reasons = [reason(cast("JSONObject", detail), known) for detail in shown]
    more = len(details) - len(shown)
    return "; ".join(reasons) + (f"; and {more:,} more" if more else "")


@contextlib.contextmanager
def as_error(
    kind: type[Exception], before: str = "", known: Iterable[str] = ()
) -> Iterator[None]:
    """Context manager: raises what is wrong in the block, after *before*, as an error of *kind*."""
    try:
        yield
    except ValidationError as error:
        raise kind(before + sentence(error, known)) from None
    except JobError as error:
        raise kind(before + error.message) from None


def read_file(model: type[Model], path: Path, otherwise: str) -> Model | None:
    """Content of a JSON file, None without it; SetupError if that is unreadable or *otherwise*."""
    try:
        return TypeAdapter(model).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValidationError:
        raise SetupError(f"{path} {otherwise}") from None


def reason(detail: JSONObject, known: Iterable[str] = ()) -> str:
    """One error detail as a sentence; it never quotes the input, which may be a secret."""
    where = location(detail["loc"])
    what = message(detail)
    if detail["type"] == "extra_forbidden":
        what = "unknown key" + suggestion(str(detail["loc"][-1]), known)
    return f"{where}: {what}" if where else what


def message(detail: JSONObject) -> str:
    """Pydantic's text without its prefixes, in words for people who know no Python."""
    return (
        _IN_WORDS.get(detail["type"])
        or _PATTERNS.get(str(detail.get("ctx", {}).get("pattern")))
        or _PREFIX.sub("", str(detail["msg"]))
    )


def location(parts: Sequence[object]) -> str:
    """A path like `lists.noun[2]`."""
    place = ""
    for part in parts:
        place += (
            f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
        )
    return place[:_MAX_LOCATION_CHARACTERS]


def choose(
    what: str, name: str, known: Mapping[str, Value], others: Iterable[str] = ()
) -> Value:
    """The value of a *name*; raises SetupError with the *known* names, or the one that is close."""
    if name not in known:
        names = [*known, *others]
        hint = suggestion(name, names) or f": give one of {', '.join(names)}"
        raise SetupError(f"unknown {what} {name[:40]!r}{hint}")
    return known[name]


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'cfg_scale'?`, or an empty string if no known name is close."""
    close = closest(name, known)
    return f"; did you mean {close!r}?" if close else ""


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like *name*, if one is."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)
