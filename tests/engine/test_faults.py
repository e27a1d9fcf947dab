"""Tests that after any failure each request gets one last output, and others are unharmed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engine_client import (
    PATIENCE,
    Collector,
    endless,
    request,
    run_together,
    tokens_of,
)
from tests.support.fakes import RustPanic
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.loop import FATAL_EXIT, EngineLoop
from vlora.errors import Internal, InvalidArgument, Unavailable
from vlora.live_requests import LiveRequest
from vlora.model.sampler import Uniforms
from vlora.request import Freshness, Output
from vlora.sampling import RANGES, SamplingParams


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a fault of ours")


def panic(*_: Any, **__: Any) -> Any:
    raise RustPanic("index out of bounds")


def test_a_fault_in_one_row_ends_its_request_and_keeps_the_outputs_of_the_others(
    engine: Engine,
) -> None:
    """One of the others ends in the same step as the fault, between rows that continue."""
    requests = [
        request("a", 6),
        request("b", 2),
        request("bad", 6),
        request("c", 2),
        request("d", 6),
    ]
    expected = {item.id: tokens_of(run_together(engine, item)[item.id]) for item in requests}
    outputs: dict[str, list[Output]] = {item.id: [] for item in requests}
    for item in requests:
        engine.add(engine.prepare(item), arrival=0.0)
    engine._requests["bad"].drawn = _once_then(engine._requests["bad"].drawn, fail)  # type: ignore[method-assign]
    while not engine.idle:
        for output in engine.step():
            outputs[output.request_id].append(output)
    engine.check_integrity()
    assert [output.finished for output in outputs["bad"]] == [False, True]
    assert isinstance(outputs["bad"][-1].error, Internal)
    assert "a fault of ours" not in str(outputs["bad"][-1].error)
    for name in ("a", "b", "c", "d"):
        assert tokens_of(outputs[name]) == expected[name]
        assert outputs[name][-1].finish_reason == "length"
    assert engine.stats().failed == 1


def _once_then(first: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter([first])
    return lambda *args: next(calls, then)(*args)


@pytest.fixture(scope="module")
def overflowing(adapters_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters with finite weights whose products, or head outputs, overflow."""
    folder = tmp_path_factory.mktemp("overflowing") / "adapters"
    shutil.copytree(adapters_dir, folder)
    enlarge(folder / "all-r8" / "adapter_model.safetensors", 1e25)
    enlarge(folder / "head-r8" / "head.safetensors", 3e38)
    return folder


def enlarge(path: Path, factor: float) -> None:
    weights = load_file(path)
    assert weights, path
    save_file({name: (w * factor).clamp(-3e38, 3e38) for name, w in weights.items()}, path)


def test_values_that_are_not_finite_are_an_error_of_their_adapters_requests_only(
    checkpoint: Path, overflowing: Path
) -> None:
    engine = Engine(Options(model=checkpoint, adapters=overflowing))
    healthy = [request("base"), request("other", adapter="attention-r4")]
    expected = {item.id: tokens_of(run_together(engine, item)[item.id]) for item in healthy}
    wild = SamplingParams(temperature=0.9, seed=1, max_tokens=4, logprobs=2)
    outputs = run_together(
        engine,
        request("greedy", adapter="all-r8"),
        *healthy,
        request("sampled", adapter="all-r8", sampling=wild),
        request("head", adapter="head-r8", use_head=True),
        request("text of the head's adapter", adapter="head-r8"),
    )
    for name, adapter in (("greedy", "all-r8"), ("sampled", "all-r8"), ("head", "head-r8")):
        (only,) = outputs[name]
        assert isinstance(only.error, InvalidArgument)
        assert f"adapter '{adapter}' produces values that are not finite" in str(only.error)
        assert only.head is None
        assert only.logprobs is None
    assert {name: tokens_of(outputs[name]) for name in expected} == expected
    assert outputs["text of the head's adapter"][-1].finish_reason == "length"


@pytest.mark.parametrize("rows", [24, 512])
def test_a_request_whose_values_are_not_finite_leaves_no_cached_block(
    checkpoint: Path, overflowing: Path, rows: int
) -> None:
    engine = Engine(
        Options(model=checkpoint, adapters=overflowing, max_num_seqs=4, max_num_batched_tokens=rows)
    )
    text = "<s>" + "what do you see? " * 8
    outputs = run_together(engine, request("bad", adapter="all-r8", prompt=text))
    assert isinstance(outputs["bad"][-1].error, InvalidArgument)
    assert engine.memory.prefix is not None
    assert len(engine.memory.prefix) == 0
    run_together(engine, request("good", prompt=text))
    assert len(engine.memory.prefix) > 0
    engine.check_integrity()


def test_a_single_infinite_or_nan_logit_is_detected(engine: Engine) -> None:
    forward = engine._runner.forward

    def spoiled(*arguments: Any) -> Any:
        result = forward(*arguments)
        logits = result.logits.clone()
        for row, value in enumerate((torch.inf, -torch.inf, torch.nan)):
            logits[row, 7] = value
        return replace(result, logits=logits)

    engine._runner.forward = spoiled  # type: ignore[method-assign]
    outputs = run_together(
        engine, *(request(name, max_tokens=1) for name in ("+", "-", "nan", "fine"))
    )
    for name in ("+", "-", "nan"):
        assert isinstance(outputs[name][-1].error, Internal)
    assert outputs["fine"][-1].finish_reason == "length"


EXTREMES: list[dict[str, Any]] = [
    {key: int(value) if valid.whole else value}
    for key, valid in RANGES.items()
    for value in (valid.low, min(valid.high, 10**300))
    # Token limits and ids also depend on the model, and the lowest deadline expires at once.
    if key not in ("max_tokens", "min_tokens", "stop_token_ids", "deadline_ms")
] + [{"top_k": value} for value in (1, 2, 2**31, 2**32, 2**63, 10**19)]
"""Parameters with a number at the end of its range or of a native type's."""


