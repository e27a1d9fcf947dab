"""Requests for tests of the engine, functions that run them, and a sink that records outputs."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from vlora.engine.engine import Engine
from vlora.request import ImageFeatures, Output, Request
from vlora.sampling import SamplingParams

PATIENCE = 30.0
"""Seconds after which a test stops waiting. Nothing here should take one second."""
ENDLESS_TOKENS = 900


class Collector:
    """A sink that records outputs and wakes the threads that wait for them."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[Output]] = defaultdict(list)
        self._changed = threading.Condition()

    def __call__(self, output: Output) -> None:
        with self._changed:
            self.outputs[output.request_id].append(output)
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], patience: float = PATIENCE) -> None:
        """Wait until the condition holds. It is checked after each output."""
        with self._changed:
            assert self._changed.wait_for(condition, patience), "no such output came in time"

    def last(self, request_id: str, patience: float = PATIENCE) -> Output:
        """Wait for the last output of a request and return it."""
        self.wait(lambda: any(output.finished for output in self.outputs[request_id]), patience)
        return self.outputs[request_id][-1]

    def tokens(self, request_id: str) -> list[int]:
        """Return all tokens of a request so far."""
        return tokens_of(self.outputs[request_id])


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    """Return all tokens of a request's outputs."""
    return [token for output in outputs for token in output.token_ids]


def request(request_id: str, max_tokens: int = 4, **fields: Any) -> Request:
    """Return a greedy request that ends after `max_tokens` tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    values = {"prompt": "<s>what is it?", "sampling": params} | fields
    return Request(id=request_id, **values)


def endless(request_id: str, **fields: Any) -> Request:
    """Return a request that runs in a `paced` engine until the test ends it."""
    return request(request_id, max_tokens=ENDLESS_TOKENS, **fields)


def paced(engine: Engine) -> Engine:
    """Let each step of `engine` with an endless request take so long that the request outlasts
    PATIENCE, however late the test's thread runs. Return the engine."""
    step = engine.step

    def slow_step() -> list[Output]:
        running = engine.scheduler.running
        if any(one.request.sampling.max_tokens == ENDLESS_TOKENS for one in running):
            time.sleep(PATIENCE / ENDLESS_TOKENS)
        return step()

    engine.step = slow_step  # type: ignore[method-assign]
    return engine


def run_together(engine: Engine, *requests: Request) -> dict[str, list[Output]]:
    """Run requests that arrive together; return all outputs by request id."""
    outputs: dict[str, list[Output]] = {request.id: [] for request in requests}
    for item in requests:
        engine.add(engine.prepare(item), arrival=0.0)
    while not engine.idle:
        for output in engine.step():
            outputs[output.request_id].append(output)
    engine.check_integrity()
    assert engine.pool.kv == 0
    assert not engine._held_rows
    return outputs


def run_questions(
    engine: Engine,
    asked: Sequence[tuple[str, object, str | None]],
    features: Sequence[ImageFeatures | None],
    max_tokens: int,
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Run questions about images that arrive together, greedily, to their maximum length.

    asked: prompt, images (not used here) and adapter of each question.
    features: encoded images of each question, or None.

    Returns the tokens of each answer, and how many tokens of its prompt were found in the cache,
    both by the number of the question as a string.
    """
    requests = [
        request(str(number), max_tokens, prompt=prompt, adapter=adapter, images=own)
        for number, ((prompt, _, adapter), own) in enumerate(zip(asked, features, strict=True))
    ]
    outputs = run_together(engine, *requests)
    assert all(output.error is None for each in outputs.values() for output in each)
    tokens = {name: tokens_of(each) for name, each in outputs.items()}
    return tokens, {name: each[-1].num_cached_tokens for name, each in outputs.items()}


def answers(engine: Engine, batch: list[Request]) -> dict[str, tuple[list[int], str]]:
    """Run requests that arrive together. Return tokens and text of each by request id."""
    outputs = run_together(engine, *batch)
    return {
        name: (tokens_of(own), "".join(output.text for output in own))
        for name, own in outputs.items()
    }
