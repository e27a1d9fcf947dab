"""Fixtures for all unit tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.atmm_problems import emulated, operator

__all__ = ["emulated", "operator"]
"""Fixtures of several folders."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread_per_worker() -> None:
    """Use one torch thread in each worker of `make test WORKERS=2`: threads that wait for a busy
    core would use several times the CPU time. Tests of several threads set their number."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


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
