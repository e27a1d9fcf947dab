"""An engine that repeats one step on sequences whose context was never computed.

It calls `Engine.step` and then sets each sequence back, so that the same step can be timed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.dtypes import MODEL_TYPES
from benchmarks.llava import Checkpoint, prompt
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.plan import StepPlan
from vlora.engine.sequence import Sequence as EngineSequence
from vlora.ids import BASE
from vlora.request import Request
from vlora.sampling import SamplingParams

BLOCK = 16
FILL_ELEMENTS = 1 << 22
"""Number of distinct random values; they are repeated to fill the pages."""


class SyntheticModel:
    """Engine with one checkpoint, whose steps can be repeated.

    dtype: key of MODEL_TYPES.
    kv_tokens: number of positions that its pages must hold.
    max_rows: maximum number of rows in a step.
    text: function that takes a number of tokens and the number of a prompt, and returns the prompt.
        If None, the checkpoint must be a generated one, and the prompts of `llava` are used.
    device: as in the engine's options.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        kv_tokens: int,
        max_rows: int,
        adapters: bool,
        text: Callable[[int, int], str] | None = None,
        device: str = "cpu",
    ) -> None:
        self.sizes = checkpoint.sizes
        self._text = text or (lambda length, number: prompt(length - 1, number, self.sizes))
        self.engine = Engine(
            Options(
                model=checkpoint.folder,
                adapters=checkpoint.adapters if adapters else None,
                **MODEL_TYPES[dtype].options,
                device=device,
                policy="unmerge_only",
                max_num_seqs=64,
                max_num_batched_tokens=max(max_rows, 64),
                block_size=BLOCK,
                kv_cache_tokens=kv_tokens,
                enable_prefix_caching=False,
            )
        )
        names = checkpoint.adapter_names if adapters else []
        self.slots = [self.engine.adapters.slot(name) for name in names]
        handles = map(self.engine.adapters.handle, names)
        self._handles = dict(zip(self.slots, handles, strict=True))
        fill_with_random(self.engine.memory.kv_cache.cache)
        self._numbers = itertools.count()
        self._staged: list[tuple[EngineSequence, int, int]] = []

    def stage(self, requests: int, length: int, computed: int) -> None:
        """Replace all requests by `requests` new ones.

        Each has `length` tokens, of which the first `computed` count as computed.
        """
        for request_id in self.engine.request_ids:
            self.engine.abort(request_id)
        self._staged = []
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        for _ in range(requests):
            number = next(self._numbers)
            text = self._text(length, number)
            state = self.engine.prepare(Request(f"bench-{number}", text, params))
            assert len(state.sequence.tokens) == length, "the prompt has another length"
            self.engine.add(state, float(number))
            state.sequence.computed = computed
            self._staged.append((state.sequence, length, computed))

    def step(self, slots: Sequence[int]) -> Callable[[], None]:
        """Return a function that runs one step of all staged requests, request i with slots[i]."""
        assert len(slots) == len(self._staged)

        def step_once() -> None:
            queue = self.engine.scheduler.queue
            for (sequence, _, _), slot in zip(self._staged, slots, strict=True):
                if sequence in queue.by_arrival:
                    queue.use_adapter(sequence, self._handles.get(slot))
                else:
                    sequence.adapter = self._handles.get(slot)
            outputs = self.engine.step()
            assert len(outputs) == len(self._staged), "the step had other rows than those staged"
            for sequence, length, computed in self._staged:
                del sequence.tokens[length:]
                sequence.computed = computed

        return step_once

    @contextmanager
    def live_adapter(self, live: int) -> Iterator[None]:
        """Make this slot, or BASE, the live adapter of all steps while the context is open."""
        scheduler = self.engine.scheduler
        schedule = scheduler.schedule

        def with_live(*arguments: Any) -> StepPlan:
            return replace(schedule(*arguments), live=live)

        with patch.object(scheduler, "schedule", with_live):
            yield

    def mix(self, requests: int, distinct: int) -> list[int]:
        """Return a slot per request. The requests cycle through `distinct` adapters, or all use
        the base model if `distinct` is 0."""
        if distinct == 0:
            return [BASE] * requests
        return [self.slots[i % distinct] for i in range(requests)]


def fill_with_random(cache: torch.Tensor) -> None:
    """Fill all pages with random values. Untouched pages would not be in memory at all."""
    flat = cache.view(-1)
    drawn = torch.randn(min(FILL_ELEMENTS, flat.numel())).to(cache.dtype)
    for start in range(0, flat.numel(), FILL_ELEMENTS):
        part = flat[start : start + FILL_ELEMENTS]
        part.copy_(drawn[: part.numel()])
