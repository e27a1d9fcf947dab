"""The folder of one run of a server, and the clearing of what runs that were killed have left.

A run owns `<temporary>/vlora-<user id>/<token>/` while it holds the lock of the file `lock` in it;
the kernel takes that away when the holder ends, however it ends. The token is random, and all of
a run's shared memory is named after it (`/dev/shm/vlora_<token>_…`), as the command lines of its
server and its models tell. That is how what a dead run left is known to be its own.
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

from vlora.launcher.assembly import ServerError
from vlora.launcher.processes import end

RUN_VARIABLE = "VLORA_RUN"
"""Environment variable that names the folder to the server and its models."""

PROGRAMS = ("tritonserver", "triton_python_backend_stub")
SHARED_MEMORY = Path("/dev/shm")
TOKEN = re.compile(r"[0-9a-f]{16}")


def root_of_runs() -> Path:
    """The folder of all runs of this user."""
    return Path(tempfile.gettempdir()) / f"vlora-{os.getuid()}"


def starting_file(folder: Path, grpc_port: int) -> Path:
    """There while the run's server starts: Triton opens no port before its models are loaded."""
    return folder / f"starting-{grpc_port}"


def is_starting(grpc_port: int) -> bool:
    """Whether a living run of this user, on this machine, is starting a server on that port."""
    marks = root_of_runs().glob(starting_file(Path("*"), grpc_port).as_posix())
    return any(_is_owned(mark.parent / "lock") for mark in marks)


def shared_memory_prefix(folder: Path) -> str:
    """How the names of the run's shared memory begin."""
    return f"vlora_{folder.name}_"


def release_shared_memory(folder: Path) -> int:
    """Unlink the run's shared memory, once nothing uses it any more; how many files that were."""
    regions = list(SHARED_MEMORY.glob(f"{shared_memory_prefix(folder)}*"))
    for region in regions:
        region.unlink(missing_ok=True)
    return len(regions)


def processes_of(folder: Path) -> list[psutil.Process]:
    """The run's server and models, whoever their parent is by now."""
    prefix = shared_memory_prefix(folder)
    found = []
    for process in psutil.process_iter(["cmdline"]):
        program, *arguments = process.info["cmdline"] or [""]
        if Path(program).name in PROGRAMS and any(prefix in each for each in arguments):
            found.append(process)
    return found


@contextmanager
def run_folder(root: Path | None = None) -> Iterator[Path]:
    """A new folder, owned and locked until the end of the block and gone then.

    What dead runs of the same user left is cleared first. Raises ServerError where the folder of
    all runs, `root`, is not ours alone.
    """
    root = root or root_of_runs()
    _make_private(root)
    # Under the lock of all runs, so that nobody clears a folder not locked yet, or half gone.
    with _locked(root / "lock"):
        _clear_dead(root)
        folder = root / secrets.token_hex(8)
        folder.mkdir()
        lock = _take(folder / "lock")
    assert lock is not None, folder
    with lock:
        try:
            yield folder
        finally:
            with _locked(root / "lock"):
                shutil.rmtree(folder, ignore_errors=True)


def _clear_dead(root: Path) -> None:
    for folder in root.iterdir():
        if TOKEN.fullmatch(folder.name):
            lock = _take(folder / "lock")
            if lock is not None:
                with lock:
                    end(processes_of(folder), grace_seconds=0)
                    release_shared_memory(folder)
                    shutil.rmtree(folder, ignore_errors=True)


def _make_private(root: Path) -> None:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.lstat()
    if root.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ServerError(
            f"{root} must be a folder that only you can write to; remove it, or name another place"
            " for temporary files with TMPDIR"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _take(path: Path) -> IO[str] | None:
    """The file, locked until it is closed; None while another process has it."""
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _is_owned(path: Path) -> bool:
    """Whether another process has the lock of this file."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # the run has just ended
        return False
    return False
