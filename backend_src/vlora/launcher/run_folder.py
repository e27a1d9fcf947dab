"""The folder of one run of a server, and the removal of what killed runs have left behind.

A run owns the folder `<temporary>/vlora-<user id>/<token>/` while it holds a lock on the file
`lock` in it, which the kernel releases when the process ends. The random token is part of the names
of the run's shared memory and of its command lines, which identify what a dead run left behind.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

from vlora.errors import ServerError
from vlora.launcher.processes import end
from vlora.server_run import SHARED_MEMORY, release_shared_memory, shared_memory_prefix

PROGRAMS = ("tritonserver", "triton_python_backend_stub")
TOKEN = re.compile(r"[0-9a-f]{16}")


def root_of_runs() -> Path:
    """Return the folder that contains the folders of this user's runs."""
    return Path(tempfile.gettempdir()) / f"vlora-{os.getuid()}"


def kept_log(http_port: int) -> Path:
    """Return the path of the log that a server with this HTTP port keeps after its run."""
    return root_of_runs() / f"tritonserver-{http_port}.log"


def starting_file(folder: Path, grpc_port: int) -> Path:
    """Return the path of a file that exists while the run's server is starting, for a probe."""
    # Triton opens no port before its models are loaded.
    return folder / f"starting-{grpc_port}"


def is_starting(grpc_port: int) -> bool:
    """Return whether a server of this user with this gRPC port is starting on this machine."""
    starting = root_of_runs().glob(starting_file(Path("*"), grpc_port).as_posix())
    return any(_is_owned(mark.parent / "lock") for mark in starting)


def protect_shared_memory(folder: Path) -> None:
    """Make the run's shared memory, which contains requests, readable by this user only."""
    # The Python backend ignores the umask.
    for region in SHARED_MEMORY.glob(f"{shared_memory_prefix(folder)}*"):
        region.chmod(0o600)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes of the run's server and models, even if their parents have ended."""
    prefix = shared_memory_prefix(folder)
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        program, *arguments = process.info["cmdline"] or [""]
        if Path(program).name in PROGRAMS and any(prefix in argument for argument in arguments):
            processes.append(process)
    return processes


@contextmanager
def run_folder(root: Path | None = None) -> Iterator[Path]:
    """Remove what dead runs have left behind, and yield a new locked folder, which is removed too.

    Raises ServerError if the folder of all runs cannot be created or other users can write to it.
    """
    root = root or root_of_runs()
    _make_private(root)
    # The lock of the root keeps other runs from removing the folder before it is locked.
    with _locked(root / "lock"):
        _clear_dead(root)
        folder = root / secrets.token_hex(8)
        folder.mkdir()
        lock = _try_lock(folder / "lock")
    assert lock is not None, folder
    with lock:
        try:
            yield folder
        finally:
            with _locked(root / "lock"):
                shutil.rmtree(folder, ignore_errors=True)


def clear_dead_runs(root: Path) -> None:
    """Remove everything that dead runs in this folder of runs have left behind."""
    with _locked(root / "lock"):
        _clear_dead(root)


def _clear_dead(root: Path) -> None:
    for folder in root.iterdir():
        if TOKEN.fullmatch(folder.name):
            lock = _try_lock(folder / "lock")
            if lock is not None:
                with lock:
                    end(processes_of(folder), grace_seconds=0)
                    release_shared_memory(folder)
                    shutil.rmtree(folder, ignore_errors=True)


def _make_private(root: Path) -> None:
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.lstat()
    except OSError as error:
        raise ServerError(
            f"cannot create {root} ({error.strerror}); set TMPDIR to a folder for temporary files"
        ) from None
    if root.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ServerError(
            f"other users can write to {root}, or it is not a folder; remove it, or set TMPDIR to"
            " another folder for temporary files"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _try_lock(path: Path) -> IO[str] | None:
    """Return the file, locked until it is closed; None if another process has locked it."""
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _is_owned(path: Path) -> bool:
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # The run has just ended.
        return False
    return False
