"""Fixtures of the adapter tests: six small adapters, and stores over them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapter_store import Harness, small_model, write_adapter


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for index in range(6):
        write_adapter(tmp_path / f"a{index}", index)
    return tmp_path


@pytest.fixture
def make_harness(root: Path) -> Iterator[Any]:
    harnesses: list[Harness] = []

    def make(pages: int, host: int | None = None, pinned: tuple[str, ...] = ()) -> Harness:
        harnesses.append(Harness(small_model(), root, pages, host, pinned))
        return harnesses[-1]

    yield make
    for harness in harnesses:
        harness.store.close()
