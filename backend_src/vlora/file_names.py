r"""File names as text and as paths, whatever encoding the interpreter has for them.

The interpreter inside Triton decodes file names as ASCII, in every locale. Its path of the folder
`zählen` is `z\udcc3\udca4hlen`, and it cannot open `zählen`. So text from JSON and from Triton
becomes a path by `to_path`, names of folders become text by `to_text`, and `decoded` shows the
paths in messages as they are. In other interpreters, which use UTF-8, these change nothing.

A name may hold what a terminal obeys; `printable` makes it harmless.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Bytes of a file name that were not decoded, also as `repr` shows them, as in an OSError.
_UNDECODED = re.compile(r"[\udc80-\udcff]+|(?:\\udc[89a-f][0-9a-f])+")
_SURROGATES = re.compile("[\ud800-\udfff]")


def to_path(text: str) -> Path:
    """Return the path whose name in UTF-8 is `text`. The inverse of `to_text`."""
    return Path(os.fsdecode(text.encode("utf-8", "surrogateescape")))


def to_text(path: Path | str) -> str:
    """Return a path as text, decoded as UTF-8. Bytes that are not UTF-8 become surrogates."""
    return os.fsencode(path).decode("utf-8", "surrogateescape")


@contextmanager
def openable(folder: Path) -> Iterator[Path]:
    """Yield a path to an existing folder for libraries that take paths as UTF-8 text only.

    It is `folder` itself if that is valid text, and else a link that exists as long as the context.
    """
    if not _SURROGATES.search(str(folder)):
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def decoded(message: str) -> str:
    """Return a message with the paths in it decoded as UTF-8. Other text does not change."""
    return _UNDECODED.sub(_decode, message)


def printable(text: str) -> str:
    """Return text with control and direction marks and lone surrogates escaped, as by `repr`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _decode(found: re.Match[str]) -> str:
    characters = re.sub(r"\\u(....)", lambda escape: chr(int(escape[1], 16)), found[0])
    try:
        return characters.encode("ascii", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError:
        return found[0]
