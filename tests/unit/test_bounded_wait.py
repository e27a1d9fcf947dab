"""Tests of waits: the proof of their bound (decision 41) at a small size, and the waiting queue."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.replay import resident_adapter
from tests.support.policy_costs import FixedCosts
from vlora.adapters.handle import AdapterHandle
from vlora.engine.policies.base import Candidate, Policy
from vlora.engine.policies.credit import CreditPolicy
from vlora.engine.policies.predictive import Predictive
from vlora.engine.policies.unmerge_only import UnmergeOnly
from vlora.engine.scheduler import WaitingQueue
from vlora.engine.sequence import Sequence
from vlora.ids import BASE
from vlora.memory.kv_cache import BlockTable
from vlora.memory.pool import PagePool
from vlora.model.inputs import text_prompt
from vlora.request import Request
from vlora.sampling import SamplingParams

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
    "credit": lambda batch: CreditPolicy(batch, 0.5, 4.0, MAX_WAIT, FixedCosts()),
    "predictive": lambda batch: Predictive(batch, 100, MAX_WAIT, FixedCosts()),
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


ADAPTER_COUNT = 4


def waiting_sequence(adapter: AdapterHandle | None, arrival: int) -> Sequence:
    table = BlockTable(PagePool(1), 4)
    request = Request(id=str(arrival), prompt="", sampling=SamplingParams())
    sequence = Sequence(request, text_prompt([1]), adapter, 1, table)
    sequence.queue_at(float(arrival))
    return sequence


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "remove", "replace"]),
            st.integers(0, 20),
            st.integers(-1, ADAPTER_COUNT - 1),
        ),
        max_size=40,
    ),
    st.randoms(use_true_random=False),
)
def test_the_first_sequence_of_each_adapter_is_found_in_order_of_arrival(
    changes: list[tuple[str, int, int]], draw: object
) -> None:
    queue = WaitingQueue()
    adapters = {slot: resident_adapter(slot) for slot in range(-1, ADAPTER_COUNT)}
    held: list[Sequence] = []
    arrivals = list(range(len(changes)))
    draw.shuffle(arrivals)  # type: ignore[attr-defined]
    for arrival, (change, index, slot) in zip(arrivals, changes, strict=True):
        adapter = adapters[slot]
        if change == "add":
            held.append(waiting_sequence(adapter, arrival))
            queue.add(held[-1])
        elif held and change == "remove":
            queue.remove(held.pop(index % len(held)))
        elif held and adapter is not None:
            queue.use_adapter(held[index % len(held)], adapter)
        expected: dict[AdapterHandle, Sequence] = {}
        for sequence in sorted(held, key=lambda s: s.arrival):
            if sequence.adapter is not None:
                expected.setdefault(sequence.adapter, sequence)
        assert list(queue.first_of_each_adapter().items()) == list(expected.items())
