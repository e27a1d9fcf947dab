"""The bound on waits (decision 41), proved at a small size: every state that any adversary brings a
policy to, whatever it sends and however long it goes on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.unit.test_policy import Costs
from vlora.engine.policies.base import Candidate, Policy
from vlora.engine.policies.credit import CreditPolicy, default_credit
from vlora.engine.policies.predictive import Predictive
from vlora.engine.policies.unmerge_only import UnmergeOnly
from vlora.ids import BASE

MAX_WAIT = 2.5
"""Seconds; a step takes one."""
STEPS = 2
"""That a request may need."""
ADAPTERS = (0, 1, 2)


class Asked(NamedTuple):
    """A request that has not ended. wait: steps that it was ready and did not run."""

    slot: int
    left: int
    wait: int = 0
    served: bool = False


State = tuple[tuple[Asked, ...], int]
"""Who is there, in order of arrival, and what is live: all that these policies go by."""


def arrivals(vacant: int) -> Iterator[tuple[Asked, ...]]:
    """Whatever may come before a step, up to as many as the queue still takes."""
    kinds = [Asked(slot, left) for slot in ADAPTERS for left in range(1, STEPS + 1)]
    for count in range(vacant + 1):
        yield from itertools.product(kinds, repeat=count)


def after(policy: Policy, here: tuple[Asked, ...], live: int) -> State:
    ready = [
        Candidate(str(i), one.slot, float(i), float(one.wait), remaining=one.left - 1)
        for i, one in enumerate(here)
    ]
    choice = policy.choose(ready, live, 0.0)
    chosen = {int(r.id) for r in choice.order}
    assert chosen, "there is work, and nobody runs"
    found = [
        one._replace(left=one.left - 1, served=True)
        if i in chosen
        else one._replace(wait=one.wait + 1)
        for i, one in enumerate(here)
    ]
    return tuple(one for one in found if one.left), choice.live


POLICIES = {
    "unmerge_only": lambda batch: UnmergeOnly(batch, MAX_WAIT),
    "credit": lambda batch: CreditPolicy(default_credit(batch, 0.5, 4.0, MAX_WAIT), Costs()),
    "predictive": lambda batch: Predictive(batch, 100, MAX_WAIT, Costs()),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("places", "batch"), [(3, 1), (3, 2)])
def test_no_adversary_makes_a_request_wait_beyond_the_bound(
    name: str, places: int, batch: int
) -> None:
    """All states that can be reached: there are finitely many just because waits are bounded."""
    bound = MAX_WAIT + math.ceil(places / batch) * STEPS + 1
    policy = POLICIES[name](batch)
    begun: set[State] = {((), BASE)}
    ended: set[State] = set()
    todo: list[State] = [((), BASE)]
    longest = 0
    while todo:
        there, live = todo.pop()
        for news in arrivals(places - len(there)):
            here = there + news
            if not here or (here, live) in begun:
                continue
            begun.add((here, live))
            state = after(policy, here, live)
            for one in state[0]:
                longest = max(longest, one.wait)
                assert one.served or one.wait <= bound, (there, news)
            if state not in ended:
                ended.add(state)
                todo.append(state)
    assert longest > 1, "nobody had to wait"
