"""Tests of adapters that are replaced while requests wait for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from tests.support import many_adapters
from tests.support.engine_client import request
from tests.support.many_adapters import finish, update
from vlora.engine.engine import Engine
from vlora.errors import InvalidArgument, NotFound


@pytest.fixture
def root(tmp_path: Path, adapters_dir: Path) -> Path:
    """Folder with one small adapter, "x", which has a head."""
    put(tmp_path, adapters_dir, "attention-r4", head=True)
    return tmp_path


def put(root: Path, adapters_dir: Path, kind: str, *, head: bool = False) -> None:
    """Replace adapter "x" by one of this kind. head: whether to add the head of "head-r8"."""
    shutil.rmtree(root / "x", ignore_errors=True)
    shutil.copytree(adapters_dir / kind, root / "x")
    if head:
        shutil.copy(adapters_dir / "head-r8" / "head.safetensors", root / "x")
        declared = {"head": {"labels": ["cat", "dog", "bird"], "tasks": ["classify"]}}
        (root / "x" / "vlora.json").write_text(json.dumps(declared))


@pytest.fixture
def engine_of(checkpoint: Path, root: Path) -> Callable[..., Engine]:
    """Return a function that makes an engine with one slot, which a request of the base model has
    taken."""

    def make(**more: Any) -> Engine:
        engine = many_adapters.engine_of(checkpoint, root, max_num_seqs=1, **more)
        engine.add(engine.prepare(request("runs", max_tokens=8)), 0.0)
        engine.step()
        return engine

    return make


@pytest.fixture
def large(checkpoint: Path, adapters_dir: Path) -> int:
    """Return the number of pages of the adapter "all-r8"."""
    adapters = many_adapters.engine_of(checkpoint, adapters_dir).adapters
    return adapters.tiers.pages_of(adapters.handle("all-r8"))


def test_a_waiting_request_is_refused_if_its_adapter_outgrows_the_pool(
    engine_of: Callable[..., Engine], adapters_dir: Path, root: Path, large: int
) -> None:
    engine = engine_of(kv_cache_tokens=16 * large, adapter_pool_bytes=0)
    engine.add(engine.prepare(request("waits", adapter="x")), 1.0)
    put(root, adapters_dir, "all-r8")
    update(engine, root)
    last = finish(engine)
    assert last["runs"].finish_reason == "length"
    assert isinstance(last["waits"].error, InvalidArgument)
    assert f"needs {large} pages" in str(last["waits"].error)


def test_the_limit_of_an_answer_follows_the_version_of_the_adapter(
    engine_of: Callable[..., Engine], adapters_dir: Path, root: Path, large: int
) -> None:
    engine = engine_of(kv_cache_tokens=16 * (large + 3), adapter_pool_bytes=0)
    small = engine.adapters.tiers.pages_of(engine.adapters.handle("x"))
    context = min(engine.max_model_len, 16 * (large + 3 - small))
    limited = engine.prepare(request("limited", adapter="x", max_tokens=context - 20))
    unlimited = engine.prepare(request("unlimited", None, adapter="x"))  # type: ignore[arg-type]
    engine.add(limited, 1.0)
    engine.add(unlimited, 2.0)
    put(root, adapters_dir, "all-r8")
    update(engine, root)
    last = finish(engine)
    assert "exceeds the context of 48" in str(last["limited"].error)
    assert last["unlimited"].finish_reason == "length"
    tokens = last["unlimited"].num_input_tokens + last["unlimited"].num_output_tokens
    assert tokens == 48


def test_a_waiting_request_for_a_head_is_refused_if_the_new_version_has_none(
    engine_of: Callable[..., Engine], adapters_dir: Path, root: Path
) -> None:
    engine = engine_of()
    engine.add(engine.prepare(request("scored", adapter="x", use_head=True)), 1.0)
    engine.add(engine.prepare(request("said", adapter="x")), 2.0)
    put(root, adapters_dir, "attention-r4")
    update(engine, root)
    last = finish(engine)
    assert "has no vision task head" in str(last["scored"].error)
    assert isinstance(last["scored"].error, InvalidArgument)
    assert (last["runs"].finish_reason, last["said"].finish_reason) == ("length", "length")


@pytest.mark.parametrize("removed", [False, True])
def test_a_request_checked_before_a_change_and_queued_after_it_sees_the_change(
    engine_of: Callable[..., Engine], adapters_dir: Path, root: Path, removed: bool
) -> None:
    engine = engine_of(adapter_host_bytes=1)
    late = engine.prepare(request("late", adapter="x"))
    put(root, adapters_dir, "all-r8")
    if removed:
        shutil.rmtree(root / "x")
    update(engine, root)
    engine.step()
    engine.add(late, 1.0)
    last = finish(engine)
    if removed:
        assert isinstance(last["late"].error, NotFound)
    else:
        assert last["late"].error is None
        assert last["late"].adapter_digest == engine.adapters.info("x").digest


@pytest.mark.parametrize("view", ["slots.matrices", "folders.stamps", "table.broken"])
def test_a_view_of_the_names_does_not_change_while_another_thread_reads_it(
    checkpoint: Path, adapters_dir: Path, root: Path, view: str
) -> None:
    (root / "faulty").mkdir()
    (root / "faulty" / "README.md").touch()
    engine = many_adapters.engine_of(checkpoint, root)
    reading = iter(attrgetter(view)(engine.adapters))
    first = next(reading)
    (root / "faulty too").mkdir()
    put(root, adapters_dir, "all-r8")
    update(engine, root)
    assert first not in list(reading)
    assert len(attrgetter(view)(engine.adapters)) >= 2
