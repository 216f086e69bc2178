"""Where the CPU time of a send by Azure's SDK goes, by what its code is for; against Azurite.

Shares are of a profile, which makes calls of Python functions dearer than they are: they say what
to look at. `rates.py` measures the time itself.

    python benchmarks/sending/profile_sdk.py [--sends 3000]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import sys
from collections import Counter
from pathlib import Path

from azure.storage.queue.aio import QueueClient
from rich.console import Console
from rich.table import Table

from imagefleet.storage.azure.storage import API_VERSION

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "chaos"))
import azurite  # type: ignore[import-not-found]

AT_ONCE = 64

BODY = json.dumps({"id": "0" * 24, "campaign": "spring", "prompt": "a red house in a forest " * 20})

#: What code is for, by parts of its path; the first match counts.
PURPOSES = {
    "signature": ("_shared/authentication.py", "/hmac.py", "/base64.py"),
    "pipeline and its policies": ("azure/core/pipeline", "_shared/policies", "azure/core/tracing"),
    "XML and models of request and answer": ("_generated/", "/xml/", "azure/core/rest"),
    "SDK, other": ("/azure/",),
    "HTTP: aiohttp and asyncio": (
        "/aiohttp/",
        "/yarl/",
        "/multidict/",
        "/asyncio/",
        "/selectors.py",
    ),
}

#: Rounds in which the time of the standard library is handed to who called it.
_CALL_DEPTH = 20

Function = tuple[str, int, str]


def purpose_of(function: Function) -> str | None:
    return next(
        (name for name, parts in PURPOSES.items() if any(part in function[0] for part in parts)),
        None,
    )


def by_purpose(profile: cProfile.Profile) -> Counter[str]:
    """Seconds; those of the standard library and of C count for the code that called it."""
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    own = {function: entry[2] for function, entry in stats.items()}
    for _ in range(_CALL_DEPTH):
        handed: Counter[Function] = Counter()
        for function, (_, _, _, _, callers) in stats.items():
            total = sum(entry[3] for entry in callers.values())
            if purpose_of(function) is None and total > 0:
                for caller, entry in callers.items():
                    handed[caller] += own[function] * entry[3] / total
                own[function] = 0.0
        for function, seconds in handed.items():
            own[function] += seconds
    found: Counter[str] = Counter()
    for function, seconds in own.items():
        found[purpose_of(function) or "other"] += seconds
    return found


async def send(address: str, sends: int) -> cProfile.Profile:
    async with QueueClient.from_connection_string(
        address, "jobs", api_version=API_VERSION, retry_total=0, use_env_settings=False
    ) as client:
        await client.create_queue()
        left = iter(range(sends))

        async def work() -> None:
            for _ in left:
                await client.send_message(BODY, time_to_live=-1)

        await client.send_message(BODY)
        profile = cProfile.Profile()
        profile.enable()
        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        profile.disable()
    return profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sends", type=int, default=3_000)
    with azurite.running() as address:
        profile = asyncio.run(send(address, parser.parse_args().sends))
    found = by_purpose(profile)
    total = found.total()
    table = Table("what", "share")
    for purpose, seconds in found.most_common():
        table.add_row(purpose, f"{seconds / total:.0%}")
    Console().print(table)
    print(json.dumps({purpose: round(seconds / total, 3) for purpose, seconds in found.items()}))


if __name__ == "__main__":
    main()