@pytest.mark.parametrize("temperature", [0, 0.01, 1, 100])
def test_every_number_within_its_range_is_answered_at_every_temperature(
    engine: Engine, temperature: float
) -> None:
    """The requests are rows of the same steps."""
    common = {"temperature": temperature, "max_tokens": 2}
    requests = [
        request(str(index), sampling=SamplingParams.parse(common | extreme))
        for index, extreme in enumerate(EXTREMES)
    ]
    outputs = run_together(engine, *requests)
    assert {outputs[item.id][-1].error for item in requests} == {None}
    assert engine.stats().failed == 0


@pytest.mark.parametrize("raised", [TypeError, MemoryError])
def test_a_fault_while_drawing_ends_the_request_of_its_row_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, raised: type[Exception]
) -> None:
    """The sampler fails on one row, whether it is drawn with the others or alone."""
    common = SamplingParams(temperature=0.9, max_tokens=4, ignore_eos=True)
    sampled = [request(name, sampling=replace(common, seed=ord(name))) for name in "abc"]
    requests = [request("greedy"), *sampled]
    expected = {item.id: tokens_of(run_together(engine, item)[item.id]) for item in requests}
    at = Uniforms.at

    def broken(uniforms: Uniforms, position: int) -> float:
        if uniforms._seed == ord("b"):
            raise raised("a fault of ours")
        return at(uniforms, position)

    monkeypatch.setattr(Uniforms, "at", broken)
    outputs = run_together(engine, *requests)
    assert isinstance(outputs["b"][-1].error, Internal)
    for name in ("greedy", "a", "c"):
        assert tokens_of(outputs[name]) == expected[name]
        assert outputs[name][-1].finish_reason == "length"
    assert engine.stats().failed == 1


# -- the loop ----------------------------------------------------------------------------------


class ProcessEnd(threading.Event):
    """A replacement for the function that ends the process."""

    code: int | None = None

    def __call__(self, code: int) -> None:
        assert self.code is None, "the process was ended twice"
        self.code = code
        self.set()


@pytest.fixture
def ended() -> ProcessEnd:
    return ProcessEnd()


@pytest.fixture
def loop(engine: Engine, ended: ProcessEnd) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine, max_waiting=16, end_process=ended)
    yield loop
    loop.shutdown(drain_seconds=0.0)


def test_a_fault_while_a_request_is_queued_ends_that_request_only(
    loop: EngineLoop, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Collector()
    monkeypatch.setattr(engine, "add", _once_then(fail, engine.add))
    loop.submit(request("unlucky"), sink)
    assert isinstance(sink.last("unlucky").error, Internal)
    loop.submit(request("next"), sink)
    assert sink.last("next").finish_reason == "length"


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        ("schedule", fail),
        ("schedule", panic),
        ("abort", fail),
        ("answer", fail),
        ("answer", panic),
    ],
)
def test_a_failed_engine_answers_all_requests_and_ends_the_process(
    loop: EngineLoop,
    engine: Engine,
    ended: ProcessEnd,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
    fault: Callable[..., Any],
) -> None:
    sink = Collector()
    for index in range(6):
        loop.submit(endless(f"r{index}"), sink)
    loop.admit(LiveRequest("being prepared"))
    sink.wait(lambda: len(sink.outputs["r0"]) > 2)
    if broken == "schedule":
        monkeypatch.setattr(engine.scheduler, "schedule", fault)
    elif broken == "abort":
        monkeypatch.setattr(engine.scheduler, "remove", fault)
        loop.abort("r3")
    else:
        monkeypatch.setattr(loop, "_answer", _once_then(fault, loop._answer))
    assert ended.wait(PATIENCE)
    assert ended.code == FATAL_EXIT
    for index in range(6):
        outputs = sink.outputs[f"r{index}"]
        assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)
        assert isinstance(outputs[-1].error, Internal)
    with pytest.raises(Unavailable, match="the engine has failed"):
        loop.submit(request("being prepared"), sink)
    with pytest.raises(Unavailable, match="the engine has failed"):
        loop.admit(LiveRequest("late"))


def test_a_failed_engine_answers_a_request_that_waits_for_a_thread_of_its_service(
    loop: EngineLoop, engine: Engine, ended: ProcessEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[BaseException] = []
    waiting = LiveRequest("waiting")
    monkeypatch.setattr(waiting, "fail", errors.append)
    loop.admit(waiting)
    loop.table.wait(waiting, Freshness(0.0))
    monkeypatch.setattr(engine.scheduler, "schedule", fail)
    loop.submit(endless("running"), Collector())
    assert ended.wait(PATIENCE)
    assert [type(error) for error in errors] == [Internal]
    assert not loop.table


def test_a_blocked_client_does_not_keep_a_failed_engine_alive(
    engine: Engine, ended: ProcessEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlora.engine.loop.LAST_OUTPUTS_SECONDS", 0.05)
    loop = EngineLoop(engine, max_waiting=16, end_process=ended)
    stuck, released = threading.Event(), threading.Event()

    def never_returns(_: Output) -> None:
        stuck.set()
        assert released.wait(PATIENCE)

    loop.submit(endless("stuck"), never_returns)
    assert stuck.wait(PATIENCE)
    monkeypatch.setattr(engine.scheduler, "schedule", fail)
    assert ended.wait(PATIENCE)
    monkeypatch.setattr(loop, "_end_process", lambda _: None)
    released.set()
    loop.shutdown(drain_seconds=0.0)
