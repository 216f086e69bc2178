"""Addresses and texts for messages: without secrets, and without what controls a terminal."""

import contextlib
import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

MASKED = "(secret)"

#: Control characters, changes of the direction of writing, invisible ones, half surrogate pairs.
CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)

_URL = re.compile(r"(?i)(https?)://(?:[^/?#]*@)?([^/?#@]*)([^?#]*)")
_HOST = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")

#: What libraries may quote: keys, SAS tokens, JSON Web Tokens, passwords and queries of addresses.
_SECRETS = {
    re.compile(r"(?i)\b(AccountKey|SharedAccessSignature)=[^;\s'\"]+"): rf"\1={MASKED}",
    # Bounded: a hostile text must not take quadratic time.
    re.compile(r"(:/{1,2})[^\s/'\"][^\s'\"]{0,300}@(?!sha256:)"): r"\1",
    # Before a host only: a sentence may say `user:password@`.
    re.compile(
        r"(?<![\w/.-])[\w.-]{1,100}:[^\s'\"@/]{1,200}@(?!sha256:)(?=[\w\[])"
    ): f"{MASKED}@",
    re.compile(r"(?i)(\w://[^\s?'\"]{0,300})\?[^\s'\"]+"): rf"\1?{MASKED}",
    re.compile(
        r"(?i)([?&][\w-]{0,40}(?:token|key|signature|secret|password|pwd)=)(?!YOUR_)[^&;\s'\"]+"
    ): rf"\1{MASKED}",
    re.compile(r"(?i)\bsig=[^&;\s'\"]+"): f"sig={MASKED}",
    re.compile(
        r"(?i)\b(Bearer|Basic)\s+(?!auth|realm=)[\w.~+/=-]{8,}"
    ): rf"\1 {MASKED}",
    re.compile(r"(?<![\w-])eyJ[\w-]+\.[\w-]+\.[\w-]+"): MASKED,
}

#: Cheaper than the patterns, which nearly no text needs.
_MAY_HOLD_SECRET = re.compile(r"(?i)key=|signature=|@|[?&]|sig=|bearer|basic|eyj")


def address(text: str) -> str:
    """A URL without user, password, query and fragment; of what is no URL, nothing."""
    found = _URL.match(text)
    if not found:
        return MASKED
    scheme, host, path = found.group(1, 2, 3)
    if not _HOST.fullmatch(host):
        return MASKED
    return message(f"{scheme.lower()}://{host}{path}"[:500])


def message(text: str) -> str:
    """A text without the secrets that can be recognised in it: the last line of defence."""
    if _MAY_HOLD_SECRET.search(text):
        for pattern, instead in _SECRETS.items():
            text = pattern.sub(instead, text)
    return text


def reason(error: BaseException) -> str:
    """The reason a request failed, without the addresses and secrets that an error may quote."""
    if refused := getattr(error, "certificate_error", None):  # aiohttp's
        why = getattr(refused, "verify_message", "") or type(refused).__name__
        return (
            f"the certificate of {getattr(error, 'host', 'the server')} is not trusted"
            f" ({printable(message(why))[:100]}): if your own authority signed it, name the file"
            " with the authority's certificate in SSL_CERT_FILE"
        )
    text = " ".join(str(error).split())
    return printable(message(text))[:300] if text else type(error).__name__


def printable(text: str) -> str:
    """*text* with U+FFFD for what controls a terminal; tabs and line feeds stay."""
    return CONTROLS.sub("\ufffd", text)


def check_address(text: str) -> str:
    """Raises ValueError, without quoting it, if *text* is no URL with a host and a valid port."""
    with contextlib.suppress(ValueError):  # a host or a port that is none
        parts = urlsplit(text)
        is_web = (
            parts.scheme in {"http", "https"}
            and parts.hostname
            and not re.search(r"\s", text)
        )
        if is_web and parts.port != 0 and not parts.netloc.endswith(":"):
            return text
    raise ValueError(
        "should be a URL that begins with http:// or https://, has a host and, if any, a port"
        " from 1 to 65535, say http://HOST:9090"
    )


#: A URL with a host; its errors do not quote it, as it may hold a password.
WebAddress = Annotated[str, AfterValidator(check_address)]
