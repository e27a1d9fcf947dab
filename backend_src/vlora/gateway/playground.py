"""The playground: static web pages that the gateway serves in addition to its API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi.responses import Response
from starlette.staticfiles import StaticFiles

from vlora import paths

PAGE = Path(__file__).parent / "static"
EXAMPLES = paths.root() / "tools" / "demo" / "samples"
"""Sample images of the demo, for the gallery."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "media-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Content-Security-Policy. It allows only files of this gateway. Scripts cannot insert text as
markup or run it as code.
"""

HEADERS = {
    "content-security-policy": POLICY,
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


class StaticPages(StaticFiles):
    """Serves the files of a folder with `HEADERS`."""

    async def get_response(self, path: str, scope: Any) -> Response:
        """Return a file, or the response that says that the client's copy is up to date."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response
