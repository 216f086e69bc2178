"""Damaged variants of valid inputs: bytes, text and the values inside of JSON."""

import base64
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

#: What parsers stumble over, in any place.
TOKENS: tuple[bytes, ...] = (
    b"",
    b"\0",
    b"\x1b[2J",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    "\u202e".encode(),
    b"\n",
    b"\r\n",
    b"\t",
    b"(",
    b")",
    b"[",
    b"]",
    b"{",
    b"}",
    b"<",
    b">",
    b"<lora:",
    b":",
    b"|",
    b"AND",
    b" BREAK ",
    b"\\",
    b'"',
    b"'",
    b",",
    b"&a",
    b"*a",
    b"<<: *a",
    b"- ",
    b"!!python/name:os.system",
    b"%YAML",
    b"# ",
    b"NaN",
    b"Infinity",
    b"-1e999",
    b"1e308",
    b"-0",
    b"9" * 40,
    b"0x",
    b"null",
    b"true",
    b"1.0",
    b"../",
    b"/etc/passwd",
    b"http://u:p@h:x/?sig=a",
    b"sig=",
    b"=",
    b"\\ud800",
    b"__metadata__",
)

#: In place of a value of JSON.
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**64),
    10**30,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    " ",
    "a",
    "\ud800",
    "\0\x1b[31m",
    "x" * 5_000,
    "../..",
    "1e999",
    "9" * 5_000,
    [],
    {},
    [[]],
    [None] * 50,
    {"": 1},
    {"a": {"b": []}},
    "<script>",
    "2026-13-41T99:99",
    "=" * 8,
)


def mutated(random_: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of *seeds* with a few changes."""
    data = random_.choice(seeds)
    for _ in range(random_.choice((0, 1, 1, 1, 2, 3, 6))):
        data = random_.choice(_MUTATIONS)(random_, data, seeds)
    return data[:200_000]


def _flip(random_: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    if not data:
        return bytes([random_.randrange(256)])
    at = random_.randrange(len(data))
    return data[:at] + bytes([random_.randrange(256)]) + data[at + 1 :]


def _insert(random_: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = random_.randint(0, len(data))
    return (
        data[:at]
        + random_.choice(TOKENS) * random_.choice((1, 1, 1, 2, 60))
        + data[at:]
    )


def _cut(random_: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    first, last = sorted((random_.randint(0, len(data)), random_.randint(0, len(data))))
    return data[:first] + data[last:]


def _repeat(random_: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    first, last = sorted((random_.randint(0, len(data)), random_.randint(0, len(data))))
    piece = data[first:last][:2_000]
    return data[:last] + piece * random_.choice((1, 2, 20, 200)) + data[last:]


def _splice(random_: random.Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    other = random_.choice(seeds)
    return (
        data[: random_.randint(0, len(data))] + other[random_.randint(0, len(other)) :]
    )


def _nest(random_: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    depth = random_.choice((5, 40, 3_000, 60_000))
    opened, closed = random_.choice(
        ((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"), (b"((a:1.1)", b")"))
    )
    return opened * depth + data + closed * depth


def _in_json(random_: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Replaces, removes, copies or renames one value, wherever it is."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return _insert(random_, data, ())
    places = list(_places(document, 0))
    if not places:
        return json.dumps(random_.choice(VALUES)).encode()
    parent, key = random_.choice(places)
    match random_.randrange(5):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[
                random_.choice(("", "__proto__", "x" * 300, "\ud800", f"{key}s"))
            ] = parent[key]
        case 2:
            parent[key] = document if random_.random() < 0.01 else parent[key]
            parent[key] = [parent[key]] * random_.choice((0, 1, 50))
        case 3 if isinstance(parent[key], str):
            text = parent[key].encode(errors="replace")
            changed = random_.choice(_TEXT_MUTATIONS)(random_, text, (text,))
            parent[key] = changed.decode(errors="replace")
        case _:
            parent[key] = random_.choice(VALUES)
    try:
        return json.dumps(document, ensure_ascii=random_.random() < 0.5).encode(
            errors="surrogatepass"
        )
    except (ValueError, RecursionError):  # it contains itself
        return data


def _places(node: Any, depth: int) -> Any:
    if depth > 30:
        return
    keys = (
        list(node)
        if isinstance(node, dict)
        else range(len(node))
        if isinstance(node, list)
        else ()
    )
    for key in keys:
        yield node, key
        yield from _places(node[key], depth + 1)


def _in_base64(_: random.Random, data: bytes, __: Sequence[bytes]) -> bytes:
    return base64.b64encode(data)


Mutation = Callable[[random.Random, bytes, Sequence[bytes]], bytes]

_TEXT_MUTATIONS: tuple[Mutation, ...] = (_flip, _insert, _insert, _cut, _repeat)
_MUTATIONS: tuple[Mutation, ...] = (
    _flip,
    _insert,
    _insert,
    _cut,
    _repeat,
    _splice,
    _nest,
    _in_base64,
    _in_json,
    _in_json,
    _in_json,
    _in_json,
)
