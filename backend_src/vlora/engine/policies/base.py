"""The interface of scheduling policies. A policy chooses the next step's requests and live adapter.

A policy is pure. It uses no torch, no pages, and no clock but the one it is given. The scheduler
then allocates pages and rows in the chosen order.

To add a policy, write a module in this folder, whose name is the policy's, with a function `make`
that takes (options, costs). Code outside the package, such as the baselines of the benchmarks,
calls `register_policy` instead.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

from vlora.config import POLICIES, Options, check_policy


class Order(Enum):
    """An order of the waiting requests."""

    ARRIVAL = auto()  # First come, first served.
    WAIT = auto()  # Longest wait first.
    PRIORITY = auto()  # Lowest value of `priority` first, then arrival.
    DEADLINE = auto()  # Earliest deadline first; requests without a deadline are left out.


class Candidate(NamedTuple):
    """A waiting or running request that the next step could compute. Its adapter is resident.

    arrival, deadline: seconds on the engine's clock.
    wait: total seconds since the arrival in which the request was not in a step; never reset.
    missing: number of known tokens whose keys and values are still to be computed.
    context: number of tokens that are computed already.
    remaining: maximum number of tokens that the answer may still get.
    priority: requests with lower values go first.
    adapter: its name, which is never reused for another adapter, unlike its slot.
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

    order: requests to compute. Pages and rows are allocated in this order.
    live: slot of the adapter to merge into the active weights, or BASE for none.
    max_rows: maximum number of rows by request id, if limited.
    credits: credit in seconds by request id, if the policy computes credits.
    """

    order: tuple[Candidate, ...]
    live: int
    max_rows: dict[str, int] | None = None
    credits: dict[str, float] | None = None


class Costs(Protocol):
    """Predicted times that policies use, in seconds."""

    def steps(self, ready: Sequence[Candidate], live: int) -> list[float]:
        """Return the predicted time of a step with only the missing tokens, for each request."""
        ...

    def switch(self, live: int, to: int) -> float:
        """Return the time of replacing adapter `live` by adapter `to` in the active weights."""
        ...

    def products(self, rows: int, answers: int) -> float:
        """Return the time of the matrix products of a step with these rows and answers."""
        ...

    def mergeable(self, slot: int) -> bool:
        """Return whether the adapter in this slot may be merged."""
        ...


class Policy(Protocol):
    """A rule that chooses the requests of the next step and the adapter to merge."""

    max_batch: int
    uses_costs: bool  # If true, the engine calibrates its cost model at the start.
    merges: bool  # If false, no memory is set aside for merged weights.
    orders: tuple[Order, ...]  # The policy sees the first waiting requests in each.

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        """Choose the requests of the next step and its live adapter.

        ready: at least one candidate, in order of arrival. It contains all requests that hold pages
            and have tokens to compute, and the first waiting requests in each of `orders`.
        live: slot of the adapter in the active weights now, or BASE.
        now: seconds on the engine's clock.
        """
        ...


# A request is urgent if the time to its deadline is at most this multiple of the predicted time of
# its remaining work, alone. With 2, 30 % more deadlines were missed; with 6, requests without a
# deadline waited longer.
URGENT_FACTOR = 4.0
NOT_PRESSING = (0, math.inf)


def service_rank(r: Candidate, now: float, max_wait: float, costs: Costs) -> tuple[float, ...]:
    """Return a sort key: overdue requests, then urgent deadlines, priorities, begun ones, arrivals.

    The first two numbers are below NOT_PRESSING if the request is overdue, as it has waited for
    more than `max_wait` seconds, or urgent.
    """
    remaining = 0.0
    if r.deadline < math.inf:
        remaining = costs.products(r.missing, 1) + r.remaining * costs.products(1, 1)
    is_urgent = r.deadline - now <= URGENT_FACTOR * remaining
    is_overdue = r.wait > max_wait
    deadline = r.deadline if is_urgent else math.inf
    return -is_overdue, deadline, 0 if is_overdue else r.priority, not r.holds_pages, r.arrival


def register_policy(name: str, factory: str) -> None:
    """Make `name` a valid `policy`, made by `factory`, "module:function" with (options, costs)."""
    POLICIES[name] = factory


def make_policy(options: Options, costs: Costs) -> Policy:
    """Return a new policy of the kind `options.policy`. Raises InvalidArgument if unknown."""
    check_policy(options.policy)
    module, _, function = POLICIES[options.policy].partition(":")
    policy: Policy = getattr(importlib.import_module(module), function)(options, costs)
    return policy
