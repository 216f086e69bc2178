"""A folder's manifest: the SHA-256 that its files must have, signed or not.

`loras/manifest.json`, `models/manifest.json` and `kernels/manifest.json` are either plain,
`{"name": "sha256", ...}`, or signed, `{"folder": "loras", "files": {"name": "sha256", ...},
"signature": "..."}`. A signed one is complete: workers with a trusted key take no other file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from imagefleet import errors
from imagefleet.signing import SigningKey, TrustedKeys

NAME = "manifest.json"

#: The folders that have one.
LORAS = "loras"
MODELS = "models"
KERNELS = "kernels"

#: Some 100 bytes a file.
MAX_BYTES = 16 * 2**20
MAX_FILES = 100_000

#: The command that lists a file, by folder.
ADD_COMMANDS = {
    LORAS: "imagefleet lora add",
    MODELS: "imagefleet model add",
    KERNELS: "imagefleet kernels push",
}


@dataclass(frozen=True, slots=True)
class Contents:
    """What a manifest says."""

    files: Mapping[str, str] = field(default_factory=dict)
    signed: Mapping[str, Any] = field(default_factory=dict)
    """What its signature covers; empty where it is plain."""
    signature: object = None

    @property
    def is_signed(self) -> bool:
        return self.signature is not None

    def is_signed_by(self, trusted: TrustedKeys | None, folder: str) -> bool:
        """Whether one of the keys has signed it, for this folder."""
        is_for_it = self.signed.get("folder") == folder
        return is_for_it and bool(
            trusted and trusted.accept(_purpose(folder), self.signed, self.signature)
        )


def parse(where: str, content: bytes) -> Contents:
    """What a manifest says.

    Raises:
        TransientError: it is damaged; SetupError: it is too large.
    """
    if len(content) > MAX_BYTES:
        raise too_large(where)
    try:
        found = json.loads(content)
        is_plain = not isinstance(found.get("files"), dict)
        files = found if is_plain else found["files"]
        hashes = {name: sha256.lower() for name, sha256 in files.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise errors.TransientError(
            f'{where} is not a JSON manifest, {{"name": "sha256", ...}}: {error}'
        ) from None
    if len(hashes) > MAX_FILES:
        raise too_large(where)
    if is_plain:
        return Contents(hashes)
    signature = found.pop("signature", None)
    return Contents(hashes, found, signature)


def encode(folder: str, files: Mapping[str, str], key: SigningKey | None) -> bytes:
    """A manifest's content: plain without a *key*."""
    fields: dict[str, Any] = dict(files)
    if key is not None:
        fields = {"folder": folder, "files": fields}
        fields["signature"] = key.sign(_purpose(folder), fields)
    return json.dumps(fields, indent=2, sort_keys=True).encode()


def too_large(where: str) -> errors.SetupError:
    return errors.SetupError(
        f"{where} is too large: {MAX_BYTES / 2**20:.0f} MiB and {MAX_FILES:,} files are allowed"
    )


def _purpose(folder: str) -> str:
    return f"manifest of {folder}"
