"""Tests of the fusion algorithm, with a trainer that takes its accuracies from a table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlora.generation.fusion import (
    Attempt,
    Goals,
    Packed,
    RunState,
    fuse_next,
    goals_of,
    may_share,
    merge_next,
    similar_order,
)
from vlora.generation.spec import PAPER, Item, PackingOptions, Spec, Training
from vlora.generation.trainer import (
    AVERAGE_DECAY,
    COOLING_SHARE,
    FINAL_RATE,
    RESTART_RATE,
    WARMUP_STEPS,
    Schedule,
    WeightAverage,
    row_shares,
)

BEST = PackingOptions(order="given", merge="none")


@dataclass
class TableTrainer:
    """Trainer that computes accuracies from the set of items in an adapter.

    capacity: number of items that one adapter can hold at full accuracy.
    apart: pairs of items of which neither reaches its accuracy in an adapter with the other.
    hopeless: items that never reach their accuracy.
    trainable: whether merged weights reach their accuracies only after training.
    """

    capacity: int = 3
    apart: frozenset[frozenset[str]] = frozenset()
    hopeless: frozenset[str] = frozenset()
    trainable: bool = False
    calls: list[tuple[str, tuple[str, ...], int]] = field(default_factory=list)
    likes: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def train(self, item: Item, onto: Packed | None, version: int) -> Attempt:
        before = onto.items if onto else ()
        self.calls.append((item.name, before, version))
        names = (*before, item.name)
        return Attempt(version, {name: self.score(name, names) for name in names}, 10, 1.0)

    def score(self, name: str, names: Sequence[str]) -> float:
        clash = any({name, other} in self.apart for other in names)
        full = len(names) <= self.capacity and not clash and name not in self.hopeless
        return 0.95 if full else 0.5

    def merge(self, first: Packed, second: Packed, version: int, *, train: bool) -> Attempt:
        """Merge two adapters. If `trainable`, accuracies are low until the weights are trained."""
        names = (*first.items, *second.items)
        self.calls.append(("trained merge" if train else "merge", names, version))
        scores = {name: self.score(name, names) for name in names}
        if self.trainable and not train:
            scores = dict.fromkeys(names, 0.5)
        return Attempt(version, scores, 0, 1.0)

    def similarity(self, item: Item, others: Sequence[str]) -> float:
        return max((self.likes.get((item.name, other), 0.0) for other in others), default=0.0)


def apart(*pairs: str) -> frozenset[frozenset[str]]:
    """Return pairs of items, each given as two letters."""
    return frozenset(map(frozenset, pairs))


def spec_of(*names: str, tasks: Mapping[str, str] = {}, heads: Sequence[str] = ()) -> Spec:
    return Spec(
        base=Path("base"),
        items=tuple(
            Item(
                name=name,
                task=tasks.get(name, "classify"),
                images=Path(name),
                question="What is it?",
                required=0.9,
                head=name in heads,
            )
            for name in names
        ),
        training=Training(margin=1.0),
    )


def goals_in(spec: Spec) -> Goals:
    """Return the goals for 900 validation examples of each item: a margin of 0.01."""
    return goals_of(spec, {item.name: 900 for item in spec.items})


def run(spec: Spec, options: PackingOptions, trainer: TableTrainer) -> RunState:
    goals = goals_in(spec)
    state = RunState(pending=tuple(item.name for item in spec.items))
    while state.pending:
        state = fuse_next(spec, options, goals, state, trainer)
        state = RunState.from_json(json.loads(json.dumps(state.as_json())))
    merging = partial(merge_next, spec, options, goals)
    while options.merge != "none" and (merged := merging(state, trainer)) is not None:
        state = RunState.from_json(json.loads(json.dumps(merged.as_json())))
    return state


def packed(state: RunState) -> list[tuple[str, ...]]:
    return [adapter.items for adapter in state.adapters]


def test_the_example_of_figure_10() -> None:
    """Vegetation lowers the accuracy of plates too far, so it starts a second adapter."""
    names = ("plate", "sign", "vehicle", "vegetation", "bicycle", "person")
    trainer = TableTrainer(apart=frozenset({frozenset({"vegetation", "plate"})}))
    state = run(spec_of(*names), PAPER, trainer)
    assert packed(state) == [names[:3], names[3:]]
    failed = [event for event in state.events if event.broken]
    assert [(event.item, event.adapter) for event in failed] == [("vegetation", 1)]
    assert set(failed[0].broken) == set(names[:4])
    assert trainer.calls[-2] == ("bicycle", ("vegetation",), 6)


def test_the_paper_tries_only_the_newest_adapter() -> None:
    trainer = TableTrainer(apart=apart("ab", "bc"))
    assert packed(run(spec_of("a", "b", "c"), PAPER, trainer)) == [("a",), ("b",), ("c",)]
    assert packed(run(spec_of("a", "b", "c"), BEST, trainer)) == [("a", "c"), ("b",)]


def test_the_most_similar_adapter_is_tried_first() -> None:
    likes = {("c", "b"): 0.9, ("c", "a"): 0.1}
    trainer = TableTrainer(capacity=2, apart=apart("ab"), likes=likes)
    assert packed(run(spec_of("a", "b", "c"), BEST, trainer)) == [("a",), ("b", "c")]


def test_an_item_that_no_adapter_of_its_own_can_hold_is_reported_and_harms_no_other() -> None:
    trainer = TableTrainer(hopeless=frozenset({"b"}))
    state = run(spec_of("a", "b", "c"), BEST, trainer)
    assert packed(state) == [("a", "c")]
    assert state.unreachable == {"b": 0.5}


@pytest.mark.parametrize(
    ("heads", "tasks", "together"),
    [
        (("a", "b"), {}, True),
        (("a",), {}, False),
        (("b",), {}, False),
        (("a",), {"b": "vqa"}, True),
        (("a", "b"), {"b": "video"}, False),
        ((), {"b": "vqa"}, True),
    ],
)
def test_a_head_serves_one_task_and_all_items_of_that_task(
    heads: Sequence[str], tasks: Mapping[str, str], together: bool
) -> None:
    spec = spec_of("a", "b", tasks=tasks, heads=heads)
    assert may_share(spec, spec.item("b"), Packed(1, 1, ("a",), {})) is together
    assert len(run(spec, BEST, TableTrainer()).adapters) == (1 if together else 2)


def test_adapters_are_merged_where_all_promises_hold() -> None:
    """The paper's heuristic leaves a and c apart, since only the newest adapter is tried."""
    options = PAPER.model_copy(update={"merge": "svd"})
    trainer = TableTrainer(apart=apart("ab", "bc"))
    state = run(spec_of("a", "b", "c"), options, trainer)
    assert packed(state) == [("a", "c"), ("b",)]
    assert [merge.versions for merge in state.merges if merge.broken] == [(1, 3), (7, 3)]
    assert len({version for *_, version in trainer.calls}) == len(trainer.calls)


