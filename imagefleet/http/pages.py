"""Web pages in a browser: which may use a server, whatever the browser has saved for it."""

from collections.abc import Collection

from aiohttp.web import Request

from imagefleet.http.refused import Refused


class Pages:
    """Lets a server's own pages use it, and those of the configured origins."""

    def __init__(self, origins: Collection[str]) -> None:
        """*origins*: as `https://example.com`, or `*` for all without saved credentials."""
        self._origins = frozenset(origins)

    def cors(self, request: Request) -> dict[str, str]:
        """The headers by which a browser lets the page of a request read its answer."""
        origin = request.headers.get("Origin")
        if origin is None or self._origins.isdisjoint({origin, "*"}):
            return {}
        asked = request.headers.get("Access-Control-Request-Headers", "*")
        found = {
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": asked,
            "Vary": "Origin",
        }
        if origin not in self._origins:
            return found | {"Access-Control-Allow-Origin": "*"}
        return found | {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Credentials": "true",
        }

    def check(self, request: Request) -> None:
        """Refuses pages of other sites in a browser, which may send a saved key of its user's."""
        origin = request.headers.get("Origin")
        if origin is None:
            site = request.headers.get("Sec-Fetch-Site", "none")
            is_own = site in {"none", "same-origin"}
        else:
            is_own = origin.partition("://")[2] == request.host
        if not is_own and not self.cors(request):
            raise Refused(
                403,
                "pages of other sites may not use it: name theirs with --cors-allow-origins",
            )
