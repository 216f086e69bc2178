"""Translates the exceptions of Azure's SDK into the tree of errors."""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import SimpleNamespace

import aiohttp
from azure.core import exceptions

from imagefleet import errors
from imagefleet.storage.azure import refusals

#: Another worker has the message, or it was deleted.
LEASE_LOST = frozenset({"MessageNotFound", "PopReceiptMismatch"})

#: The blob exists. Azure answers with the second code if the token may create, but not write.
TAKEN = frozenset({"BlobAlreadyExists", "UnauthorizedBlobOverwrite"})

MISSING = frozenset({"QueueNotFound", "ContainerNotFound"})

#: The name is taken until Azure has removed what was there.
_BEING_DELETED = frozenset({"QueueBeingDeleted", "ContainerBeingDeleted"})

#: Answers to requests that no SAS token for one queue or container allows: to create it, say.
NOT_FOR_TOKENS = refusals.LESS_PERMISSION | {"AuthorizationFailure"}

#: The credentials are expired, revoked or not signed with the account's key. The second code is
#: Azurite's; in Azure it is that of the firewall.
_NOT_ACCEPTED = frozenset(
    {"AuthenticationFailed", "AuthorizationFailure", "InvalidAuthenticationInfo"}
)

#: The job is at fault; the next one may succeed.
_JOB_AT_FAULT = frozenset(
    {"RequestBodyTooLarge", "MetadataTooLarge", "InvalidMetadata", "EmptyMetadataKey"}
)

#: The server did nothing; after any other error of its own, it may have.
_TOO_MANY_REQUESTS = frozenset({429, 503})

#: Azure's error code in the body of its answer.
_CODE = re.compile(rb"<Code>(\w+)</Code>")

_ACCOUNT_KEY = refusals.Credential()


class ReplyLostError(errors.TransientError):
    """The reply was lost: the request may have been carried out."""

    outcome_is_unknown = True


class RefusedError(errors.SetupError):
    """The credentials are expired, revoked or wrong."""


class NoTokenError(errors.MissingResourceError):
    """There is no SAS token for the resource."""


@contextmanager
def translated(
    what: str, credential: refusals.Credential = _ACCOUNT_KEY, permission: str = ""
) -> Iterator[None]:
    """Translates the SDK's exceptions in the block; *what* names the resource in the messages.

    A refusal is explained by the *credential* and by the *permission* that the request needs. The
    cause is dropped, as aiohttp's traceback may show the URL with a SAS token.
    """
    try:
        yield
    except exceptions.HttpResponseError as error:
        raise _from_response(error, what, credential, permission) from None
    except (exceptions.AzureError, aiohttp.ClientError, OSError) as error:
        raise _from_connection(error, what) from None
    except (ValueError, TypeError, AttributeError, LookupError, SyntaxError) as error:
        # The SDK does not check that a success has the answer of Azure: a proxy may have sent it.
        if not _is_of_the_sdk(error):
            raise
        raise ReplyLostError(not_of_azure(what)) from None


def not_of_azure(what: str) -> str:
    return f"{what} sent an answer that is not one of Azure Storage"


@contextmanager
def tolerated(codes: Collection[str]) -> Iterator[None]:
    """Ends the block without an error if the answer has one of these error codes."""
    try:
        yield
    except exceptions.HttpResponseError as error:
        if code_of(error) not in codes:
            raise


def code_of(error: exceptions.HttpResponseError) -> str:
    """Azure's error code, from the SDK's enumeration or as text."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "no error code")


def answered(status: int, headers: Mapping[str, str], body: bytes) -> exceptions.HttpResponseError:
    """The SDK's exception for an answer to a request that was made without it."""
    error = exceptions.HttpResponseError(f"HTTP {status}")
    in_body = _CODE.search(body)
    code = headers.get("x-ms-error-code") or (in_body[1].decode() if in_body else None)
    error.status_code = status
    error.error_code = code  # type: ignore[attr-defined]  # as the SDK for storage does
    error.response = SimpleNamespace(headers=headers)
    return error


def is_azurites_overwrite(error: exceptions.HttpResponseError) -> bool:
    """True for what Azurite may answer where Azure answers UnauthorizedBlobOverwrite."""
    server = getattr(error.response, "headers", {}).get("Server", "")
    return server.startswith("Azurite") and code_of(error) in refusals.LESS_PERMISSION


def _from_response(
    error: exceptions.HttpResponseError,
    what: str,
    credential: refusals.Credential,
    permission: str,
) -> errors.FleetError:
    status, code = error.status_code, code_of(error)
    if isinstance(error, exceptions.ClientAuthenticationError) and status is None:
        return errors.SetupError(f"the account key for {what} is malformed")
    answer = f"{code} (HTTP {status})"
    if code in _BEING_DELETED:
        answer += ": it is being deleted, and its name is free again in a minute or so"
    if code in LEASE_LOST:
        return errors.LeaseLost(f"the lease is lost: {what} answered {answer}")
    if code in MISSING:
        return errors.MissingResourceError(f"{what} does not exist; `imagefleet load` creates it")
    if status == 401 or status == 403:  # noqa: PLR1714, PLR2004 - narrows the type
        kind = RefusedError if code in _NOT_ACCEPTED else errors.SetupError
        reply = refusals.Answer(code, status, _date_of(error))
        return kind(refusals.sentence(what, credential, permission, reply))
    if status == 413 or code in _JOB_AT_FAULT:  # noqa: PLR2004 - Content Too Large
        return errors.JobError(f"{what} refuses the job: {answer}")
    # Without a status: a success with an invalid body, from a proxy, say.
    maybe_done = status is None or status < 400 or status == 408 or status >= 500  # noqa: PLR2004
    failed = ReplyLostError if maybe_done else errors.TransientError
    return (errors.BusyError if status in _TOO_MANY_REQUESTS else failed)(
        f"{what} answered {answer}"
    )


def _is_of_the_sdk(error: Exception) -> bool:
    """Whether the SDK, or the XML parser that it uses, raised the error; not our own code."""
    frames = list(traceback.walk_tb(error.__traceback__))
    module = str(frames[-1][0].f_globals.get("__name__")) if frames else ""
    return module.startswith(("azure.", "xml.", "email.", "isodate"))


def _date_of(error: exceptions.HttpResponseError) -> datetime:
    """Azure's time, by which it judges tokens; else this machine's."""
    headers = getattr(error.response, "headers", {})
    with suppress(ValueError):
        return parsedate_to_datetime(headers.get("Date", "")).astimezone(UTC)
    return datetime.now(UTC)


def _from_connection(error: Exception, what: str) -> errors.FleetError:
    cause = getattr(error, "inner_exception", None) or error
    if isinstance(cause, aiohttp.ClientConnectorDNSError):
        return errors.TransientError(
            f"cannot reach {what}: there is no host {cause.host!r}; check the account's name in"
            " --storage, and the network"
        )
    # The text of a ClientResponseError ends in the URL.
    text = cause.message if isinstance(cause, aiohttp.ClientResponseError) else str(cause)
    message = f"cannot reach {what}: {type(cause).__name__} {text}".rstrip()
    if isinstance(cause, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        return errors.TransientError(message)
    return ReplyLostError(message)
