"""Paths of the model repository and the demo, in the source tree or in an installed package.

A wheel contains the model repository, Envoy's configuration and the demo's checkpoint, adapters and
samples in `vlora/_data`, in the layout of the source tree. So the relative paths in `model.json`
are valid in the source tree and in a wheel.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
SOURCE_TREE = PACKAGE.parents[1]
INSTALLED = PACKAGE / "_data"


def in_source_tree() -> bool:
    """Return whether the package runs from a source tree, as after `pip install --editable`."""
    return (SOURCE_TREE / "model_repository").is_dir() and (SOURCE_TREE / "setup.py").is_file()


def root() -> Path:
    """Return the folder that contains `model_repository/` and `tools/demo/`."""
    return SOURCE_TREE if in_source_tree() else INSTALLED


def model_repository() -> Path:
    """Return the model repository that `vlora serve` serves by default."""
    return root() / "model_repository"
