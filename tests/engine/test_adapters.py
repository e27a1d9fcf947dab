"""Tests that loads, evictions and moves of adapters, and shared prefixes, do not change answers."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.baseline_policies.merge_only import MergeOnly
from tests.support.engine_client import Collector, request
from tests.support.polling import until
from vlora.config import Options
from vlora.engine import calibration, memory
from vlora.engine.engine import Engine
from vlora.engine.loop import EngineLoop
from vlora.engine.policies.unmerge_only import UnmergeOnly
from vlora.errors import InvalidArgument, NotFound
from vlora.lora import folders, weights_reader
from vlora.lora.weights_reader import WeightsReader
from vlora.request import ImageFeatures, Output, Request

WEIGHTS = "adapter_model.safetensors"


def replace_weights(folder: Path, seed: int) -> None:
    """Replace an adapter's weights by random ones of the same shapes, by an atomic rename."""
    torch.manual_seed(seed)
    weights = {k: torch.randn_like(v) * 0.3 for k, v in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / "new")
    (folder / "new").rename(folder / WEIGHTS)


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


def engine_of(checkpoint: Path, root: Path, **more: Any) -> Engine:
    return Engine(Options(model=checkpoint, adapters=root, max_num_seqs=8, **more))


def run(engine: Engine, *requests: Request, check: bool = True) -> dict[str, Output]:
    """Run requests; return the last output of each, with all its tokens."""
    for index, asked in enumerate(requests):
        engine.add(engine.prepare(asked), float(index))
    return finish(engine, check=check)


def finish(engine: Engine, *, check: bool = True) -> dict[str, Output]:
    """Step until the engine is idle, waiting for loads; return the last outputs by request id."""
    tokens: dict[str, list[int]] = defaultdict(list)
    last: dict[str, Output] = {}
    for _ in range(3000):
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            last[output.request_id] = output
        if engine.stalled:
            engine.adapters.finish()
        if check:
            engine.memory.check_integrity(engine.scheduler.running)
        if engine.idle:
            engine.adapters.finish()
            engine.adapters.check_integrity()
            engine.check_integrity()
            return {k: o._replace(token_ids=tuple(tokens[k])) for k, o in last.items()}
    raise AssertionError("not finished")


def burst(engine: Engine) -> list[Request]:
    """Return two requests of each adapter."""
    return [
        request(f"r{i}", adapter=name, prompt=f"<s>what is it, {i % 5}?", max_tokens=6)
        for i, name in enumerate(engine.adapters.names() * 2)
    ]


@pytest.fixture(scope="module")
def burst_tokens(checkpoint: Path, twelve: Path) -> dict[str, tuple[int, ...]]:
    """Tokens of the burst with all adapters resident and each request run alone."""
    torch.set_num_threads(1)
    engine = engine_of(checkpoint, twelve, enable_prefix_caching=False)
    assert len(engine.adapters.resident) == 12
    return {k: o.token_ids for r in burst(engine) for k, o in run(engine, r).items()}


@pytest.mark.parametrize("host_adapters", [2, 100])
def test_a_burst_over_more_adapters_than_fit_the_pool_is_answered(
    checkpoint: Path,
    twelve: Path,
    burst_tokens: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    host_adapters: int,
) -> None:
    adapter_bytes = 200_000
    engine = engine_of(
        checkpoint,
        twelve,
        adapter_pool_bytes=3 * adapter_bytes,
        adapter_host_bytes=host_adapters * adapter_bytes,
        kv_cache_tokens=1024,
        max_model_len=256,
    )
    readers: set[int] = set()
    read = WeightsReader.read

    def recording_read(*args: Any) -> Any:
        readers.add(threading.get_ident())
        return read(*args)

    monkeypatch.setattr(WeightsReader, "read", recording_read)
    outputs = run(engine, *burst(engine))
    assert {k: o.token_ids for k, o in outputs.items()} == burst_tokens
    assert threading.get_ident() not in readers, "a step read from disk"
    stats = engine.stats()
    assert stats.adapter_evictions > 0
    assert (stats.adapter_loads > 0) == (host_adapters == 2) == bool(readers)


