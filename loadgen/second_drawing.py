"""The jobs that are drawn a second time, to be compared."""

from __future__ import annotations

import hashlib
import json

from imagefleet.job import sizes
from imagefleet.job.chain import THEN_FIELD
from imagefleet.job.message import COMPARABLE_STEPS, SIGNATURE_FIELD
from imagefleet.signing import OF_JOBS, SigningKey


class Sample:
    """Chooses a share of the messages: the same ones again, by a key that no worker knows."""

    def __init__(self, share: float, key: str, signing_key: SigningKey | None = None) -> None:
        self._below = round(share * 2**64)
        own_key = key.encode()[: hashlib.blake2b.MAX_KEY_SIZE]
        self._hash = hashlib.blake2b(key=own_key, digest_size=8)
        self._signing_key = signing_key

    def second_drawing(self, body: str) -> str | None:
        """The message for the second drawing of a job of `Job.to_message`; None: not chosen."""
        hashed = self._hash.copy()
        hashed.update(body.encode(errors="surrogatepass"))
        if int.from_bytes(hashed.digest()) >= self._below:
            return None
        fields = json.loads(body)
        is_signed = fields.pop(SIGNATURE_FIELD, None) is not None
        if fields.get("verify") or fields.get("steps", COMPARABLE_STEPS) < COMPARABLE_STEPS:
            return None
        fields["verify"] = True
        fields.pop(THEN_FIELD, None)
        if self._signing_key is not None:
            fields[SIGNATURE_FIELD] = self._signing_key.sign(OF_JOBS, fields)
        elif is_signed:  # with somebody else's key
            return None
        message = json.dumps(fields, separators=(",", ":"))
        return message if sizes.fits(message) else None
