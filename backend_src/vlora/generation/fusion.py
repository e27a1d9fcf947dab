"""The paper's accuracy-aware knowledge-fusion algorithm (§4.2.1, Fig. 10), and our additions.

Each knowledge item has a promise: the accuracy that it requires. The paper's heuristic trains the
newest adapter with the next item, and evaluates all items of that adapter. If a promise is broken,
the previous weights are restored, and a new adapter is trained with this item.
`spec.PackingOptions` selects our additions.

This module makes the decisions, and a `Trainer` trains and evaluates. A state is immutable. A run
that was killed continues from the last saved state and makes the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any, Protocol

from pydantic import TypeAdapter

from vlora.generation.spec import Item, PackingOptions, Spec

# A score counts as near its goal if it is below the goal by at most this number of standard errors.
NEAR_ERRORS = 2.0
# Two items conflict if an attempt to join them left a score below its goal by more than this number
# of standard errors.
HOPELESS_ERRORS = 5.0


@dataclass(frozen=True)
class Packed:
    """One adapter of a run, with the items that are packed into it.

    number: number of the adapter, counted from 1 in order of creation.
    version: number of the attempt that produced its weights.
    scores: accuracy of each item on the validation split.
    """

    number: int
    version: int
    items: tuple[str, ...]
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Attempt:
    """Result of one training: accuracy of each item on the validation split, and its cost."""

    version: int
    scores: Mapping[str, float]
    steps: int
    seconds: float


@dataclass(frozen=True)
class Event:
    """One attempt to add an item to an adapter.

    broken: items whose promise the attempt broke; () if it was accepted.
    """

    item: str
    adapter: int
    attempt: Attempt
    broken: tuple[str, ...]


@dataclass(frozen=True)
class Merge:
    """One attempt to merge two adapters.

    versions: versions of the two adapters.
    broken: items whose promise the merged weights break; () if the merged adapter replaced the two.
    """

    versions: tuple[int, int]
    attempt: Attempt
    broken: tuple[str, ...]


@dataclass(frozen=True)
class RunState:
    """Progress of a run.

    pending: items that are not packed yet, in order.
    unreachable: best accuracy of each item that misses its required accuracy even in an adapter
        without other items.
    """

    pending: tuple[str, ...]
    adapters: tuple[Packed, ...] = ()
    events: tuple[Event, ...] = ()
    merges: tuple[Merge, ...] = ()
    unreachable: Mapping[str, float] = field(default_factory=dict)

    @property
    def decisions(self) -> list[Event | Merge]:
        return [*self.events, *self.merges]

    @property
    def next_version(self) -> int:
        return len(self.decisions) + 1

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunState:
        return TypeAdapter(cls).validate_python(value)


class Trainer(Protocol):
    """Trains and evaluates adapters."""

    def train(self, item: Item, onto: Packed | None, version: int) -> Attempt:
        """Train an adapter with `item` and evaluate all items of the adapter.

        onto: adapter whose weights the attempt starts from; None for a new adapter.
        version: number of the stored weights, which determines all random numbers.
        """

    def merge(self, first: Packed, second: Packed, version: int, *, train: bool) -> Attempt:
        """Merge two adapters and evaluate all their items.

        train: whether to train the merged weights on all these items if a promise is broken.
        """

    def similarity(self, item: Item, others: Sequence[str]) -> float:
        """Return how similar `item` is to other items. A higher number means more similar."""


@dataclass(frozen=True)
class Goal:
    """Validation accuracy from 0 to 1 that an item must reach.

    error: standard error of its measurement on the validation split.
    """

    accuracy: float
    error: float

    def nearly_reached(self, score: float) -> bool:
        """Return whether a score is so close that more training may reach the goal."""
        return score >= self.accuracy - NEAR_ERRORS * self.error


Goals = Mapping[str, Goal]  # Goal by item.


def goals_of(spec: Spec, examples: Mapping[str, int]) -> Goals:
    """Return the goal of each item: its required accuracy plus `margin` standard errors.

    examples: number of validation examples of each item.
    """
    goals = {}
    for item in spec.items:
        error = math.sqrt(item.required * (1 - item.required) / examples[item.name])
        goals[item.name] = Goal(min(1.0, item.required + spec.training.margin * error), error)
    return goals


def broken_promises(goals: Goals, scores: Mapping[str, float]) -> tuple[str, ...]:
    """Return the items whose validation accuracy is below their goal."""
    return tuple(name for name, score in scores.items() if score < goals[name].accuracy)


def may_share(spec: Spec, item: Item, adapter: Packed) -> bool:
    """Return whether an adapter may contain `item` in addition to its present items."""
    # An adapter has at most one vision task head, for items of one task (§4.2.2). It answers all
    # requests of that task, so no item without a head may have the same task.
    others = [spec.item(name) for name in adapter.items]
    headed = {other.task for other in others if other.head}
    if item.head:
        return headed <= {item.task} and all(one.head for one in others if one.task == item.task)
    return item.task not in headed


def candidates(
    spec: Spec, options: PackingOptions, state: RunState, item: Item, trainer: Trainer
) -> list[Packed]:
    """Return the adapters to try for an item: the newest, or all with the most similar first."""
    fitting = [adapter for adapter in state.adapters if may_share(spec, item, adapter)]
    if options.fit == "last":
        return [adapter for adapter in fitting if adapter is state.adapters[-1]]
    return sorted(fitting, key=lambda one: trainer.similarity(item, one.items), reverse=True)


def fuse_next(
    spec: Spec,
    options: PackingOptions,
    goals: Goals,
    state: RunState,
    trainer: Trainer,
    save: Callable[[RunState], None] = lambda _: None,
) -> RunState:
    """Pack the next pending item into an adapter, and return the new state.

    save: called with the state after each rejected attempt, which a killed run does not repeat.
    """
    item = spec.item(state.pending[0])
    tried = {event.adapter for event in state.events if event.item == item.name and event.broken}
    for adapter in candidates(spec, options, state, item, trainer):
        if adapter.number in tried:
            continue
        attempt = trainer.train(item, adapter, state.next_version)
        event = Event(item.name, adapter.number, attempt, broken_promises(goals, attempt.scores))
        state = replace(state, events=(*state.events, event))
        if not event.broken:
            items = (*adapter.items, item.name)
            grown = Packed(adapter.number, attempt.version, items, attempt.scores)
            adapters = tuple(grown if one is adapter else one for one in state.adapters)
            return replace(state, adapters=adapters, pending=state.pending[1:])
        save(state)
    return _open_adapter(goals, state, item, trainer)


def _open_adapter(goals: Goals, state: RunState, item: Item, trainer: Trainer) -> RunState:
    """Train a new adapter for one item. If it misses the goal, record the item as unreachable."""
    number = 1 + max((adapter.number for adapter in state.adapters), default=0)
    attempt = trainer.train(item, None, state.next_version)
    event = Event(item.name, number, attempt, broken_promises(goals, attempt.scores))
    state = replace(state, events=(*state.events, event), pending=state.pending[1:])
    if event.broken:
        missed = {**state.unreachable, item.name: attempt.scores[item.name]}
        return replace(state, unreachable=missed)
    opened = Packed(number, attempt.version, (item.name,), attempt.scores)
    return replace(state, adapters=(*state.adapters, opened))


def merge_next(
    spec: Spec, options: PackingOptions, goals: Goals, state: RunState, trainer: Trainer
) -> RunState | None:
    """Try to merge the next two adapters, and return the new state; None if all pairs were tried.

    Pairs with the fewest items come first. If the merged adapter breaks a promise, the two adapters
    remain unchanged.
    """
    tried = {merge.versions for merge in state.merges}
    pairs = [
        (first, second)
        for first, second in combinations(state.adapters, 2)
        if (first.version, second.version) not in tried
        and all(may_share(spec, spec.item(name), first) for name in second.items)
    ]
    if not pairs:
        return None
    first, second = min(pairs, key=lambda pair: len(pair[0].items) + len(pair[1].items))
    train = options.merge_training and not _hopeless(goals, state, first, second)
    attempt = trainer.merge(first, second, state.next_version, train=train)
    merge = Merge((first.version, second.version), attempt, broken_promises(goals, attempt.scores))
    state = replace(state, merges=(*state.merges, merge))
    if merge.broken:
        return state
    merged = Packed(first.number, attempt.version, (*first.items, *second.items), attempt.scores)
    others = tuple(one for one in state.adapters if one not in (first, second))
    return replace(state, adapters=(merged, *others))


def _hopeless(goals: Goals, state: RunState, first: Packed, second: Packed) -> bool:
    """Return whether an item of one adapter was far below its goal when tried in the other."""
    items = {first.number: second.items, second.number: first.items}
    return any(
        event.attempt.scores[name] < goals[name].accuracy - HOPELESS_ERRORS * goals[name].error
        for event in state.events
        if event.item in items.get(event.adapter, ())
        for name in event.broken
    )


def similar_order(names: Sequence[str], likeness: Callable[[str, str], float]) -> tuple[str, ...]:
    """Return the items in a greedy order: each is followed by the most similar remaining item.

    The first item is the one with the largest sum of similarities to all others.
    """
    left = list(names)
    order: list[str] = []
    while left:
        against = order[-1:] or left
        following = max(
            left, key=lambda name: sum(likeness(name, other) for other in against if other != name)
        )
        left.remove(following)
        order.append(following)
    return tuple(order)
