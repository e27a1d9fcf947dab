"""Where the files beside the code are: in the source tree, or inside an installed package.

A wheel carries the model repository and the demo's checkpoint and adapters under `vlora/_data`, in
the source tree's own layout, so that relative paths in `model.json` mean the same in both.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
SOURCE_TREE = PACKAGE.parents[1]
INSTALLED = PACKAGE / "_data"


def in_source_tree() -> bool:
    """Whether this package runs from a source tree, a pip install in editable mode included."""
    return (SOURCE_TREE / "model_repository").is_dir() and (SOURCE_TREE / "setup.py").is_file()


def root() -> Path:
    """The folder that holds `model_repository/` and `tools/demo/`."""
    return SOURCE_TREE if in_source_tree() else INSTALLED


def model_repository() -> Path:
    """The repository that `vlora serve` serves."""
    return root() / "model_repository"
