"""Files that are replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a UTF-8 file so that an interruption leaves the former one intact.

    Readers, and other processes that write the same file, never see a part of it.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
