"""Fixtures of the engine tests: an engine on one thread, and its loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.loop import EngineLoop


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def engine(checkpoint: Path, adapters_dir: Path) -> Engine:
    return Engine(Options(model=checkpoint, adapters=adapters_dir, max_num_seqs=4))


@pytest.fixture
def loop(engine: Engine) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine, max_waiting=6)
    yield loop
    loop.shutdown(drain_seconds=0.0)
    engine.check_integrity()
    assert engine.pool.kv == 0
