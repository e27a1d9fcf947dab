"""For all unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _threads_put_back() -> Iterator[None]:
    """A test may set torch's number of threads; the next one has its own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
