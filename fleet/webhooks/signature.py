"""Signatures of webhooks, as Standard Webhooks 1.0.0 specifies them (HMAC-SHA256)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from imagefleet import errors

#: The prefix of a secret, so that it is recognised as one.
PREFIX = "whsec_"

#: The specification's limits.
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 24, 64

#: The most secrets of an endpoint: while one is replaced, both are in use.
MAX_SECRETS = 4

_MAX_FILE_BYTES = 4096

_SETTING = "--secret-file"


class Signer:
    """Signs with each of some secrets, which nothing prints."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self._secrets = tuple(secrets)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The secrets in a file, one a line.

        Raises:
            SetupError: the file cannot be read, or holds something else.
        """
        try:
            with path.expanduser().open("rb") as file:
                text = file.read(_MAX_FILE_BYTES).decode(errors="replace")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is no path"
            raise errors.SetupError(f"{_SETTING}: the file cannot be read: {reason}") from None
        lines = text.split()
        if not 1 <= len(lines) <= MAX_SECRETS:
            raise errors.SetupError(
                f"{_SETTING}: the file should hold 1 to {MAX_SECRETS} secrets, one a line, not"
                f" {len(lines)}"
            )
        return cls([_secret(line) for line in lines])

    def headers(self, event_id: str, body: bytes, unix_seconds: int) -> dict[str, str]:
        """The headers of one attempt: the id, its time and the signatures."""
        signed = b"%s.%d.%s" % (event_id.encode(), unix_seconds, body)
        digests = (hmac.new(each, signed, hashlib.sha256).digest() for each in self._secrets)
        signatures = (f"v1,{base64.b64encode(digest).decode()}" for digest in digests)
        return {
            "webhook-id": event_id,
            "webhook-timestamp": str(unix_seconds),
            "webhook-signature": " ".join(signatures),
        }


def _secret(line: str) -> bytes:
    try:
        secret = base64.b64decode(line.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        secret = b""
    if not line.startswith(PREFIX) or not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise errors.SetupError(
            f"{_SETTING}: a secret should be {PREFIX} and {MIN_SECRET_BYTES} to"
            f" {MAX_SECRET_BYTES} bytes in base64: `echo {PREFIX}$(openssl rand -base64 32)` makes"
            " one"
        )
    return secret