def test_merged_weights_are_trained_unless_an_attempt_was_far_from_its_goals() -> None:
    """Items a and c have not been tried together. With b, either was far from its accuracy."""
    options = PAPER.model_copy(update={"merge": "svd", "merge_training": True})
    trainer = TableTrainer(apart=apart("ab", "bc"), trainable=True)
    assert packed(run(spec_of("a", "b", "c"), options, trainer)) == [("a", "c"), ("b",)]
    merges = [call for call in trainer.calls if "merge" in call[0]]
    assert [kind for kind, *_ in merges] == ["merge", "trained merge", "merge"]
    untrained = options.model_copy(update={"merge_training": False})
    state = run(
        spec_of("a", "b", "c"), untrained, TableTrainer(apart=apart("ab", "bc"), trainable=True)
    )
    assert packed(state) == [("a",), ("b",), ("c",)]


def test_similar_items_follow_each_other() -> None:
    likeness = {"ab": 0.9, "ac": 0.1, "ad": 0.5, "bc": 0.2, "bd": 0.3, "cd": 0.8}
    order = similar_order("abcd", lambda a, b: likeness["".join(sorted((a, b)))])
    assert order == ("d", "c", "b", "a")


def test_a_killed_run_takes_the_same_decisions() -> None:
    """A run may be killed in any attempt; what `save` and `fuse_next` gave is all that is left."""
    spec = spec_of("a", "b", "c", "d", "e")
    whole = run(spec, BEST, TableTrainer(capacity=2, apart=apart("ac", "bd")))

    fuse = partial(fuse_next, spec, BEST, goals_in(spec))

    class Killed(Exception):
        pass

    class Mortal(TableTrainer):
        left = 0

        def train(self, item: Item, onto: Packed | None, version: int) -> Attempt:
            if self.left == 0:
                raise Killed
            self.left -= 1
            return super().train(item, onto, version)

    for life in range(1, 4):
        trainer = Mortal(capacity=2, apart=apart("ac", "bd"))
        states = [RunState(pending=tuple(item.name for item in spec.items))]
        deaths = 0
        while states[-1].pending:
            trainer.left = life
            try:
                while states[-1].pending:
                    states.append(fuse(states[-1], trainer, states.append))
            except Killed:
                deaths += 1
        assert states[-1] == whole
        assert deaths
        versions = [version for *_, version in trainer.calls]
        assert versions == sorted(set(versions)), "an attempt was made twice"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_item_is_packed_once_or_unreachable_and_every_promise_holds(
    data: st.DataObject,
) -> None:
    names = tuple("abcdefgh"[: data.draw(st.integers(1, 8))])
    pairs = [frozenset({a, b}) for a in names for b in names if a < b]
    trainer = TableTrainer(
        capacity=data.draw(st.integers(1, 4)),
        apart=frozenset(data.draw(st.sets(st.sampled_from(pairs)))) if pairs else frozenset(),
        hopeless=frozenset(data.draw(st.sets(st.sampled_from(names)))),
    )
    spec = spec_of(*names, heads=data.draw(st.lists(st.sampled_from(names))))
    state = run(spec, data.draw(st.sampled_from([PAPER, BEST])), trainer)
    held = [name for adapter in state.adapters for name in adapter.items]
    assert sorted([*held, *state.unreachable]) == sorted(names)
    assert set(state.unreachable) == trainer.hopeless
    for adapter in state.adapters:
        assert adapter.items == tuple(adapter.scores)
        assert all(score >= 0.91 for score in adapter.scores.values())


