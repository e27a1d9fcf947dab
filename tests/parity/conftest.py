"""Fixtures of the parity tests: adapters, the oracle, its cases and the tally of near-ties."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import FAMILIES
from tests.support.families import OracleFamily, make_family
from tests.support.make_adapters import AdapterSpec, make_adapters
from tests.support.oracle import Oracle
from tests.support.questions import Case, make_cases
from tests.support.schedules import Tally

LM_HEAD = AdapterSpec("lm-head-r32", rank=32, targets=("q_proj", "down_proj", "lm_head"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one torch thread: threads that wait for a busy core would make the tests ten times as
    slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def parity_adapters(
    checkpoint: Path, adapters_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a folder with the session's adapters and one that also targets the LM head."""
    folder = tmp_path_factory.mktemp("parity") / "adapters"
    shutil.copytree(adapters_dir, folder)
    with pytest.warns(UserWarning, match="save_embedding_layers"):
        return make_adapters(checkpoint, folder, (LM_HEAD,), seed=99)


@pytest.fixture(scope="session")
def oracle(checkpoint: Path, parity_adapters: Path) -> Oracle:
    return Oracle(checkpoint, parity_adapters)


@pytest.fixture(scope="session")
def cases(oracle: Oracle, parity_adapters: Path) -> list[Case]:
    names = sorted(path.name for path in parity_adapters.iterdir())
    return make_cases(oracle, names, heads={"head-r8"})


@pytest.fixture(scope="session")
def tally() -> Iterator[Tally]:
    """Yield a counter of near-ties.

    At the end of the session, at most 0.1 % of all tokens may be near-ties.
    """
    tally = Tally()
    yield tally
    print(f"\nparity: {tally.tokens} tokens, {tally.ties} near-ties")
    assert tally.ties <= max(1, tally.tokens // 1000), tally


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> OracleFamily:
    """Return a vision family with two adapters, which a module's tests may add to."""
    return make_family(request.param, checkpoint, tmp_path_factory.mktemp(request.param))
