"""Proof of the bound on waits (decision 41) at a small size.

The test searches all states into which any sequence of arrivals can bring a policy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.support.policy_costs import FixedCosts
from vlora.engine.policies.base import Candidate, Policy
from vlora.engine.policies.paper import PaperPolicy
from vlora.engine.policies.predictive import Predictive
from vlora.engine.policies.unmerge_only import UnmergeOnly
from vlora.ids import BASE

MAX_WAIT = 2.5
"""Option of the policies, in seconds; a step takes one second."""
MAX_STEPS = 2
"""Maximum number of steps that a request needs."""
ADAPTERS = (0, 1, 2)


class Pending(NamedTuple):
    """A request that has not ended. wait: number of steps that it was ready and did not run."""

    slot: int
    steps: int
    wait: int = 0
    served: bool = False


State = tuple[tuple[Pending, ...], int]
"""Requests in order of arrival, and the live adapter: everything that these policies depend on."""


def arrivals(vacant: int) -> Iterator[tuple[Pending, ...]]:
    """Yield all arrivals that are possible before a step, up to `vacant` requests."""
    kinds = [Pending(slot, steps) for slot in ADAPTERS for steps in range(1, MAX_STEPS + 1)]
    for count in range(vacant + 1):
        yield from itertools.product(kinds, repeat=count)


def run_step(policy: Policy, requests: tuple[Pending, ...], live: int) -> State:
    """Return the state after one step."""
    ready = [
        Candidate(str(i), r.slot, float(i), float(r.wait), remaining=r.steps - 1)
        for i, r in enumerate(requests)
    ]
    choice = policy.choose(ready, live, 0.0)
    chosen = {int(r.id) for r in choice.order}
    assert chosen, "there is work, and no request runs"
    after = [
        r._replace(steps=r.steps - 1, served=True) if i in chosen else r._replace(wait=r.wait + 1)
        for i, r in enumerate(requests)
    ]
    return tuple(r for r in after if r.steps), choice.live


POLICIES = {
    "unmerge_only": lambda batch: UnmergeOnly(batch, MAX_WAIT),
    "paper": lambda batch: PaperPolicy(batch, 60.0, MAX_WAIT, FixedCosts()),
    "predictive": lambda batch: Predictive(batch, 100, MAX_WAIT, 0.1, FixedCosts()),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("queue", "batch"), [(3, 1), (3, 2)])
def test_no_sequence_of_arrivals_makes_a_request_wait_beyond_the_bound(
    name: str, queue: int, batch: int
) -> None:
    """Search all reachable states; there are finitely many because waits are bounded."""
    bound = MAX_WAIT + math.ceil(queue / batch) * MAX_STEPS + 1
    policy = POLICIES[name](batch)
    before_step: set[State] = {((), BASE)}
    after_step: set[State] = set()
    todo: list[State] = [((), BASE)]
    longest = 0
    while todo:
        present, live = todo.pop()
        for new in arrivals(queue - len(present)):
            requests = present + new
            if not requests or (requests, live) in before_step:
                continue
            before_step.add((requests, live))
            state = run_step(policy, requests, live)
            for r in state[0]:
                longest = max(longest, r.wait)
                assert r.served or r.wait <= bound, (present, new)
            if state not in after_step:
                after_step.add(state)
                todo.append(state)
    assert longest > 1, "no request had to wait"
