"""A real engine held at one point: sequences with a context that was never computed.

Steps through `Engine.step`, then takes each sequence back to where it was, so that the same step
can be timed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from benchmarks.llava import Checkpoint, prompt
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.plan import StepPlan
from vlora.ids import BASE
from vlora.request import Request
from vlora.sampling import SamplingParams

if TYPE_CHECKING:
    from vlora.engine.sequence import Sequence as EngineSequence

BLOCK = 16
FILL = 1 << 22
"""Elements of the random values that the pages are filled with, again and again."""
NAMES = {"fp32": "float32", "bf16": "bfloat16"}
"""Types, as the benches and as the options call them."""


class TestBed:
    """One checkpoint in an engine of its own. kv_tokens: positions its pages must hold."""

    __test__ = False  # no test of pytest's

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, kv_tokens: int, most_rows: int, adapters: bool
    ) -> None:
        self.sizes = checkpoint.sizes
        self.engine = Engine(
            Options(
                model=checkpoint.folder,
                adapters=checkpoint.adapters if adapters else None,
                dtype=NAMES[dtype],
                policy="unmerge_only",
                max_num_seqs=64,
                max_num_batched_tokens=max(most_rows, 64),
                block_size=BLOCK,
                kv_cache_tokens=kv_tokens,
                enable_prefix_caching=False,
            )
        )
        names = checkpoint.adapter_names if adapters else []
        self.slots = [self.engine.adapters.slot(name) for name in names]
        handles = map(self.engine.adapters.handle, names)
        self._handles = dict(zip(self.slots, handles, strict=True))
        fill(self.engine.memory.kv_cache.cache)
        self._numbers = itertools.count()
        self._staged: list[tuple[EngineSequence, int, int]] = []

    def stage(self, requests: int, length: int, computed: int) -> None:
        """`requests` requests of `length` known tokens, the first `computed` of them done."""
        for live in self.engine.live_ids:
            self.engine.abort(live)
        self._staged = []
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        for _ in range(requests):
            number = next(self._numbers)
            text = prompt(length - 1, number, self.sizes)
            state = self.engine.prepare(Request(f"bench-{number}", text, params))
            self.engine.add(state, float(number))
            state.sequence.computed = computed
            self._staged.append((state.sequence, length, computed))

    def step(self, slots: Sequence[int]) -> Callable[[], None]:
        """One step of all that is staged, request i through adapter slot i of `slots`."""
        assert len(slots) == len(self._staged)

        def once() -> None:
            for (sequence, _, _), slot in zip(self._staged, slots, strict=True):
                sequence.adapter = self._handles.get(slot)
            outputs = self.engine.step()
            assert len(outputs) == len(self._staged), "a step of more or fewer rows than staged"
            for sequence, known, computed in self._staged:
                del sequence.tokens[known:]
                sequence.computed = computed

        return once

    @contextmanager
    def holding(self, live: int) -> Iterator[None]:
        """Meanwhile every step runs with this adapter in the weights, or with none (BASE)."""
        scheduler = self.engine.scheduler
        schedule = scheduler.schedule

        def with_live(*given: Any) -> StepPlan:
            return replace(schedule(*given), live=live)

        with patch.object(scheduler, "schedule", with_live):
            yield

    def mix(self, requests: int, distinct: int) -> list[int]:
        """Slots of requests that share `distinct` adapters evenly; 0: the base model."""
        if distinct == 0:
            return [BASE] * requests
        return [self.slots[i % distinct] for i in range(requests)]


def fill(cache: torch.Tensor) -> None:
    """Random values in all pages: zeros would be pages that were never there."""
    flat = cache.view(-1)
    drawn = torch.randn(min(FILL, flat.numel())).to(cache.dtype)
    for start in range(0, flat.numel(), FILL):
        part = flat[start : start + FILL]
        part.copy_(drawn[: part.numel()])
