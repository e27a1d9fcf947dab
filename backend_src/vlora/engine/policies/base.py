"""The interface of scheduling policies: which requests run next, and which adapter is merged.

A policy is pure: values in, a `Choice` out. It uses no torch, no clock but the one it is given, and
no pages. The scheduler then walks the order and allocates pages and rows (`engine/scheduler.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol


class Order(Enum):
    """An order of the waiting requests."""

    ARRIVAL = auto()
    """First come, first served."""
    WAIT = auto()
    """Longest wait first."""
    PRIORITY = auto()
    """Lowest value of the priority first, then first come, first served."""
    DEADLINE = auto()
    """Earliest deadline first; requests without a deadline are left out."""


class Candidate(NamedTuple):
    """A request that the next step could compute: waiting or running, with its adapter resident.

    wait: total seconds ready but not scheduled. It does not grow while running and never resets.
    missing: tokens whose keys and values are still to be computed.
    context: tokens already computed.
    remaining: maximum number of tokens that the answer may still get.
    holds_pages: whether the request holds KV pages.
    deadline: on the engine's clock, in seconds.
    priority: lower values go first.
    adapter: name of the adapter, or None. Unlike the slot, it never passes to another adapter.
    """

    id: str
    slot: int
    arrival: float = 0.0
    wait: float = 0.0
    missing: int = 1
    context: int = 0
    remaining: int = 0
    holds_pages: bool = False
    deadline: float = math.inf
    priority: int = 0
    adapter: str | None = None


class Choice(NamedTuple):
    """Decision of a policy for one step.

    order: requests to run. Pages and rows are allocated in this order.
    live: slot of the adapter to be merged into the active weights, or BASE for none.
    max_rows: limit on prompt rows by request id, for requests that get fewer than fit the step.
    credits: credit in seconds by request id, if the policy computes credits.
    """

    order: tuple[Candidate, ...]
    live: int
    max_rows: dict[str, int] | None = None
    credits: dict[str, float] | None = None


class Costs(Protocol):
    """Predicted times that policies ask for, in seconds."""

    def steps(self, ready: Sequence[Candidate], live: int) -> list[float]:
        """Return, for each request, the time of a step that computes only what it is missing.

        live: slot of the adapter merged into the weights, or BASE.
        """
        ...

    def switch(self, live: int, to: int) -> float:
        """Return the time of replacing adapter `live` by adapter `to` in the weights."""
        ...

    def mergeable(self, slot: int) -> bool:
        """Return whether this adapter may be merged at all."""
        ...


class Policy(Protocol):
    """A rule that chooses the requests of the next step and the merged adapter."""

    max_batch: int
    """Maximum number of requests of a step."""
    uses_costs: bool
    """True if the policy uses predicted times, so that the engine has to be calibrated first."""
    orders: tuple[Order, ...]
    """Orders of the waiting requests whose first ones the policy needs to see."""

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        """Choose the requests of the next step.

        ready: at least one candidate, in order of arrival. It contains all requests that hold
            pages, and the first waiting requests in each of `orders`.
        live: slot of the adapter merged into the weights now, or BASE.
        now: seconds on the engine's clock.
        """
        ...


def ordered_union(
    first: Sequence[Candidate], everyone: Sequence[Candidate]
) -> tuple[Candidate, ...]:
    """Return the members of `first` that are in `everyone`, then the rest of `everyone`."""
    first_ids, all_ids = {r.id for r in first}, {r.id for r in everyone}
    return (
        *(r for r in first if r.id in all_ids),
        *(r for r in everyone if r.id not in first_ids),
    )
