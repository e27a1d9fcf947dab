"""The accuracy-aware knowledge-fusion algorithm (§4.2.1, Fig. 10), and what we add to it.

The paper's heuristic, in its order: take the next item, train the open adapter with it, evaluate
every item fused so far. If all promises hold, keep the weights; if one is broken, roll the weights
back and open a new adapter with this item. `Options` selects what goes beyond it.

This module decides; a `Trainer` trains and evaluates. States are immutable, so a run that is killed
continues from the last one that was saved and takes the same decisions again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any, Protocol

from vlora.generation.spec import Item, Options, Spec


@dataclass(frozen=True)
class Packed:
    """One adapter of a run.

    number: from 1, in the order in which adapters are opened.
    version: number of the attempt that made its weights.
    items: names of the items that it holds, in the order of their fusion.
    scores: accuracy by item on the validation split.
    """

    number: int
    version: int
    items: tuple[str, ...]
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Attempt:
    """Result of training: accuracy by item on the validation split, and what it took."""

    version: int
    scores: Mapping[str, float]
    steps: int
    seconds: float


@dataclass(frozen=True)
class Event:
    """One decision, for the report.

    adapter: number of the adapter that was tried.
    broken: items whose promise the attempt did not keep; empty if it was kept.
    """

    item: str
    adapter: int
    attempt: Attempt
    broken: tuple[str, ...]


@dataclass(frozen=True)
class Merge:
    """One attempt to merge two adapters.

    versions: of the weights of both.
    broken: items whose promise the merged weights do not keep; empty if they replaced the two.
    """

    versions: tuple[int, int]
    attempt: Attempt
    broken: tuple[str, ...]


@dataclass(frozen=True)
class State:
    """Progress of a run.

    pending: items that are not packed yet, in order.
    unreachable: best accuracy of each item whose promise no adapter of its own keeps.
    """

    pending: tuple[str, ...]
    adapters: tuple[Packed, ...] = ()
    events: tuple[Event, ...] = ()
    merges: tuple[Merge, ...] = ()
    unreachable: Mapping[str, float] = field(default_factory=dict)

    @property
    def next_version(self) -> int:
        """Number of the next attempt."""
        return len(self.events) + len(self.merges) + 1

    def as_json(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> State:
        """Return a state that `as_json` has written."""
        return cls(
            pending=tuple(value["pending"]),
            adapters=tuple(
                Packed(one["number"], one["version"], tuple(one["items"]), one["scores"])
                for one in value["adapters"]
            ),
            events=tuple(
                Event(one["item"], one["adapter"], Attempt(**one["attempt"]), tuple(one["broken"]))
                for one in value["events"]
            ),
            merges=tuple(
                Merge(tuple(one["versions"]), Attempt(**one["attempt"]), tuple(one["broken"]))
                for one in value["merges"]
            ),
            unreachable=value["unreachable"],
        )


class Trainer(Protocol):
    """Something that trains and evaluates adapters."""

    def train(self, item: Item, onto: Packed | None, version: int) -> Attempt:
        """Train an adapter with `item` and evaluate all its items.

        onto: the adapter whose weights the attempt starts from; None for a new one.
        version: number under which the weights are stored; they depend on nothing else.
        """

    def merge(self, first: Packed, second: Packed, version: int) -> Attempt:
        """Merge two adapters without training and evaluate all their items."""

    def similarity(self, item: Item, others: Sequence[str]) -> float:
        """Return how similar `item` is to other items; a higher number means more similar."""


def broken_promises(spec: Spec, scores: Mapping[str, float]) -> tuple[str, ...]:
    """Return the items whose validation accuracy does not exceed their promise by the margin."""
    return tuple(
        name for name, score in scores.items() if score < required_score(spec, spec.item(name))
    )


def required_score(spec: Spec, item: Item) -> float:
    """Return the validation accuracy that an item must reach."""
    return min(1.0, item.required + spec.training.margin)


def may_share(spec: Spec, item: Item, adapter: Packed) -> bool:
    """Return whether an adapter can hold an item beside its others.

    An adapter has one head, for items of one task type (§4.2.2), and answers all requests of that
    task by its head; so no other item of the adapter may have that task.
    """
    others = [spec.item(name) for name in adapter.items]
    headed = {other.task for other in others if other.head}
    if item.head:
        return headed <= {item.task} and all(
            other.head for other in others if other.task == item.task
        )
    return item.task not in headed


def candidates(
    spec: Spec, options: Options, state: State, item: Item, trainer: Trainer
) -> list[Packed]:
    """Return the adapters to try for an item, in order: the newest one, or all, most similar
    first."""
    fitting = [adapter for adapter in state.adapters if may_share(spec, item, adapter)]
    if options.fit == "last":
        return [adapter for adapter in fitting if adapter is state.adapters[-1]]
    return sorted(
        fitting, key=lambda adapter: trainer.similarity(item, adapter.items), reverse=True
    )


def fuse_next(
    spec: Spec,
    options: Options,
    state: State,
    trainer: Trainer,
    save: Callable[[State], None] = lambda _: None,
) -> State:
    """Pack the next pending item and return the new state.

    save: called after each attempt that was rolled back, so that a killed run does not repeat it.
    """
    item = spec.item(state.pending[0])
    tried = {event.adapter for event in state.events if event.item == item.name and event.broken}
    for adapter in candidates(spec, options, state, item, trainer):
        if adapter.number in tried:
            continue
        attempt = trainer.train(item, adapter, state.next_version)
        event = Event(item.name, adapter.number, attempt, broken_promises(spec, attempt.scores))
        state = replace(state, events=(*state.events, event))
        if not event.broken:
            grown = Packed(
                adapter.number, attempt.version, (*adapter.items, item.name), attempt.scores
            )
            adapters = tuple(
                grown if one.number == adapter.number else one for one in state.adapters
            )
            return replace(state, adapters=adapters, pending=state.pending[1:])
        save(state)
    return _open_adapter(spec, state, item, trainer)


def _open_adapter(spec: Spec, state: State, item: Item, trainer: Trainer) -> State:
    """Train a new adapter for one item. If it cannot keep the promise, no adapter is opened."""
    number = 1 + max((adapter.number for adapter in state.adapters), default=0)
    attempt = trainer.train(item, None, state.next_version)
    event = Event(item.name, number, attempt, broken_promises(spec, attempt.scores))
    state = replace(state, events=(*state.events, event), pending=state.pending[1:])
    if event.broken:
        missed = {**state.unreachable, item.name: attempt.scores[item.name]}
        return replace(state, unreachable=missed)
    opened = Packed(number, attempt.version, (item.name,), attempt.scores)
    return replace(state, adapters=(*state.adapters, opened))


def merge_next(spec: Spec, state: State, trainer: Trainer) -> State | None:
    """Try to merge the next two adapters and return the new state; None if all were tried.

    Both weights are kept as they are unless the merged ones keep every promise.
    """
    tried = {merge.versions for merge in state.merges}
    for first, second in combinations(state.adapters, 2):
        versions = (first.version, second.version)
        if versions in tried or not _may_merge(spec, first, second):
            continue
        attempt = trainer.merge(first, second, state.next_version)
        merge = Merge(versions, attempt, broken_promises(spec, attempt.scores))
        state = replace(state, merges=(*state.merges, merge))
        if merge.broken:
            return state
        items = (*first.items, *second.items)
        merged = Packed(first.number, attempt.version, items, attempt.scores)
        others = tuple(one for one in state.adapters if one not in (first, second))
        return replace(state, adapters=(merged, *others))
    return None


def _may_merge(spec: Spec, first: Packed, second: Packed) -> bool:
    return all(may_share(spec, spec.item(name), first) for name in second.items)


def similar_order(names: Sequence[str], likeness: Callable[[str, str], float]) -> tuple[str, ...]:
    """Return the items so that each is followed by the most similar one that is left.

    The first is the one that is most similar to all others.
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