def test_calibration_does_not_write_to_adapter_pages(
    checkpoint: Path,
    twelve: Path,
    burst_tokens: dict[str, tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibration, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(calibration, "ROWS", (1, 2))
    engine = engine_of(checkpoint, twelve)
    engine.calibrate()
    engine.check_integrity()
    outputs = run(engine, *burst(engine)[:3])
    assert {k: o.token_ids for k, o in outputs.items()} == {k: burst_tokens[k] for k in outputs}


def test_kv_pages_are_moved_to_make_space_for_an_adapter(
    checkpoint: Path, twelve: Path, burst_tokens: dict[str, tuple[int, ...]]
) -> None:
    engine = engine_of(checkpoint, twelve, block_size=4, kv_cache_tokens=400, adapter_pool_bytes=0)
    outputs = run(engine, *burst(engine))
    assert {k: o.token_ids for k, o in outputs.items()} == burst_tokens
    assert engine.stats().pages_moved > 0


def test_a_constantly_used_adapter_does_not_starve_another_one(
    checkpoint: Path, twelve: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PATIENCE_SECONDS", 0.0)
    engine = engine_of(
        checkpoint,
        twelve,
        adapter_pool_bytes=520_000,
        kv_cache_tokens=128,
        max_model_len=64,
    )
    cold_done = None
    for step in range(200):
        hot = request(f"hot{step}", adapter="a02", max_tokens=9)
        engine.add(engine.prepare(hot), float(step))
        if step == 5:
            cold = request("cold", adapter="a05", max_tokens=2)
            engine.add(engine.prepare(cold), float(step))
        for output in engine.step():
            if output.request_id == "cold" and output.finished:
                cold_done = step
        if engine.stalled:
            engine.adapters.finish()
        if cold_done is not None:
            break
    assert cold_done is not None
    assert engine.scheduler.waiting, "requests of the hot adapter keep arriving"


def test_an_adapter_that_does_not_fit_the_pool_is_refused_with_both_sizes(
    checkpoint: Path, twelve: Path
) -> None:
    engine = engine_of(checkpoint, twelve, kv_cache_tokens=64, adapter_pool_bytes=0)
    with pytest.raises(InvalidArgument, match=r"adapter 'a02' needs \d+ pages .* pool has 4"):
        engine.prepare(request("r", adapter="a02"))


def test_a_running_request_ends_with_the_adapter_version_it_started_with(
    checkpoint: Path, root: Path, burst_tokens: dict[str, tuple[int, ...]]
) -> None:
    engine = engine_of(checkpoint, root)
    asked = request("old", adapter="a00", prompt="<s>what is it, 0?", max_tokens=6)
    engine.add(engine.prepare(asked), 0.0)
    before = engine.step()
    replace_weights(root / "a00", 99)
    engine.adapters.update({p.name: (p, folders.stamp_of(p)) for p in sorted(root.iterdir())})
    engine.adapters.apply()
    engine.add(
        engine.prepare(request("new", adapter="a00", prompt=asked.prompt, max_tokens=6)), 1.0
    )
    rest = finish(engine)
    assert (*before[0].token_ids, *rest["old"].token_ids) == burst_tokens["r0"]
    assert rest["new"].token_ids != burst_tokens["r0"]
    assert rest["new"].adapter_digest != rest["old"].adapter_digest
    fresh = engine_of(checkpoint, root, enable_prefix_caching=False)
    assert run(fresh, asked)["old"].token_ids == rest["new"].token_ids


def test_a_removed_adapter_ends_waiting_requests_but_not_running_ones(
    checkpoint: Path, root: Path
) -> None:
    engine = Engine(Options(model=checkpoint, adapters=root, max_num_seqs=1))
    for index, name in enumerate(("runs", "waits")):
        engine.add(engine.prepare(request(name, adapter="a01")), float(index))
    engine.step()
    engine.adapters.update({})
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
    outputs = run(engine, *burst(engine)[:4])
    assert isinstance(outputs["r0"].error, InvalidArgument)
    assert "adapter 'a00'" in str(outputs["r0"].error)
    assert [outputs[f"r{i}"].token_ids for i in (1, 2, 3)] == [
        burst_tokens[f"r{i}"] for i in (1, 2, 3)
    ]
    if fault != "vanished":
        file.write_bytes(content)
        engine.adapters.update({p.name: (p, folders.stamp_of(p)) for p in root.iterdir()})
        engine.adapters.apply()
        assert run(engine, burst(engine)[0])["r0"].token_ids == burst_tokens["r0"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("stage", ["open", "first read", "second read", "close", "stamp", "memory"])
def test_a_load_that_fails_at_any_stage_is_an_error_of_its_request_and_leaks_no_page(
    checkpoint: Path,
    twelve: Path,
    burst_tokens: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    number: int,
) -> None:
    engine = engine_of(checkpoint, twelve, adapter_host_bytes=1)
    opened, reads = {}, []
    real_open, real_read, real_close, stamps = os.open, os.preadv, os.close, folders.stamps_of

    def fail() -> None:
        raise OSError(number, os.strerror(number))

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

    def close(file: int) -> None:
        real_close(file)
        if opened.pop(file, False) and stage == "close":
            fail()

    def stamps_of(paths: list[bytes]) -> list[bytes]:
        if stage == "stamp" and paths[0].endswith(b"a00"):
            return [b"!%d" % number]  # The stamp of a folder that cannot be read.
        return stamps(paths)

    def aminmax(values: Any) -> Any:
        if stage == "memory" and reads:
            reads.clear()
            raise MemoryError
        return real_aminmax(values)

    real_aminmax = torch.aminmax
    engine.adapters.clock = count(step=60).__next__  # Each attempt is due at once.
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_file)
        patch.setattr(os, "preadv", read)
        patch.setattr(os, "close", close)
        patch.setattr(folders, "stamps_of", stamps_of)
        patch.setattr(weights_reader.torch, "aminmax", aminmax)
        outputs = run(engine, *burst(engine)[:3])
    assert not any(opened.values()), "the file is closed"
    assert isinstance(outputs["r0"].error, InvalidArgument)
    assert "adapter 'a00'" in str(outputs["r0"].error)
    assert [outputs[f"r{i}"].token_ids for i in (1, 2)] == [burst_tokens[f"r{i}"] for i in (1, 2)]
    engine.adapters.update({})  # The folders disappear and come back.
    engine.adapters.update({p.name: (p, folders.stamp_of(p)) for p in twelve.iterdir()})
    engine.adapters.apply()
    assert run(engine, burst(engine)[0])["r0"].token_ids == burst_tokens["r0"]
    assert engine.pool.free + engine.pool.cached + engine.pool.adapter == engine.pool.total


@pytest.fixture
def serving(checkpoint: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineLoop]:
    monkeypatch.setattr(folders, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(folders, "SETTLED_SECONDS", 0.05)
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


PICTURE = "<s>" + "<image>" + "what is it? " * 8


def picture(engine: Engine, seed: int) -> ImageFeatures:
    hidden = engine.config.hidden
    rows = np.random.default_rng(seed).normal(size=(40, hidden)).astype(np.float32)
    return ImageFeatures(rows, np.array([[0, 40, 1, 5, 8, 0]], np.int32))


def test_a_shared_prompt_prefix_is_not_computed_again(checkpoint: Path, twelve: Path) -> None:
    engine = engine_of(checkpoint, twelve)
    uncached = engine_of(checkpoint, twelve, enable_prefix_caching=False)

    def computed(name: str, text: str, seed: int, adapter: str | None = None) -> int:
        before = engine.stats().rows
        asked = request(name, prompt=text, images=picture(engine, seed), adapter=adapter)
        tokens = run(engine, asked)[name].token_ids
        assert tokens == run(uncached, asked)[name].token_ids
        return engine.stats().rows - before

    first = computed("a", PICTURE, 1)
    again = computed("b", PICTURE + "and why?", 1)
    assert again < first / 2
    assert engine.stats().cached_tokens >= 40
    assert computed("c", PICTURE, 2) == first, "another image"
    assert computed("d", PICTURE, 1, "a00") == first, "another adapter"
    assert computed("e", PICTURE, 1, "a00") < first / 2


def test_blocks_are_shared_while_their_owner_runs(checkpoint: Path, twelve: Path) -> None:
    engine = engine_of(checkpoint, twelve)
    text = "<s>" + "what do you see? " * 8
    engine.add(engine.prepare(request("a", prompt=text, max_tokens=20)), 0.0)
    engine.step()
    pages = engine.pool.kv
    engine.add(engine.prepare(request("b", prompt=text, max_tokens=20)), 1.0)
    outputs = engine.step()
    assert engine.pool.kv <= pages + 2
    (first,) = (output.token_ids for output in outputs if output.request_id == "b")
    expected = run(engine_of(checkpoint, twelve), request("b", prompt=text, max_tokens=20))
    assert (*first, *finish(engine)["b"].token_ids) == expected["b"].token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_merged_and_unmerged_weights_are_shared_in_float32_only(
    checkpoint: Path, twelve: Path, dtype: str
) -> None:
    engine = engine_of(checkpoint, twelve, dtype=dtype)
    merged = MergeOnly(8, engine.costs)
    text = "<s>" + "what do you see? " * 8
    cached = {}
    for name, policy in (
        ("unmerged", UnmergeOnly(8)),
        ("merged after unmerged", merged),
        ("merged again", merged),
        ("unmerged again", UnmergeOnly(8)),
    ):
        engine.scheduler.policy = policy
        before = engine.stats().cached_tokens
        run(engine, request(name, adapter="a01", prompt=text, max_tokens=2))
        assert (engine.switcher.live != -1) == (policy is merged)
        cached[name] = engine.stats().cached_tokens - before
    assert cached["unmerged"] == 0
    assert cached["merged again"] > 0
    assert cached["unmerged again"] > 0
    assert (cached["merged after unmerged"] > 0) == (dtype == "float32")
