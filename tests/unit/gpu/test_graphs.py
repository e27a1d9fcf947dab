"""Tests of captured graphs of decoding steps, on a fake GPU with interpreted kernels.

The fake device executes a graph's work again at each replay, and fails if that would launch
anything with other arguments than were captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.engine_client import answers, request
from tests.support.fake_device import GRAPH_BYTES, FakeDevice, fake_gpu
from tests.support.gpu_engines import answers_of_loop, on_both, small_options
from tests.support.modes import drive
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.ids import BASE
from vlora.model import step_graphs
from vlora.model.decoder import Decoder
from vlora.request import Request

pytestmark = pytest.mark.usefixtures("launch")

PROMPTS = ("<s>red", "<s>what is on the left of it?", "<s>two men")


@pytest.fixture
def options(checkpoint: Path, adapters_dir: Path) -> Options:
    return small_options(checkpoint, adapters_dir, max_num_batched_tokens=64, kv_cache_tokens=512)


def _requests(*names: str | None, tokens: int = 3) -> list[Request]:
    return [
        request(f"r{index}", tokens, prompt=prompt, adapter=name)
        for index, (name, prompt) in enumerate(zip(names, PROMPTS, strict=False))
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_operator")
def test_loads_evictions_and_switches_leave_all_graphs_valid(options: Options) -> None:
    """Run base, merged and adapter steps, each adapter evicting the one before, and repeat."""
    names = ("all-r8", "attention-r4", "feed-forward-r16", None)
    small = replace(options, adapter_pool_bytes=200_000, kv_cache_tokens=128)
    captured: list[int] = []

    def run(engine: Engine) -> list[object]:
        live = [BASE]
        drive(engine, lambda step: live[0])
        results: list[object] = []
        for _ in range(2):
            for name in names:
                for merged in (False, True)[: 1 + (name is not None)]:
                    live[0] = BASE
                    engine.adapters.tiers.residents.protected_slot = BASE
                    item = _requests(name)[0]
                    engine.add(engine.prepare(item), arrival=0.0)
                    while engine.scheduler.waiting:
                        engine.step()
                        engine.adapters.finish()
                    if merged and name is not None:
                        live[0] = engine.adapters.slot(name)
                    tokens = []
                    while not engine.idle:
                        tokens += [t for output in engine.step() for t in output.token_ids]
                    results.append(tokens)
            captured.append(engine.stats().graphs_captured)
        return results

    engine, device, _ = on_both(small, run)
    stats = engine.stats()
    assert stats.adapter_evictions >= 4
    assert stats.switches >= 6
    # The second round captures nothing: a graph of each kind serves every adapter.
    first, second = captured[2:]
    assert first == second == device.graph_events.count("capture") > 3
    assert stats.graphs_replayed == device.graph_events.count("replay") > second


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_operator")
def test_a_graph_serves_steps_of_fewer_rows_and_other_adapters(options: Options) -> None:
    """Capture one graph for four rows: three requests, whose order and adapters then change."""

    def run(engine: Engine) -> object:
        names = ("all-r8", None, "attention-r4")
        first = answers(engine, _requests(*names))
        return first, answers(engine, _requests(*reversed(names)))

    engine, *_ = on_both(options, run)
    keys = list(engine._runner._graphs._graphs)  # type: ignore[union-attr]
    assert [key.shape.rows for key in keys] == [4]
    assert engine.stats().graphs_replayed == 3


def test_contexts_beyond_a_graphs_block_tables_have_another_graph(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graphs, "FEWEST_PAGES", 1)
    engine, *_ = on_both(
        replace(options, block_size=4), lambda engine: answers(engine, _requests(None, tokens=8))
    )
    keys = list(engine._runner._graphs._graphs)  # type: ignore[union-attr]
    assert [key.shape.pages for key in keys] == [1, 4]


@pytest.mark.slow
def test_the_graph_unused_for_longest_is_discarded(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 2)
    counts = (1, 2, 1, 3, 2)

    def run(engine: Engine) -> object:
        return [answers(engine, _requests(*[None] * count)) for count in counts]

    engine, *_ = on_both(options, run)
    keys = list(engine._runner._graphs._graphs)  # type: ignore[union-attr]
    assert [key.shape.rows for key in keys] == [4, 2]
    stats = engine.stats()
    assert stats.graphs_captured == 4
    assert stats.graph_seconds > 0
    assert 2 * GRAPH_BYTES < stats.graph_bytes < 2 * GRAPH_BYTES + 10_000


def test_a_step_that_cannot_be_captured_is_computed_without_graphs(
    options: Options, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: FakeDevice, work: Callable[[], object]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(FakeDevice, "capture", refuse)
    engine, device, _ = on_both(options, lambda e: answers(e, _requests(None, None)))
    assert caplog.text.count("no graphs are used from now on") == 1
    assert engine.stats().graphs_captured == engine.stats().graphs_replayed == 0
    assert device.events == ["upload", "read", "wait"] * engine.stats().steps


def test_enforce_eager_captures_nothing(options: Options) -> None:
    eager = replace(options, enforce_eager=True)
    engine, device, _ = on_both(eager, lambda e: answers(e, _requests(None)))
    assert device.graph_events == []
    assert engine.stats().graph_bytes == 0


def test_adapters_of_the_reference_operator_and_heads_are_not_captured(options: Options) -> None:
    """Only the decoding steps of the base model are, and no prefill."""
    item = request("r", prompt="<s>what is it?", adapter="head-r8", use_head=True)
    engine, device, _ = on_both(
        options,
        lambda e: [answers(e, batch) for batch in (_requests("all-r8"), [item], _requests(None))],
    )
    assert device.graph_events == ["capture", "replay"]
    assert engine.stats().graphs_replayed == 1


@pytest.mark.parametrize("names", [(None, "all-r8"), ("all-r8",)])
def test_steps_that_subtract_or_adapt_the_lm_head_are_not_captured_without_the_operator(
    options: Options, names: tuple[str | None, ...]
) -> None:
    """Merge an adapter, which is subtracted from the base model's row. Then let the LM head have
    adapters, which are never merged.
    """

    def run(engine: Engine) -> object:
        engine.adapters.finish()
        live = engine.adapters.slot("all-r8")
        drive(engine, lambda step: live)
        engine._runner._decoder.lora_groups[-1].ever_used = None not in names
        return answers(engine, _requests(*names))

    engine, device, _ = on_both(options, run)
    assert engine.stats().switches == 1
    assert device.graph_events == []


def test_memory_that_grows_replaces_the_graphs(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a position exceed the rotary table, as those of frames that are far apart may."""
    monkeypatch.setattr("vlora.model.rotary.INITIAL_POSITIONS", 8)
    reserve = Decoder.reserve
    monkeypatch.setattr(Decoder, "reserve", lambda self, rows, positions: reserve(self, rows, 0))

    def run(engine: Engine) -> object:
        return [answers(engine, _requests(None, tokens=tokens)) for tokens in (2, 12, 3)]

    engine, *_ = on_both(options, run)
    assert engine.stats().graphs_captured == 1 + engine._runner.graphs.discarded > 1


@pytest.mark.usefixtures("cuda_operator")
def test_the_loops_thread_computes_on_the_engines_device(options: Options) -> None:
    asked = _requests("all-r8", None, tokens=8)
    expected = answers(Engine(options), asked)
    with fake_gpu() as device:
        tokens = answers_of_loop(Engine(options), asked)
        assert tokens == {name: tokens for name, (tokens, _) in expected.items()}
        assert "replay" in device.graph_events


def test_rows_and_pages_are_padded_to_few_sizes() -> None:
    rows = [step_graphs.padded_rows(n) for n in range(1, 65)]
    assert sorted(set(rows)) == [1, 2, 4, 8, 16, 32, 48, 64]
    assert all(n <= padded < max(2 * n, n + 16) for n, padded in enumerate(rows, 1))
    pages = [step_graphs.padded_pages(n) for n in (1, 64, 65, 256, 257, 5000)]
    assert pages == [64, 64, 256, 256, 1024, 16384]
