"""Tests of adapters that are copied to a fake GPU while steps run.

The fake device copies a load only when the load, or a later one, is waited for. So a step that does
not wait for its adapters computes with NaN.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import engine_client as questions
from tests.support.engine_client import answers, run_together
from tests.support.fake_device import FakeDevice, fake_gpu
from tests.support.gpu_engines import small_options
from vlora.adapters import store
from vlora.atmm.cuda.library import Library
from vlora.atmm.groups import PendingCopies
from vlora.atmm.types import LoraPair
from vlora.config import Options
from vlora.device.device import Graph, Load
from vlora.engine.engine import Engine
from vlora.errors import OutOfMemory
from vlora.request import Request

pytestmark = pytest.mark.usefixtures("launch")

NAMES = ("all-r8", "attention-r4")


@pytest.fixture
def options(checkpoint: Path, adapters_dir: Path, tmp_path: Path) -> Options:
    """Return options of an engine with the adapters NAMES, which are loaded in this order."""
    for name in NAMES:
        (tmp_path / name).symlink_to(adapters_dir / name)
    return small_options(checkpoint, tmp_path, kv_cache_tokens=256, policy="unmerge_only")


def _ask(name: str | None, prompt: str = "<s>red", tokens: int = 3) -> list[Request]:
    return [questions.request("r", tokens, prompt=prompt, adapter=name)]


@pytest.mark.usefixtures("cuda_operator")
def test_a_step_waits_for_its_adapter_group_by_group(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let each call of the operator find no more copied than its own group and those before."""
    expected = answers(Engine(options), _ask("all-r8"))
    apply, copied = Library.apply, []

    def counting(*arguments: Any) -> None:
        copied.append(device.loaded)
        apply(*arguments)

    monkeypatch.setattr(Library, "apply", counting)
    with fake_gpu() as device:
        engine = Engine(options)
        groups = len(engine._runner._decoder.lora_groups)
        assert 0 < device.loads <= 2 * groups
        answers(engine, _ask(None))
        assert device.loaded == 0, "a step of the base model waits for no adapter"
        assert answers(engine, _ask("all-r8")) == expected
    used = len(set(copied))
    assert copied[:used] == list(range(1, used + 1))
    assert groups - 1 <= used < device.loads
    assert device.loaded == used, "no step has waited for the other adapter"


