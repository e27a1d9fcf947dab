"""The model repository that a server serves, its copies, and the options of a server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlora.config import load_adapter_names, read_keys, replace_keys, resolve_folders
from vlora.errors import InvalidArgument, ServerError
from vlora.net import LOOPBACK
from vlora.paths import model_repository

IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")
GRACE_SECONDS = 30.0
STANDARD_OUTPUT = Path("-")  # Value of `ServerOptions.log`.


def write_repository(folder: Path, model: Path | None = None, adapters: Path | None = None) -> Path:
    """Copy the model repository to `folder`, and return `folder`.

    model, adapters: paths for the copy's `model.json`, by default those of the demo. They need not
        exist, since a container may use the copy. With `model` alone, the copy has no adapters.

    Raises InvalidArgument unless `folder` is new or empty.
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{folder} is a file; choose a new or empty folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise InvalidArgument(f"{folder} is not empty; choose a new or empty folder")
    source = model_repository()
    shutil.copytree(source, folder, ignore=IGNORED, dirs_exist_ok=True)
    given = {key: str(path) for key, path in (("model", model), ("adapters", adapters)) if path}
    options = _options_with(source, given)
    (folder / "lmm" / "1" / "model.json").write_text(json.dumps(options, indent=2) + "\n")
    return folder


def copy_with_overrides(
    source: Path, copy: Path, model_json: Mapping[str, Any], multi_lora: Mapping[str, str]
) -> None:
    """Copy a repository to a new folder, with these overrides and absolute paths."""
    shutil.copytree(source, copy, ignore=IGNORED)
    version = copy / "lmm" / "1"
    (version / "model.json").write_text(json.dumps(_options_with(source, model_json)))
    names = load_adapter_names(version / "multi_lora.json") | dict(multi_lora)
    (version / "multi_lora.json").write_text(json.dumps(names))


def default_repository() -> Path:
    """Return the folder of vlora's model repository. Raises ServerError if it does not exist."""
    folder = model_repository()
    if not folder.is_dir():
        raise ServerError(f"no model repository at {folder}; reinstall vlora")
    return folder


def _options_with(repository: Path, replacing: Mapping[str, Any]) -> dict[str, Any]:
    original = repository / "lmm" / "1" / "model.json"
    return replace_keys(resolve_folders(read_keys(original), original.parent), replacing)


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server. A port of 0 means any free port.

    model, adapters: folders that override those in `model.json`. With `model` alone, there are no
        adapters.
    model_json, multi_lora: keys that replace those of `model.json`, and entries that are added to
        `multi_lora.json`, in a copy of the repository.
    log: file for the log, or STANDARD_OUTPUT. None: a file that is removed at the end of the run.
    keep_log: whether the file that `log` = None stands for is `kept_log(http_port)` and is kept.
    start_seconds: limit until the server is ready; None for no limit.
    grace_seconds: what running requests get to finish when the server stops.
    hand_over: whether a server that stops refuses requests which have not begun.
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
    hand_over: bool = False
    triton_arguments: tuple[str, ...] = ()

    @property
    def models(self) -> list[str]:
        """Names of all models in the repository, including those without a process."""
        return sorted(config.parent.name for config in self.repository.glob("*/config.pbtxt"))
