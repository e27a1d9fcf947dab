"""The command and environment of Python processes, which must import nothing from a working folder.

Python looks for modules in the working folder first, so one with a `numpy.py` could run code as the
server's user. Folders that the user names in PYTHONPATH are used as they are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as a program, like `python -m`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def python_environment(path: Iterable[str] | None = None) -> dict[str, str]:
    """Return this process's environment for a Python process in any working folder.

    path: folders with modules; those of PYTHONPATH by default.
    """
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep) if path is None else path
    # Python reads an empty entry of PYTHONPATH as the working folder.
    absolute = os.pathsep.join(str(Path(folder).absolute()) for folder in folders if folder)
    return {**os.environ, "PYTHONPATH": absolute, "PYTHONSAFEPATH": "1"}
