"""Reads YAML that people write, or forge: errors never quote it, and it cannot grow."""

from pathlib import Path
from typing import Any

import yaml

from imagefleet.errors import SetupError

#: The most values with all aliases written out: one costs nothing to read, but is walked each time.
MAX_VALUES = 1_000_000

#: The most characters that are shown of PyYAML's reason, which names a character or a key.
_SHOWN_CHARACTERS = 120


class YamlError(ValueError):
    """A text is not valid YAML; the message says what is wrong, in which line."""


def read(path: Path, name: str) -> Any:
    """The content of a file; raises SetupError, which gives its *name* and path."""
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise SetupError(f"{name} {path}: {error.strerror or error}") from None
    except YamlError as error:
        raise SetupError(f"{name} {path} is not valid YAML: {error}") from None


def parse(content: str | bytes) -> Any:
    """The content of a document; raises YamlError for no YAML, and for aliases without end."""
    try:
        # Not libyaml's loader: lists nested thousands deep overflow its stack, and crash Python.
        document = yaml.safe_load(content)
    except yaml.MarkedYAMLError as error:
        # Not its text, which quotes the line, perhaps with a secret.
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise YamlError(
            f"{(error.problem or 'invalid')[:_SHOWN_CHARACTERS]}{where}"
        ) from None
    except RecursionError:
        raise YamlError("it is nested too deeply") from None
    # PyYAML's constructors raise all of these for a scalar that is not of its type.
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
    ):
        raise YamlError("a value is not of its type, or not text") from None
    if _values(document, {}) > MAX_VALUES:
        raise YamlError(f"it has more than {MAX_VALUES:,} values, or contains itself")
    return document


def _values(node: object, known: dict[int, int]) -> int:
    """The number of values below *node*, aliases written out; more than any for a circle."""
    if not isinstance(node, dict | list | set | tuple):
        return 1
    if id(node) not in known:
        known[id(node)] = (
            MAX_VALUES + 1
        )  # until it is counted: met again, it contains itself
        parts = [*node, *node.values()] if isinstance(node, dict) else list(node)
        known[id(node)] = 1 + sum(_values(part, known) for part in parts)
    return known[id(node)]
