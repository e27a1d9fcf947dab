"""Base64 of files, as every interface of the server accepts it."""

from __future__ import annotations

import base64

WHITE_SPACE = b" \t\r\n"


def decode_base64(text: str | bytes) -> bytes:
    """Return the content of base64, which may have white space, such as line breaks, anywhere.

    Raises ValueError for other characters and for wrong padding.
    """
    if isinstance(text, str):
        text = text.encode("ascii")
    return base64.b64decode(text.translate(None, WHITE_SPACE), validate=True)
