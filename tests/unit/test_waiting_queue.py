"""Tests of the scheduler's queue of waiting sequences."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.replay import resident_adapter
from vlora.adapters.handle import AdapterHandle
from vlora.engine.scheduler import WaitingQueue
from vlora.engine.sequence import Sequence
from vlora.memory.kv_cache import BlockTable
from vlora.memory.pool import PagePool
from vlora.model.inputs import text_prompt
from vlora.request import Request
from vlora.sampling import SamplingParams

ADAPTERS = 4


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
            st.integers(-1, ADAPTERS - 1),
        ),
        max_size=40,
    ),
    st.randoms(use_true_random=False),
)
def test_the_first_sequence_of_each_adapter_is_found_in_order_of_arrival(
    changes: list[tuple[str, int, int]], draw: object
) -> None:
    queue = WaitingQueue()
    adapters = {slot: resident_adapter(slot) for slot in range(-1, ADAPTERS)}
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
