"""A model repository of one's own: a copy of ours to mount, change and serve anywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from vlora.errors import InvalidArgument
from vlora.paths import model_repository

LEFT_BEHIND = shutil.ignore_patterns("__pycache__", "*.pyc")


def write_repository(folder: Path, model: Path | None = None, adapters: Path | None = None) -> Path:
    """Copies the model repository to `folder`, which may exist but must be empty; returns it.

    model, adapters: what its `model.json` names, as given (a container's paths need not exist
    here); by default the demo's, as absolute paths. Raises InvalidArgument where `folder` holds
    anything or is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{folder} is a file; name a folder, new or empty")
    if folder.is_dir() and any(folder.iterdir()):
        raise InvalidArgument(f"{folder} is not empty; name a new folder, or empty this one")
    source = model_repository()
    shutil.copytree(source, folder, ignore=LEFT_BEHIND, dirs_exist_ok=True)
    original = source / "lmm" / "1" / "model.json"
    options = json.loads(original.read_text())
    for key, given in (("model", model), ("adapters", adapters)):
        options[key] = str(given or (original.parent / options[key]).resolve())
    (folder / "lmm" / "1" / "model.json").write_text(json.dumps(options, indent=2) + "\n")
    return folder
