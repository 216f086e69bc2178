"""`imagefleet health`: a probe's question to the worker of this machine, answered within a moment.

An orchestrator runs it again and again beside a worker that wants the processor for itself, so it
imports the standard library alone: a hundredth of a second or so, not half of one. It goes to the
worker directly, whatever proxy the environment names.
"""

from __future__ import annotations

import argparse
import http.client
import os
import sys
from collections.abc import Sequence

#: A worker that is busy answers within milliseconds: nothing but its event loop has to run.
TIMEOUT_SECONDS = 3.0

#: What a worker listens on to be heard by all, and where it is heard from here.
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - it is looked for, not bound

_OK = 200


def main(arguments: Sequence[str]) -> int:
    """Prints one sentence; 0 where the worker says that it is so, else 1."""
    parser = argparse.ArgumentParser(
        prog="imagefleet health",
        description="Asks the worker of this machine how it is, for probes: exit code 0 or 1.",
        epilog="Port and host are the worker's own, from its IMAGEFLEET_PORT and IMAGEFLEET_HOST.",
    )
    parser.add_argument(
        "what",
        choices=("started", "live", "ready"),
        help="started: checked, and at work (or waiting for its storage). live: nothing hangs."
        " ready: takes jobs.",
    )
    parser.add_argument("--host", default=os.environ.get("IMAGEFLEET_HOST") or "127.0.0.1")
    parser.add_argument("--port", default=os.environ.get("IMAGEFLEET_PORT") or "0")
    parser.add_argument("--seconds", type=float, default=TIMEOUT_SECONDS, help="Longest wait.")
    given = parser.parse_args(arguments)
    if not given.port.isdecimal() or not 0 < int(given.port) <= 65_535:  # noqa: PLR2004
        return _say(f"not {given.what}: set IMAGEFLEET_PORT, or --port, to the worker's port")
    host = _EVERYWHERE.get(given.host, given.host)
    is_so, answer = ask(given.what, host, int(given.port), given.seconds)
    return _say(f"{'' if is_so else 'not '}{given.what}: {answer}", 0 if is_so else 1)


def ask(what: str, host: str, port: int, seconds: float = TIMEOUT_SECONDS) -> tuple[bool, str]:
    """Whether the worker on that port says that it is *what*, and its words."""
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        connection.request("GET", f"/{what}")
        answer = connection.getresponse()
        words = answer.read(200).decode(errors="replace").strip()
    except TimeoutError:
        return False, f"the worker on port {port} does not answer within {seconds:g} s: it hangs"
    except (OSError, http.client.HTTPException) as error:
        return False, f"nothing answers on port {port} of {host}: {error}"
    finally:
        connection.close()
    return answer.status == _OK, words


def _say(sentence: str, code: int = 1) -> int:
    sys.stdout.write(sentence + "\n")
    return code
