"""What the lines of Triton's log tell a user: what went wrong, and which adapters do not load."""

from __future__ import annotations

import re

STACK = "\\n\\nAt:"
"""Where the Python stack begins in a line of Triton's log."""

TABLE = ("+", "|")
"""How the lines of the tables begin that Triton draws of its options and models."""

NOISE = (
    "CudaDriverHelper",
    "unable to create stream",
    "Failed to initialize NVML",
    "pinned",
    "DCGM",
)
"""In the log of a server that is well, but has no GPU."""

_INFORMATION = re.compile(r"I\d{4} \d\d:\d\d:")
_BROKEN = re.compile(r"^W\d{4} .*\] \"\[lmm\] adapter '(.*?)': ")


def why_not_started(log: str, lines: int = 12) -> str:
    """Models that did not load, else errors, else the log's end."""
    text = log.splitlines()
    unloaded = [line.split(STACK)[0] for line in text if "failed to load '" in line]
    errors = [line for line in text if line.startswith("E") or "error:" in line.lower()]
    said = [line for line in text if not line.startswith(TABLE)]
    return "\n".join((unloaded or _telling(errors) or said)[-lines:])


def why_it_went_down(log_since_ready: str, lines: int = 12) -> str:
    """The end of what was said since it was ready, without information; "" where nothing was."""
    said = [line for line in log_since_ready.splitlines() if not _INFORMATION.match(line)]
    return "\n".join(_telling(said)[-lines:])


def broken_adapters(log: str) -> list[str]:
    """Names of those that were found not to load, in order."""
    found = (_BROKEN.match(line) for line in log.splitlines())
    return list(dict.fromkeys(match[1] for match in found if match))


def _telling(lines: list[str]) -> list[str]:
    return [line for line in lines if line.strip() and not any(noise in line for noise in NOISE)]
