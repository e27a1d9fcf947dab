"""The engine under every policy: the same answers, whoever goes first and whatever is merged."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.test_invariance import answers
from tests.support.engine_client import request
from vlora.config import POLICIES, Options
from vlora.engine.engine import Engine
from vlora.engine.policies.registry import make_policy
from vlora.request import Request

HOT = "all-r8"


def batch(engine: Engine) -> list[Request]:
    """Most of them through one adapter, of the others one each."""
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
        theta_min=0.01,
    )


def test_answers_do_not_depend_on_the_policy(options: Options) -> None:
    engine = Engine(replace(options, policy="unmerge_only"))
    asked = batch(engine)
    base = engine.slab.digest()
    expected = answers(engine, asked)
    assert engine.stats().merges == 0
    for policy in POLICIES:
        engine.scheduler.policy = make_policy(replace(options, policy=policy), engine.costs)
        assert answers(engine, asked) == expected, policy
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
    assert engine.switcher.merged == -1, "nor is the memory for it taken"
    answers(engine, batch(engine))
    assert set(engine.stats().mode_steps) == {"unmerged"}


def test_a_calibrated_engine_predicts_its_steps_and_tells_how_well(
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


def test_what_a_step_takes_is_all_from_the_end_of_the_one_before(options: Options) -> None:
    """On a clock that ticks whenever it is asked: nothing of the time of a busy engine is left out
    but the switches, and none of an idle one's is counted."""
    ticks = itertools.count()
    engine = Engine(replace(options, policy="credit"), clock=lambda: float(next(ticks)))
    spent = 0.0
    for turn in range(2):
        for one in batch(engine):
            engine.add(engine.prepare(replace(one, id=f"{turn}-{one.id}")), 0.0)
        began = float(next(ticks)) + 1
        while not engine.idle:
            engine.step()
            next(ticks)  # what the loop does between steps
        spent += float(next(ticks)) - 2 - began
    stats = engine.stats()
    assert stats.switches > 0
    assert stats.step_seconds + stats.switch_seconds == pytest.approx(spent, abs=4)
    assert stats.step_seconds > 5 * stats.steps


def test_deadlines_are_kept_of_live_requests_alone(options: Options) -> None:
    engine = Engine(options)
    engine.add(engine.prepare(request("undated", max_tokens=2)), 0.0)
    for i in range(3):
        params = replace(request("x", max_tokens=2).sampling, deadline_ms=1e9 * (3 - i))
        engine.add(engine.prepare(replace(request(f"dated{i}"), sampling=params)), 0.0)
    engine.check_integrity()
    assert engine.abort("dated1")
    engine.check_integrity()
    while not engine.idle:
        engine.step()
    engine.check_integrity()
