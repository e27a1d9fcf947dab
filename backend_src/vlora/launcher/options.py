"""Options of a server, as its starters give them: the command line, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlora.launcher.assembly import ServerError
from vlora.launcher.exposure import LOOPBACK
from vlora.paths import model_repository

GRACE_SECONDS = 30.0
"""Default of the seconds that running requests get to finish when the server stops."""

STANDARD_OUTPUT = Path("-")
"""Value of `ServerOptions.log` for no file."""


def default_repository() -> Path:
    """Return the repository of the source tree, or of the installed package."""
    folder = model_repository()
    if not folder.is_dir():
        raise ServerError(f"no model repository at {folder}; reinstall vlora")
    return folder


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server. A port of 0 means a free one.

    host: IP address on which the server listens.
    allow_shared_memory: whether clients may register shared memory.
    model, adapters: folders that override those of `model.json`. A model alone has no adapters.
    model_json: keys that replace those of `model.json`, in a copy of the repository.
    multi_lora: entries that are added to `multi_lora.json`, in a copy of the repository.
    environment: variables that are added to the server's environment.
    log: a file, `STANDARD_OUTPUT`, or None for a file of the run, which ends with it.
    keep_log: with `log` None, write to the file `kept_log(http_port)` instead.
    start_seconds: seconds within which the server must be ready; None: as long as it lives.
    grace_seconds: seconds that running requests get to finish when the server stops.
    triton_arguments: additional arguments of tritonserver.
    """

    repository: Path = field(default_factory=default_repository)
    host: str = LOOPBACK
    allow_shared_memory: bool = False
    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0
    model: Path | None = None
    adapters: Path | None = None
    model_json: Mapping[str, Any] = field(default_factory=dict)
    multi_lora: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None
    keep_log: bool = False
    start_seconds: float | None = None
    grace_seconds: float = GRACE_SECONDS
    triton_arguments: tuple[str, ...] = ()
