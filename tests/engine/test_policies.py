"""Tests that answers are the same under every policy, in any order and with any merge."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.baseline_policies import register
from tests.support.calls import calls_of
from tests.support.engine_client import answers, request
from vlora.atmm import op
from vlora.config import POLICIES, Options
from vlora.engine.engine import Engine
from vlora.engine.policies.base import make_policy
from vlora.ids import BASE
from vlora.model.runner import StepResult
from vlora.request import Request

register()

HOT = "all-r8"


def batch(engine: Engine) -> list[Request]:
    """Return eight requests of one adapter, and one of each other adapter and of the base."""
    names = [HOT] * 8 + [name for name in engine.adapters.names() if name != HOT] + [None]
    return [
        request(
            f"r{i}", max_tokens=3 + i % 5, adapter=name, prompt=f"<s>{'what is it ' * (1 + i)}?"
        )
        for i, name in enumerate(names)
    ]


@pytest.fixture
def options(checkpoint: Path, adapters_dir: Path) -> Options:
    return Options(
        model=checkpoint,
        adapters=adapters_dir,
        max_num_seqs=6,
        max_num_batched_tokens=40,
        block_size=4,
        kv_cache_tokens=400,
    )


def test_answers_do_not_depend_on_the_policy(options: Options) -> None:
    engine = Engine(replace(options, policy="unmerge_only"))
    requests = batch(engine)
    base = engine.slab.digest()
    expected = answers(engine, requests)
    assert engine.stats().merges == 0
    for policy in POLICIES:
        engine.scheduler.policy = make_policy(replace(options, policy=policy), engine.costs)
        assert answers(engine, requests) == expected, policy
        engine.switcher.switch(-1)
    assert engine.stats().merges > 0
    assert set(engine.stats().mode_steps) > {"unmerged", "merged"}
    assert engine.slab.digest() == base


def test_a_deterministic_engine_never_merges(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = Engine(replace(options, policy="merge_only", deterministic=True))
    engine.calibrate()
    assert engine.stats().merges == 0
    assert engine.switcher.merged == -1, "no memory is allocated for merged weights"
    answers(engine, batch(engine))
    assert set(engine.stats().mode_steps) == {"unmerged"}


def test_a_calibrated_engine_predicts_its_steps_and_reports_the_error(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = Engine(options)
    guessed = engine.costs.profile
    engine.calibrate()
    engine.check_integrity()
    measured = engine.costs.profile
    assert measured != guessed
    assert all(seconds > 0 for _, seconds in measured.products)
    assert len(list((tmp_path / "vlora" / "cost").iterdir())) == 1
    answers(engine, batch(engine))
    stats = engine.stats()
    assert stats.step_seconds > 0
    assert stats.predicted_seconds > 0
    assert stats.prediction_error > 0


def test_the_time_of_a_step_starts_at_the_end_of_the_step_before(options: Options) -> None:
    """Use a clock that advances with each reading.

    All time of a busy engine must be counted except for the switches, and no time of an idle one.
    """
    ticks = itertools.count()
    engine = Engine(replace(options, policy="paper"), clock=lambda: float(next(ticks)))
    spent = 0.0
    for round in range(2):
        for item in batch(engine):
            engine.add(engine.prepare(replace(item, id=f"{round}-{item.id}")), 0.0)
        started = float(next(ticks)) + 1
        while not engine.idle:
            engine.step()
            next(ticks)  # The loop's own work between steps.
        spent += float(next(ticks)) - 2 - started
    stats = engine.stats()
    assert stats.switches > 0
    assert stats.step_seconds + stats.switch_seconds == pytest.approx(spent, abs=4)
    assert stats.step_seconds > 5 * stats.steps


@pytest.mark.parametrize(
    ("policy", "captured"), [("unmerge_only", False), ("paper", False), ("paper", True)]
)
def test_a_step_neither_copies_its_statistics_nor_learns_what_no_policy_reads_or_a_capture_took(
    options: Options, policy: str, captured: bool
) -> None:
    engine = Engine(replace(options, policy=policy))
    forward, learns = engine._runner.forward, policy == "paper" and not captured

    def forward_or_capture(*parts: Any) -> StepResult:
        result = forward(*parts)
        return StepResult(result.logits, result.heads, captured)

    engine._runner.forward = forward_or_capture  # type: ignore[method-assign]
    for item in batch(engine):
        engine.add(engine.prepare(item), 0.0)
    calls = calls_of(engine.step)
    assert calls["replace"] == 0
    assert calls["CostModel.record"] == learns
    assert (engine.stats().predicted_seconds > 0) == learns


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of the merges computed so far. Each of them takes a second, and nothing else
    takes any time."""
    done: list[float] = []
    merge = op.merge

    def merge_for_a_second(*arguments: Any) -> None:
        merge(*arguments)
        done.append(1.0)

    monkeypatch.setattr(op, "merge", merge_for_a_second)
    monkeypatch.setattr(time, "perf_counter", lambda: sum(done))
    return done


@pytest.mark.parametrize("merging", ["out_of_place", "in_place"])
def test_the_merges_of_a_switch_are_predicted(
    options: Options, merges: list[float], merging: str
) -> None:
    engine = Engine(replace(options, merging=merging))
    assert engine.costs.in_place == (merging == "in_place")
    draw = random.Random(1)
    for to in draw.choices([BASE, *engine.adapters.resident], k=60):
        expected = engine.costs.merges(engine.switcher.live, to)
        before = len(merges)
        engine._switch(to)
        assert len(merges) - before == len(expected)


@pytest.mark.parametrize("names", [[HOT], [HOT, "attention-r4"]], ids=["one adapter", "two"])
@pytest.mark.parametrize("merging", ["out_of_place", "in_place"])
def test_the_calibrated_time_of_a_merge_is_that_of_one_merge(
    options: Options,
    adapters_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    merges: list[float],
    merging: str,
    names: list[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = {name: str(adapters_dir / name) for name in names}
    engine = Engine(replace(options, merging=merging, adapters=None), folders)
    engine.calibrate()
    assert engine.costs.profile.merge == (1.0, 0.0)
