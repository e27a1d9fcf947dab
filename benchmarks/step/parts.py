"""Time spent in each part of a step: matrix products, attention, LoRA.

The functions that do the work are wrapped only while a benchmark runs, so that serving contains no
timers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from vlora.atmm import op
from vlora.kernels import ops
from vlora.model import step_recordings
from vlora.model.attention import AttentionPlan

PRODUCTS, ATTENTION, LORA = "products", "attention", "lora"
PARTS = (PRODUCTS, ATTENTION, LORA)

_TIMED_FUNCTIONS: tuple[tuple[object, str, str], ...] = (
    (ops.Matrix, "__call__", PRODUCTS),
    (ops.Matrix, "gated", PRODUCTS),
    (AttentionPlan, "attend", ATTENTION),
    (op, "apply", LORA),
    (op, "bind_epilogue", LORA),
)
"""All timed functions as (owner, name, part). If a function returns a `partial`, calls of the
partial are timed, too. If a timed function calls another one, the time of the inner function counts
only for the inner function's part.
"""


@contextmanager
def timed_parts() -> Iterator[dict[str, float]]:
    """Yield the seconds that one thread spends in each part while the context is open."""
    spent = dict.fromkeys(PARTS, 0.0)

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            spent_before = sum(spent.values())
            started = time.perf_counter()
            try:
                result = function(*args, **options)
            finally:
                seconds = time.perf_counter() - started
                spent[part] += seconds - (sum(spent.values()) - spent_before)
            return timed(result, part) if isinstance(result, partial) else result

        return call

    with ExitStack() as stack:
        # Repeated calls of a recording do not pass through the timed functions.
        stack.enter_context(step_recordings.disabled())
        for owner, name, part in _TIMED_FUNCTIONS:
            stack.enter_context(patch.object(owner, name, timed(getattr(owner, name), part)))
        yield spent
