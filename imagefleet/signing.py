"""Signatures (Ed25519): whose jobs and files a worker takes, whatever else is in the storage."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from imagefleet.errors import SetupError, UntrustedJobError
from imagefleet.validation import JSONObject

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )


#: Keys that a worker trusts at the same time: each may cost a check of each job.
MAX_TRUSTED_KEYS = 8

#: The purpose of a job's signature, which is valid for nothing else.
OF_JOBS = "job"

#: Characters of a signature in base64.
SIGNATURE_CHARACTERS = 88

#: A message's field with its job's signature: its terms, and the signature itself as `ed25519`.
SIGNATURE_FIELD = "signature"
_ED25519 = "ed25519"
_TERMS = {"fleet", "queue", "until"}

#: The most bytes of a message that the field takes.
MAX_SIGNATURE_BYTES = 400

#: How long a job's signature holds, and the longest that workers accept from other programs.
SIGNED_FOR = timedelta(days=30)
LONGEST = timedelta(days=366)

#: Far more than a key; whatever file is named by mistake.
_MAX_FILE_BYTES = 2**16

#: The text that is signed, in ASCII, has one form for one content.
CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


class SigningKey:
    """The private key of those who fill the queue; nothing prints it."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = base64.b64encode(key.public_key().public_bytes_raw()).decode()

    @classmethod
    def create(cls, path: Path) -> Self:
        """Makes a new key in a new file, which only its owner may read; raises OSError."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.generate()
        text = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        return cls(key)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The key in a PEM file; raises SetupError if it is no Ed25519 key.

        Its message does not have what was given for the path: that may be the key itself.
        """
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        setting = "--signing-key / IMAGEFLEET_SIGNING_KEY"
        try:
            with path.expanduser().open("rb") as file:
                text = file.read(_MAX_FILE_BYTES)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is no path"
            raise SetupError(f"{setting}: the file cannot be read: {reason}") from None
        try:
            key = serialization.load_pem_private_key(text, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise SetupError(
                f"{setting}: the file is not an Ed25519 private key in PEM without a password;"
                " `imagefleet keys mint signing` makes one"
            )
        return cls(key)

    def sign(self, purpose: str, fields: JSONObject) -> str:
        """The signature of *fields*; it is not valid for another *purpose*."""
        return base64.b64encode(self._key.sign(_signed_bytes(purpose, fields))).decode()


class TrustedKeys:
    """The public keys of those whose jobs and files are taken."""

    def __init__(self, keys: Iterable[Ed25519PublicKey]) -> None:
        self._keys = tuple(keys)

    @classmethod
    def read(cls, text: str) -> Self:
        """Reads public keys, with commas between; the ValueError does not quote them."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        names = list(dict.fromkeys(each.strip() for each in text.split(",")))
        if len(names) > MAX_TRUSTED_KEYS:
            raise ValueError(f"has {len(names)} keys; {MAX_TRUSTED_KEYS} are allowed")
        try:
            raw = [base64.b64decode(name, validate=True) for name in names]
            return cls(map(Ed25519PublicKey.from_public_bytes, raw))
        except ValueError:
            raise ValueError(
                "should be a public key as `imagefleet keys mint signing` prints it, or several"
                " with commas between"
            ) from None

    def accept(self, purpose: str, fields: JSONObject, signature: object) -> bool:
        """True if one of the keys has signed *fields* for that *purpose*."""
        from cryptography.exceptions import InvalidSignature

        if not isinstance(signature, str) or len(signature) != SIGNATURE_CHARACTERS:
            return False
        try:
            given = base64.b64decode(signature, validate=True)
            signed = _signed_bytes(purpose, fields)
        except (ValueError, RecursionError):
            return False
        for key in self._keys:
            try:
                key.verify(given, signed)
            except InvalidSignature:
                continue
            return True
        return False


def trusted_keys(text: str | None) -> TrustedKeys | None:
    return TrustedKeys.read(text) if text else None


@dataclass(frozen=True, slots=True)
class Scope:
    """The place a job is signed for, or taken from: a fleet's storage, its queue, and its clock."""

    #: The storage's name, the same for all who use it, whatever address they reach it by.
    fleet: Callable[[], str]
    #: The queue of normal priority of jobs without a model: jobs move between it and the others.
    queue: str
    now: Callable[[], datetime]


class JobSigner(NamedTuple):
    """Signs jobs for one queue of one fleet, until a date."""

    key: SigningKey
    scope: Scope

    def sign(self, fields: JSONObject) -> dict[str, str]:
        """The field `signature` of the job with these *fields*."""
        until = self.scope.now() + SIGNED_FOR
        terms = {
            "fleet": self.scope.fleet(),
            "queue": self.scope.queue,
            "until": f"{until:%Y-%m-%dT%H:%M:%SZ}",
        }
        return {
            **terms,
            _ED25519: self.key.sign(OF_JOBS, {**fields, SIGNATURE_FIELD: terms}),
        }


@dataclass(frozen=True, slots=True)
class TrustedJobs:
    """The jobs that are taken: signed with one of the *keys* for this fleet, queue and time."""

    keys: TrustedKeys
    #: None accepts jobs of any fleet, queue and time: those that were drawn.
    scope: Scope | None
    #: True accepts jobs whose date has passed, too, to sign them again.
    at_any_time: bool = False

    def check(self, fields: JSONObject, signature: object) -> None:
        """Raises UntrustedJobError; reads nothing else of a job that is not signed."""
        if signature is None:
            why = "is not signed with the trusted key: it carries no signature"
        elif (terms := self._terms(fields, signature)) is None:
            why = (
                "is not signed with the trusted key: it was changed after it was signed, or another"
                " key signed it"
            )
        elif fields.get("id") is None:
            # Its message's id would take the place: sent again, it would be another job.
            why = "has no `id`, which a signed job needs"
        elif self.scope is None:
            return
        elif (fleet := self.scope.fleet()) != terms["fleet"]:
            why = f"is signed for the fleet {terms['fleet'][:200]}, and this one is {fleet}"
        elif self.scope.queue != terms["queue"]:
            why = f"is signed for the queue {terms['queue'][:200]}, not for {self.scope.queue}"
        elif (until := _moment(terms["until"])) is None:
            why = "is signed until no date: `until` should be like 2026-12-31T00:00:00Z"
        elif until > self.scope.now() + LONGEST:
            why = f"is signed until {terms['until'][:40]}: {LONGEST.days} days are the most"
        elif until <= self.scope.now() and not self.at_any_time:
            error = UntrustedJobError(
                f"the job's signature held until {terms['until'][:40]}: `imagefleet replay` with"
                " IMAGEFLEET_SIGNING_KEY signs it again"
            )
            error.is_expired = True
            raise error
        else:
            return
        raise UntrustedJobError(
            f"the job {why}. If it is yours, send it again with IMAGEFLEET_SIGNING_KEY; else"
            " discard it"
        )

    def _terms(self, fields: JSONObject, signature: object) -> dict[str, str] | None:
        """The terms that one of the keys has signed *fields* with; None: none has."""
        if not isinstance(signature, dict) or signature.keys() != _TERMS | {_ED25519}:
            return None
        terms = {name: signature[name] for name in _TERMS}
        if not all(isinstance(term, str) for term in terms.values()):
            return None
        signed = {**fields, SIGNATURE_FIELD: terms}
        return terms if self.keys.accept(OF_JOBS, signed, signature[_ED25519]) else None


class Keys(NamedTuple):
    """The keys of a command or program: one to sign with, and those whose signatures count."""

    signing: SigningKey | None = None
    trusted: TrustedKeys | None = None

    def signer(self, scope: Scope) -> JobSigner | None:
        return None if self.signing is None else JobSigner(self.signing, scope)


NO_KEYS = Keys()


def _moment(text: str) -> datetime | None:
    """A time in ISO 8601 with its zone; None for any other text."""
    try:
        moment = datetime.fromisoformat(text)
        return None if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _signed_bytes(purpose: str, fields: JSONObject) -> bytes:
    return f"imagefleet {purpose} 1\n{CANONICAL.encode(fields)}".encode("ascii")