@pytest.mark.usefixtures("cuda_operator")
@pytest.mark.parametrize("waits", [True, False])
def test_a_graph_waits_for_an_adapter_that_is_being_copied(
    options: Options, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Replay the graph of one adapter in the first step of another. Its prompt has one token."""
    asked = [_ask(name, "<s>") for name in NAMES]
    on_cpu = Engine(options)
    expected = [answers(on_cpu, batch) for batch in asked]
    with fake_gpu() as device:
        engine = Engine(options)
        assert answers(engine, asked[0]) == expected[0]
        assert device.loaded < device.loads
        device.graph_events.clear()
        if not waits:
            monkeypatch.setattr(PendingCopies, "wait_for", lambda *arguments: None)
        (outputs,) = run_together(engine, *asked[1]).values()
    failed = any(output.error is not None for output in outputs)
    tokens = [token for output in outputs for token in output.token_ids]
    assert (not failed and tokens == expected[1]["r"][0]) == waits
    assert device.graph_events[0] == "replay"


@pytest.mark.usefixtures("cuda_operator")
def test_a_capture_contains_no_copies_of_adapters_that_another_thread_loads(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change another slot of the first group after a capture has started."""
    expected = answers(Engine(options), _ask("all-r8"))
    capture = FakeDevice.capture

    def disturbed(device: FakeDevice, work: Callable[[], object]) -> Graph:
        def loading_meanwhile() -> None:
            if not changed:
                with torch.utils._python_dispatch._disable_current_modes():
                    group.put(slot, [column[slot] for column in group.pairs])
                changed.append(group.version)
            work()

        return capture(device, loading_meanwhile)

    monkeypatch.setattr(FakeDevice, "capture", disturbed)
    changed: list[int] = []
    with fake_gpu() as device:
        engine = Engine(options)
        group, slot = engine._runner._decoder.lora_groups[0], engine.adapters.slot("attention-r4")
        assert answers(engine, _ask("all-r8")) == expected
        assert engine._runner.graphs.replayed == 1
    assert changed
    assert device.graph_events == ["capture", "replay"]


@pytest.mark.usefixtures("cuda_operator")
def test_a_group_that_is_first_used_during_a_capture_is_not_part_of_the_graph(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let another thread load the first adapter of the MLPs after a capture has been prepared.

    Neither the step before the capture nor the tables of the groups know it.
    """
    asked = _ask("attention-r4", tokens=4)
    (options.adapters / "all-r8").unlink()
    expected = answers(Engine(options), asked)
    capture, apply, calls = FakeDevice.capture, Library.apply, []

    def disturbed(device: FakeDevice, work: Callable[[], object]) -> Graph:
        for group in unused if not calls else ():
            group.append([_zeros(device, group.d_in, d_out) for d_out in group.d_outs])
        calls.append(0)
        graph = capture(device, work)
        calls.append(0)
        return graph

    def counting(*arguments: Any) -> None:
        if calls:
            calls[-1] += 1
        apply(*arguments)

    with fake_gpu():
        engine = Engine(options)
        groups = engine._runner._decoder.lora_groups
        unused = [group for group in groups if not group.ever_used]
        assert 0 < len(unused) < len(groups)
        monkeypatch.setattr(FakeDevice, "capture", disturbed)
        monkeypatch.setattr(Library, "apply", counting)
        assert answers(engine, asked) == expected
    # The second graph replaces the first and applies all groups.
    assert calls[0] == len(groups) - len(unused)
    assert calls[2] == len(groups)
    assert (engine._runner.graphs.captured, engine._runner.graphs.discarded) == (2, 1)


def _zeros(device: FakeDevice, d_in: int, d_out: int) -> LoraPair:
    shapes = ((8, d_in), (d_out, 8))
    return LoraPair(*(device.zeros(*shape, dtype=torch.float32) for shape in shapes))


def test_the_reference_operator_waits_too(options: Options) -> None:
    expected = answers(Engine(options), _ask("attention-r4"))
    with fake_gpu() as device:
        assert answers(Engine(options), _ask("attention-r4")) == expected
    assert device.loaded > 0


@pytest.mark.parametrize("operator", [True, False])
def test_heads_are_loaded_and_waited_for(
    checkpoint: Path, adapters_dir: Path, request: pytest.FixtureRequest, operator: bool
) -> None:
    options = small_options(checkpoint, adapters_dir, policy="unmerge_only")
    asked = questions.request("r", adapter="head-r8", use_head=True)
    (expected,) = run_together(Engine(options), asked)["r"]
    if operator:
        request.getfixturevalue("cuda_operator")
    with fake_gpu():
        (output,) = run_together(Engine(options), asked)["r"]
    assert output.head is not None
    assert expected.head is not None
    assert output.head.scores == pytest.approx(expected.head.scores, rel=1e-4)


@pytest.mark.usefixtures("cuda_operator")
def test_an_adapter_may_be_evicted_while_it_is_copied(options: Options) -> None:
    """Let an adapter take the pages of one whose copies have never been waited for."""
    small = _with_pool_for_one(options)
    on_cpu = Engine(options)
    expected = [answers(on_cpu, _ask(name)) for name in NAMES]
    with fake_gpu() as device:
        engine = Engine(small)
        (handle,) = engine.adapters.resident.values()
        assert handle.name == "all-r8"
        assert device.loaded == 0
        assert answers(engine, _ask("attention-r4")) == expected[1]
        assert [one.name for one in engine.adapters.resident.values()] == ["attention-r4"]
        assert answers(engine, _ask("all-r8")) == expected[0]
        assert engine.stats().adapter_evictions == 2


@pytest.mark.usefixtures("cuda_operator")
def test_small_adapters_are_not_loaded_on_the_engines_thread(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load may wait for earlier ones, and meanwhile other requests would not be served."""
    load, threads = FakeDevice.load, set[int]()

    def noting(device: FakeDevice, tensors: Sequence[torch.Tensor]) -> Load:
        threads.add(threading.get_ident())
        return load(device, tensors)

    monkeypatch.setattr(FakeDevice, "load", noting)
    with fake_gpu():
        engine = Engine(_with_pool_for_one(options))
        for name in NAMES:
            answers(engine, _ask(name))
        assert engine.stats().adapter_evictions > 0
    assert threads
    assert threading.get_ident() not in threads


def _with_pool_for_one(options: Options) -> Options:
    """Return the options of an engine whose pool holds only one of the adapters at a time."""
    return replace(options, adapter_pool_bytes=520_000, kv_cache_tokens=16)


Fault = Callable[[], Exception]


@pytest.mark.usefixtures("cuda_operator")
@pytest.mark.parametrize(
    ("fault", "attempts", "is_served"),
    [
        (lambda: RuntimeError("CUDA error: an illegal value"), 1, False),
        (lambda: OutOfMemory("80 bytes do not fit device 'fake'"), store.MAX_ATTEMPTS, True),
        (lambda: OutOfMemory("80 bytes do not fit device 'fake'"), 1, False),
    ],
)
def test_a_load_that_fails_is_an_error_of_its_adapter_only(
    options: Options,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    attempts: int,
    is_served: bool,
) -> None:
    """Fail the third load, which is one of the first adapter. Memory may be free again later."""
    on_cpu = Engine(options)
    expected = {name: answers(on_cpu, _ask(name)) for name in NAMES}
    load, count = FakeDevice.load, [0]

    def failing(device: FakeDevice, tensors: Sequence[torch.Tensor]) -> Load:
        count[0] += 1
        if count[0] == 3:
            raise fault()
        return load(device, tensors)

    monkeypatch.setattr(FakeDevice, "load", failing)
    monkeypatch.setattr(store, "MAX_ATTEMPTS", attempts)
    with fake_gpu():
        engine = Engine(options)
        assert answers(engine, _ask("attention-r4")) == expected["attention-r4"]
        if is_served:
            assert answers(engine, _ask("all-r8")) == expected["all-r8"]
        else:
            with pytest.raises(Exception, match=r"adapter 'all-r8'.* failed to load"):
                engine.prepare(_ask("all-r8")[0])
        engine.adapters.finish()
        engine.adapters.check_integrity()
