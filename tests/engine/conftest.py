"""Fixtures of the engine tests: an engine on one thread, and its loop."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.engine_client import paced
from tests.support.many_adapters import burst, engine_of, replace_weights, run_in_order
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.loop import EngineLoop


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def engine(checkpoint: Path, adapters_dir: Path) -> Engine:
    return paced(Engine(Options(model=checkpoint, adapters=adapters_dir, max_num_seqs=4)))


@pytest.fixture
def loop(engine: Engine) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine, max_waiting=6)
    yield loop
    loop.shutdown(drain_seconds=0.0)
    engine.check_integrity()
    assert engine.pool.kv == 0


@pytest.fixture(scope="module")
def twelve(adapters_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with twelve adapters of different weights and ranks."""
    root = tmp_path_factory.mktemp("adapters")
    for index in range(12):
        kind = ("attention-r4", "feed-forward-r16", "all-r8")[index % 3]
        shutil.copytree(adapters_dir / kind, root / f"a{index:02}")
        replace_weights(root / f"a{index:02}", index)
    return root


@pytest.fixture
def root(twelve: Path, tmp_path: Path) -> Path:
    shutil.copytree(twelve, tmp_path / "root")
    return tmp_path / "root"


@pytest.fixture(scope="module")
def burst_tokens(checkpoint: Path, twelve: Path) -> dict[str, tuple[int, ...]]:
    """Tokens of the burst with all adapters resident and each request run alone."""
    torch.set_num_threads(1)
    engine = engine_of(checkpoint, twelve, enable_prefix_caching=False)
    assert len(engine.adapters.resident) == 12
    return {k: o.token_ids for r in burst(engine) for k, o in run_in_order(engine, r).items()}
