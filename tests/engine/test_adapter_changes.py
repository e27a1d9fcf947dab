"""Tests of adapters whose folders change, vanish or fail to load while requests need them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine_client import Collector, request
from tests.support.many_adapters import (
    WEIGHTS,
    burst,
    engine_of,
    finish,
    replace_weights,
    run_in_order,
    update,
)
from tests.support.polling import until
from vlora.adapters import catalog, tensors
from vlora.engine.loop import EngineLoop
from vlora.errors import InvalidArgument, NotFound


def test_a_running_request_ends_with_the_adapter_version_it_started_with(
    checkpoint: Path, root: Path, burst_tokens: dict[str, tuple[int, ...]]
) -> None:
    engine = engine_of(checkpoint, root)
    asked = request("old", adapter="a00", prompt="<s>what is it, 0?", max_tokens=6)
    engine.add(engine.prepare(asked), 0.0)
    before = engine.step()
    replace_weights(root / "a00", 99)
    update(engine, root)
    engine.add(
        engine.prepare(request("new", adapter="a00", prompt=asked.prompt, max_tokens=6)), 1.0
    )
    rest = finish(engine)
    assert (*before[0].token_ids, *rest["old"].token_ids) == burst_tokens["r0"]
    assert rest["new"].token_ids != burst_tokens["r0"]
    assert rest["new"].adapter_digest != rest["old"].adapter_digest
    fresh = engine_of(checkpoint, root, enable_prefix_caching=False)
    assert run_in_order(fresh, asked)["old"].token_ids == rest["new"].token_ids


def test_a_removed_adapter_ends_waiting_requests_but_not_running_ones(
    checkpoint: Path, root: Path
) -> None:
    engine = engine_of(checkpoint, root, max_num_seqs=1)
    for index, name in enumerate(("runs", "waits")):
        engine.add(engine.prepare(request(name, adapter="a01")), float(index))
    engine.step()
    engine.adapters.folders.update({})
    rest = finish(engine)
    assert rest["runs"].finish_reason == "length"
    assert isinstance(rest["waits"].error, NotFound)
    with pytest.raises(NotFound):
        engine.prepare(request("r", adapter="a01"))


@pytest.mark.parametrize("fault", ["truncated", "flipped", "vanished", "replaced"])
def test_a_file_that_became_invalid_is_an_error_of_its_requests_only(
    checkpoint: Path, root: Path, burst_tokens: dict[str, tuple[int, ...]], fault: str
) -> None:
    engine = engine_of(checkpoint, root, adapter_host_bytes=1)
    assert not engine.adapters.resident
    file = root / "a00" / WEIGHTS
    content = file.read_bytes()
    if fault == "truncated":
        file.write_bytes(content[:-100])
    elif fault == "flipped":
        file.write_bytes(content[:9] + b"\xff" + content[10:])
    elif fault == "vanished":
        shutil.rmtree(root / "a00")
    else:
        replace_weights(root / "a00", 5)
    outputs = run_in_order(engine, *burst(engine)[:4])
    assert isinstance(outputs["r0"].error, InvalidArgument)
    assert "adapter 'a00'" in str(outputs["r0"].error)
    assert [outputs[f"r{i}"].token_ids for i in (1, 2, 3)] == [
        burst_tokens[f"r{i}"] for i in (1, 2, 3)
    ]
    if fault != "vanished":
        file.write_bytes(content)
        update(engine, root)
        assert run_in_order(engine, burst(engine)[0])["r0"].token_ids == burst_tokens["r0"]


def open_paths() -> list[str]:
    """Return the paths of this process's open files."""
    paths = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # Other threads close files meanwhile.
            paths.append(str(link.readlink()))
    return paths


