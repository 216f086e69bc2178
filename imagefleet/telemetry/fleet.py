"""The name of a fleet: the label `fleet` of its metrics."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from imagefleet.storage.open import LOCAL_SCHEME

#: Stands for every fleet in queries, so that no fleet may be called so.
ALL = "all"

#: A name that PromQL, a regular expression or a URL need not quote, but for the dot.
PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}$"

#: The account of Azurite and of `UseDevelopmentStorage=true`.
_DEVELOPMENT_ACCOUNT = "devstoreaccount1"

_ACCOUNT_HOST = re.compile(r"([a-z0-9-]+)\.(?:[a-z0-9-]+\.)*(?:blob|queue)\.")


def derived(storage: str, queue: str) -> str:
    """`STORAGE/QUEUE`: the storage's account or folder, however the address names it.

    It holds no secret, and raises no error for an address that is not valid: whoever opens the
    storage does.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", _storage(storage.strip())).strip("-.")
    return f"{name[:64] or 'storage'}/{queue}"


def _storage(address: str) -> str:
    if address.startswith(LOCAL_SCHEME):
        return Path(address.removeprefix(LOCAL_SCHEME)).expanduser().resolve().name
    parts = (part.partition("=") for part in address.split(";"))
    given = {name.strip().lower(): value.strip() for name, _, value in parts}
    if account := given.get("accountname"):
        return account.lower()
    if given.get("usedevelopmentstorage", "").lower() == "true":
        return _DEVELOPMENT_ACCOUNT
    endpoint = given.get("blobendpoint") or given.get("queueendpoint")
    try:
        url = urlsplit(endpoint or address)
        host = (url.hostname or "").lower()
    except ValueError:
        return ""
    if found := _ACCOUNT_HOST.match(host):
        return found[1]
    # Emulators have the account in the path; a path elsewhere may be anything.
    return (endpoint and url.path.strip("/").partition("/")[0]) or host
