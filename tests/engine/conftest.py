"""The engine of these tests, on one thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vlora.config import Options
from vlora.engine.engine import Engine


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def engine(checkpoint: Path, adapters_dir: Path) -> Engine:
    return Engine(Options(model=checkpoint, adapters=adapters_dir, max_num_seqs=4))
