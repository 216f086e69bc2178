"""Sessions of HTTP clients, which all go through the same proxies of the environment."""

import os
import urllib.request
from typing import Any

from aiohttp import ClientConnectorCertificateError, ClientSession

from imagefleet import redaction
from imagefleet.errors import FleetError, SetupError, TransientError


def through_proxy() -> bool:
    """True if the environment names proxies: HTTPS_PROXY, HTTP_PROXY and, for both, ALL_PROXY.

    aiohttp reads the first two and NO_PROXY, so the third becomes those that are missing. Raises
    SetupError for a SOCKS proxy.
    """
    named = urllib.request.getproxies_environment()
    for scheme in ("http", "https"):
        address = named.get(scheme) or named.get("all")
        if address and address.lower().startswith("socks"):
            raise SetupError(
                f"the environment names a SOCKS proxy for {scheme}:// (ALL_PROXY, HTTPS_PROXY or"
                " HTTP_PROXY), and only HTTP proxies are supported: name one of those, or unset it"
            )
        if address and scheme not in named:
            os.environ[f"{scheme}_proxy"] = address
    return bool(named)


def unreachable(message: str, error: Exception) -> FleetError:
    """Error of a failed request: SetupError for a certificate, as no retry mends it."""
    is_refused = isinstance(error, ClientConnectorCertificateError)
    kind = SetupError if is_refused else TransientError
    return kind(f"{message}: {redaction.reason(error)}")


def session(**options: Any) -> ClientSession:
    """A session through the environment's proxies; without any, none is looked for."""
    return ClientSession(trust_env=through_proxy(), **options)
