"""Files that are replaced atomically, and folders that appear atomically."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlora.errors import InvalidArgument


def replace_text(path: Path, text: str) -> None:
    """Replace a UTF-8 file atomically. If the write is interrupted, the old file stays intact.

    Readers never see a partial file, even if several processes write the file at the same time.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def apply_umask(folder: Path) -> None:
    """Set the permissions of all files in a folder to those that the umask gives to new files.

    safetensors writes files that only their owner can read, but a server may run as another user.
    """
    mask = os.umask(0o077)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o666 & ~mask)


def check_absent(out: Path) -> None:
    """Raise InvalidArgument if `out` exists."""
    if out.exists():
        raise InvalidArgument(f"{out} exists; name a folder that does not")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `out`. When the context ends, rename the folder to `out`, or
    remove it if the context raised an error.

    Raises InvalidArgument if `out` exists or the folder cannot be made.
    """
    check_absent(out)
    part = out.with_name(out.name + ".part")
    try:
        part.mkdir(parents=True)
    except FileExistsError:
        raise InvalidArgument(f"{part} exists, from a run that was killed; remove it") from None
    except OSError as error:
        raise InvalidArgument(f"{part} cannot be made: {error.strerror}") from error
    try:
        yield part
        apply_umask(part)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
