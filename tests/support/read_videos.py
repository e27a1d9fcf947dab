"""`python -m tests.support.read_videos`: reads video files with limits of memory and time.

Standard input has the length of each file in 4 bytes, then the file. For each file, a letter is
written: `f` for frames, `i` for InvalidArgument, `m` for MemoryError, and `?` for anything wrong.
"""

from __future__ import annotations

import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from vlora.errors import InvalidArgument
from vlora.vision.video import plan_video, read_frames

MEMORY, SECONDS = 2**30, 60


def outcomes(data: Sequence[bytes]) -> str:
    """Return the letters of files, which a new process reads. It must not end before the last."""
    sent = b"".join(struct.pack(">I", len(one)) + one for one in data)
    command = [sys.executable, "-m", __name__]
    letters = subprocess.run(command, input=sent, stdout=subprocess.PIPE, check=True).stdout
    return letters.decode()


def _outcome(data: bytes) -> str:
    try:
        plan = plan_video(data, "video 0", len(data))
        plan = plan.with_indices(range(min(plan.total, 20)))
        shapes = [rgb.shape for rgb in read_frames(data, "video 0", plan)]
    except InvalidArgument as error:
        return "i" if str(error).startswith("video 0 ") else "?"
    except MemoryError:
        return "m"
    return "f" if shapes == [(plan.height, plan.width, 3)] * min(plan.total, 20) else "?"


def main() -> None:
    files = []
    while header := sys.stdin.buffer.read(4):
        files.append(sys.stdin.buffer.read(struct.unpack(">I", header)[0]))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    for data in files:
        print(_outcome(data), end="", flush=True)


if __name__ == "__main__":
    main()
