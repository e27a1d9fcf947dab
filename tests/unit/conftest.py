"""Fixtures for all unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.atmm_problems import emulated, operator

__all__ = ["emulated", "operator"]
"""Fixtures of several folders."""


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    """Restore torch's number of threads, which a test may have changed."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Any) -> Any:
    from vlora.model.tokenizer import Vocabulary

    return Vocabulary(tokenizer)
