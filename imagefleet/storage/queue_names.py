"""The names of job queues: one for each model and each priority.

Jobs without a `model` are in the queue that `--queue` names, `jobs` by default. Those of a model
are in `jobs-SLUG-HASH`: SLUG is what a queue's name can hold of the model's, for people; HASH is of
the exact name, in base 32, so that no two models share a queue (by chance, one pair in 10^15). A
queue of several shards is its own first one; the others have its name and their number.
"""

from __future__ import annotations

import base64
import hashlib
import re

from imagefleet import errors

#: Azure's limit.
MAX_CHARACTERS = 63

#: The most shards of one queue: an account takes what ten queues do (20,000 messages/s).
MAX_SHARDS = 32

_HASH_CHARACTERS = 10

#: The longest `--queue` where jobs name models: the slug keeps six characters, a shard's three.
MAX_BASE_CHARACTERS = 40

_NOT_IN_A_SLUG = re.compile("[^a-z0-9]+")


def job_queue(base: str, model: str | None = None, priority: str = "normal", shard: int = 0) -> str:
    """The queue of jobs of a model, or of those without one, or one of its shards.

    Raises SetupError if *base* leaves no room for the model's name or the shard's number.
    """
    suffix = ("" if priority == "normal" else f"-{priority}") + (f"-{shard}" if shard else "")
    longest = len("-high") + (len(f"-{MAX_SHARDS - 1}") if shard else 0)
    what, most = "shards", MAX_CHARACTERS - longest
    if model is not None:
        what, most = "jobs that name a model", MAX_BASE_CHARACTERS
    if len(base) > most:
        raise errors.SetupError(
            f"the queue name {base!r} is too long for {what}: --queue should have {most} characters"
            " at most"
        )
    if model is not None:
        digest = hashlib.blake2b(model.encode(), digest_size=8).digest()
        text = base64.b32encode(digest).decode().lower()[:_HASH_CHARACTERS]
        room = MAX_CHARACTERS - longest - _HASH_CHARACTERS - len(base) - 2
        slug = _NOT_IN_A_SLUG.sub("-", model.lower())[:room].strip("-")
        base = "-".join(filter(None, (base, slug, text)))
    return base + suffix


def priority_of(name: str) -> str:
    """The priority of a job queue's jobs."""
    return next((each for each in ("high", "low") if name.endswith(f"-{each}")), "normal")