@pytest.mark.parametrize("stage", ["open", "first read", "second read", "stamp", "memory"])
def test_a_load_that_fails_at_any_stage_is_an_error_of_its_request_and_leaks_no_page(
    checkpoint: Path,
    twelve: Path,
    burst_tokens: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
) -> None:
    engine = engine_of(checkpoint, twelve, adapter_host_bytes=1)
    opened, reads = {}, []
    real_open, real_read, stamps = os.open, os.preadv, catalog.stamps_of

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def open_file(path: Any, flags: int, *more: Any) -> int:
        is_a00 = Path(path).parent.name == "a00"
        if is_a00:
            reads.clear()
        if is_a00 and stage == "open":
            fail()
        file = real_open(path, flags, *more)
        opened[file] = is_a00
        return file

    def read(file: int, parts: list[memoryview], offset: int) -> int:
        if opened[file]:
            reads.append(offset)
            if stage == ("first read" if len(reads) == 1 else "second read"):
                fail()
            parts = [parts[0][:100]] if len(reads) == 1 else parts
        return real_read(file, parts, offset)

    def stamps_of(paths: list[bytes]) -> list[bytes]:
        if stage == "stamp" and paths[0].endswith(b"a00"):
            return [b"!%d" % errno.EIO]  # The stamp of a folder that cannot be read.
        return stamps(paths)

    def aminmax(values: Any) -> Any:
        if stage == "memory" and reads:
            reads.clear()
            raise MemoryError
        return real_aminmax(values)

    real_aminmax = torch.aminmax
    engine.adapters.folders.clock = count(step=60).__next__  # Each attempt is due at once.
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_file)
        patch.setattr(os, "preadv", read)
        patch.setattr(catalog, "stamps_of", stamps_of)
        patch.setattr(tensors.torch, "aminmax", aminmax)
        outputs = run_in_order(engine, *burst(engine)[:3])
    assert not [path for path in open_paths() if "/a00/" in path], "its files are closed"
    assert isinstance(outputs["r0"].error, InvalidArgument)
    assert "adapter 'a00'" in str(outputs["r0"].error)
    assert [outputs[f"r{i}"].token_ids for i in (1, 2)] == [burst_tokens[f"r{i}"] for i in (1, 2)]
    engine.adapters.folders.update({})  # The folders disappear and come back.
    update(engine, twelve)
    assert run_in_order(engine, burst(engine)[0])["r0"].token_ids == burst_tokens["r0"]
    assert engine.pool.free + engine.pool.cached + engine.pool.adapter == engine.pool.total


@pytest.fixture
def serving(checkpoint: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineLoop]:
    monkeypatch.setattr(catalog, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(catalog, "SETTLED_SECONDS", 0.05)
    loop = EngineLoop(engine_of(checkpoint, root, adapter_host_bytes=400_000), max_waiting=100)
    yield loop
    loop.shutdown(5.0)


def test_folders_can_be_added_changed_and_removed_while_serving(
    serving: EngineLoop, root: Path, tmp_path: Path, adapters_dir: Path
) -> None:
    sink = Collector()
    # A symbolic link, as in a hub's cache, whose target then changes.
    for index, name in enumerate(("one", "other")):
        shutil.copytree(adapters_dir / "attention-r4", tmp_path / name)
        replace_weights(tmp_path / name, 70 + index)
    (root / "linked").symlink_to(tmp_path / "one")
    until(lambda: "linked" in serving.adapters.names())
    serving.submit(request("first", adapter="linked"), sink)
    first = sink.last("first").adapter_digest
    (root / "elsewhere").symlink_to(tmp_path / "other")
    (root / "elsewhere").rename(root / "linked")
    until(lambda: serving.adapters.info("linked").digest not in ("", first))
    serving.submit(request("second", adapter="linked"), sink)
    assert sink.last("second").adapter_digest == serving.adapters.info("linked").digest
    (root / "linked").unlink()
    until(lambda: "linked" not in serving.adapters.names())
    with pytest.raises(NotFound):
        serving.submit(request("third", adapter="linked"), sink)


@pytest.mark.alone
def test_a_changed_folder_is_served_within_five_seconds(checkpoint: Path, root: Path) -> None:
    loop = EngineLoop(engine_of(checkpoint, root), max_waiting=10)
    try:
        before = loop.adapters.info("a00").digest
        replace_weights(root / "a00", 42)
        shutil.copytree(root / "a01", root / "new")
        until(lambda: "new" in loop.adapters.names(), seconds=5.0)
        until(lambda: loop.adapters.info("a00").digest not in ("", before), seconds=5.0)
    finally:
        loop.shutdown(5.0)


def test_a_request_that_waits_for_a_load_runs_after_it(serving: EngineLoop) -> None:
    sink = Collector()
    names = [name for name in serving.adapters.names() if not serving.adapters.handle(name).adapter]
    assert names
    for name in names:
        serving.submit(request(name, adapter=name), sink)
    assert {sink.last(name).finish_reason for name in names} == {"length"}