def test_a_goal_is_the_promise_and_the_margin_in_standard_errors() -> None:
    spec = spec_of("few", "many")
    goals = goals_of(spec, {"few": 25, "many": 2500})
    assert (goals["few"].accuracy, goals["many"].accuracy) == pytest.approx((0.96, 0.906))
    assert goals_of(spec, {"few": 1, "many": 2500})["few"].accuracy == 1.0
    assert goals["many"].nearly_reached(0.895)
    assert not goals["many"].nearly_reached(0.893)


def test_items_far_below_their_goals_get_more_rows_of_a_batch() -> None:
    goals = goals_in(spec_of("old", "full", "new"))
    options = PackingOptions(replay=0.5, focus=0.5)
    names = ("old", "full", "new")
    shares = row_shares(goals, options, "new", names, {})
    assert shares == {"old": 0.25, "full": 0.25, "new": 0.5}
    goal = goals["old"].accuracy
    shares = row_shares(
        goals, options, "new", names, {"old": goal - 0.3, "full": 1.0, "new": goal - 0.1}
    )
    assert shares == pytest.approx({"old": 0.5, "full": 0.125, "new": 0.375})
    assert row_shares(goals, PAPER, "new", names, dict.fromkeys(names, 0.0)) == {
        "old": 0.0,
        "full": 0.0,
        "new": 1.0,
    }
    assert row_shares(goals, options, "new", ("new",), {"new": 0.1}) == {"new": 1.0}


def test_the_average_of_weights_is_evaluated_and_training_goes_on_from_the_weights() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    average = WeightAverage([weight])
    expected = torch.zeros(2)
    for step in range(1, 60):
        with torch.no_grad():
            weight.copy_(torch.tensor([float(step % 5), -float(step)]))
        average.add([weight])
        expected += (weight.detach() - expected) * max(1 - AVERAGE_DECAY, 1 / step)
    trained = weight.detach().clone()
    with average.applied([weight]):
        torch.testing.assert_close(weight.detach(), expected)
    assert torch.equal(weight.detach(), trained)
    torch.testing.assert_close(average.values()[0], expected)


def test_the_learning_rate_falls_early_where_an_attempt_makes_no_progress() -> None:
    steps, stalled = 600, 240
    schedule = Schedule(steps)
    usual = [schedule.rate(step) for step in range(steps)]
    assert usual[:WARMUP_STEPS] == pytest.approx([(n + 1) / WARMUP_STEPS for n in range(20)])
    assert usual[-1] == pytest.approx(FINAL_RATE, abs=1e-4)
    schedule.end_early(stalled)
    assert schedule.end == stalled + COOLING_SHARE * steps
    fall = [schedule.rate(step) for step in range(stalled, schedule.end + 1)]
    assert fall[0] == usual[stalled]
    assert fall[-1] == pytest.approx(FINAL_RATE)
    assert all(later < earlier for earlier, later in itertools.pairwise(fall))
    assert all(cooled <= usual for cooled, usual in zip(fall, usual[stalled:], strict=False))
    late = Schedule(steps)
    late.end_early(590)
    assert late.end == steps
    assert [late.rate(step) for step in (590, 599)] == usual[590::9]


def test_another_round_begins_at_a_lower_rate() -> None:
    schedule = Schedule(100)
    schedule.end_early(40)
    schedule.restart(60)
    assert schedule.end == 160
    assert not schedule.cooling
    rates = [schedule.rate(step) for step in range(60, 160)]
    assert max(rates) == pytest.approx(RESTART_RATE)
    assert rates.index(max(rates)) == pytest.approx(WARMUP_STEPS, abs=1)
    assert rates[-1] == pytest.approx(FINAL_RATE, abs=1e-2)
