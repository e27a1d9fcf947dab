"""Load a `model.json` and print, as JSON, what a server would serve, or why it would not start.

Run with the environment of `ASCII`, in which the interpreter decodes file names as ASCII, as the
one inside Triton does.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import torch

from vlora.adapters.catalog import FolderFinder
from vlora.config import load_adapter_names, load_options
from vlora.device.cuda import open_device
from vlora.engine.loop import EngineLoop
from vlora.errors import InvalidArgument, NotFound
from vlora.file_names import to_path
from vlora.vision.encoder import open_encoder
from vlora.vision.prompts import ChatTemplate

ASCII = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def describe(version: str) -> dict[str, Any]:
    """Return the adapters that are served, and the error of each other one by its name."""
    # Triton passes its paths as text.
    folder = to_path(version)
    options = load_options(folder / "model.json")
    names = load_adapter_names(folder / "multi_lora.json")
    loop = EngineLoop.from_options(options, names)
    try:
        ChatTemplate.from_checkpoint(options.model)
        open_encoder(options.model, 1, torch.float32, open_device(options.device, 0.1))
        table = loop.adapters.table
        return {
            "encoding": sys.getfilesystemencoding(),
            "served": table.names,
            "found": sorted(FolderFinder(options.adapters, names)()),
            "broken": {name: error.message for name, error in table.broken.items()},
        }
    finally:
        loop.shutdown(0)


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr)
    try:
        print(json.dumps(describe(json.loads(sys.argv[1]))))
    except (InvalidArgument, NotFound) as error:
        print(json.dumps({"refused": error.message}))
