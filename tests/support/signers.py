"""Signers of jobs, and what they have signed, for tests without a storage or with one."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from imagefleet.signing import JobSigner, Scope, SigningKey, TrustedJobs, TrustedKeys


def scope(fleet: str = "acme/images", queue: str = "jobs", days: float = 0) -> Scope:
    """The scope of a fleet whose clock is so many days ahead."""
    return Scope(lambda: fleet, queue, ahead(days))


def ahead(days: float) -> Callable[[], datetime]:
    return lambda: datetime.now(UTC) + timedelta(days=days)


def signer(key: SigningKey, of: Scope | None = None) -> JobSigner:
    return JobSigner(key, of or scope())


def trusted(key: SigningKey | str, of: Scope | None = None) -> TrustedJobs:
    """The jobs that are signed with a key, or with that public key."""
    public = key if isinstance(key, str) else key.public
    return TrustedJobs(TrustedKeys.read(public), of or scope())
