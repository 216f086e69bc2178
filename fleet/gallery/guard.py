"""Guards the gallery: only pages that it served itself, in a browser here, may read it.

A page of another site can make a browser send requests here, even under a name of its own that
resolves to 127.0.0.1 (DNS rebinding). So the Host must be one of ours, and a request that another
site caused gets nothing. No request changes anything.
"""

import ipaddress
import socket
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web import HTTPForbidden, Request, StreamResponse

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Guard:
    def __init__(self, host: str) -> None:
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}

    @web.middleware
    async def check(self, request: Request, handler: Handler) -> StreamResponse:
        if not self._is_ours(request.host):
            # A name may be anyone's who let it resolve to this machine.
            raise HTTPForbidden(text="open the gallery by its own address\n")
        site = request.headers.get("Sec-Fetch-Site", "none")
        if site not in {"none", "same-origin"} and request.path != "/":
            raise HTTPForbidden(text="another site sent this request\n")
        return await handler(request)

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            # Rebinding needs a name; an address in a URL is this machine's own.
            return name in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


async def add_headers(_: Request, response: StreamResponse) -> None:
    """Adds `HEADERS` to all responses, on `on_response_prepare`: refusals have them, too."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.setdefault("Cache-Control", "no-store")
