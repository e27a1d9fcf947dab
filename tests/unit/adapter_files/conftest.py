"""Fixtures of the tests that read adapter folders: a small adapter and the shape of its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.small_adapter import small_shape, write_small_adapter
from vlora.adapters.model_shape import ModelShape


@pytest.fixture
def model() -> ModelShape:
    return small_shape()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_small_adapter(tmp_path / "adapter")
