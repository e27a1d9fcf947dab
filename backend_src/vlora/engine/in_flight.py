"""The in-flight requests of an engine: those that were added and have not ended."""

from __future__ import annotations

import bisect
import math

from vlora.engine.request_state import RequestState


class InFlightRequests:
    """Request states by id, and the requests' ids by deadline."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}
        self._by_deadline: list[tuple[float, str]] = []
        """(deadline, id) of the requests that have a deadline, in ascending order."""

    def __getitem__(self, request_id: str) -> RequestState:
        return self._states[request_id]

    def get(self, request_id: str) -> RequestState | None:
        return self._states.get(request_id)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._states)

    def add(self, state: RequestState) -> None:
        """Add a request; raise ValueError if its id is in use."""
        sequence = state.sequence
        if sequence.id in self._states:
            raise ValueError(f"request id {sequence.id!r} is in use already")
        self._states[sequence.id] = state
        if sequence.deadline < math.inf:
            bisect.insort(self._by_deadline, (sequence.deadline, sequence.id))

    def remove(self, state: RequestState) -> None:
        sequence = state.sequence
        del self._states[sequence.id]
        if sequence.deadline < math.inf:
            entry = (sequence.deadline, sequence.id)
            del self._by_deadline[bisect.bisect_left(self._by_deadline, entry)]

    def expired(self, now: float) -> list[RequestState]:
        """Return the requests whose deadline has passed, earliest deadline first."""
        end = bisect.bisect_right(self._by_deadline, now, key=lambda entry: entry[0])
        return [self._states[request_id] for _, request_id in self._by_deadline[:end]]

    def check_integrity(self, scheduled_ids: set[str]) -> None:
        """Raise AssertionError unless the ids equal `scheduled_ids` and all deadlines
        are listed.
        """
        assert scheduled_ids == set(self._states), scheduled_ids ^ set(self._states)
        sequences = (state.sequence for state in self._states.values())
        with_deadline = ((s.deadline, s.id) for s in sequences if s.deadline < math.inf)
        assert self._by_deadline == sorted(with_deadline)
