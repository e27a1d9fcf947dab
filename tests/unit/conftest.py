"""Fixtures for all unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    """Restore torch's number of threads, which a test may have changed."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
