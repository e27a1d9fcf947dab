"""Requests of the engine's tests, and a sink that remembers what it is told."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from vlora.request import Output, Request
from vlora.sampling import SamplingParams

PATIENCE = 30.0
"""Seconds after which a test gives up waiting; nothing here takes one."""


class Collector:
    """A sink that remembers, and wakes who waits."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[Output]] = defaultdict(list)
        self._news = threading.Condition()

    def __call__(self, output: Output) -> None:
        with self._news:
            self.outputs[output.request_id].append(output)
            self._news.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(condition, PATIENCE), "nothing came"

    def last(self, request_id: str) -> Output:
        self.wait(lambda: any(output.finished for output in self.outputs[request_id]))
        return self.outputs[request_id][-1]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]


def request(request_id: str, max_tokens: int = 4, **fields: Any) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    values = {"prompt": "<s>what is it?", "sampling": params} | fields
    return Request(id=request_id, **values)


def endless(request_id: str, **fields: Any) -> Request:
    """Runs until it is ended (for a test's purposes)."""
    return request(request_id, max_tokens=900, **fields)
