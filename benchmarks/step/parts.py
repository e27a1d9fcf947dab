"""Which part of a step takes how long: products, attention, LoRA, the rest.

The clock is put round the functions that do the work, for as long as it is asked for, so that
serving carries none of it.
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
from vlora.model.attention import AttentionPlan

PRODUCTS, ATTENTION, LORA = "products", "attention", "lora"
PARTS = (PRODUCTS, ATTENTION, LORA)

_PLACES: tuple[tuple[object, str, str], ...] = (
    (ops.Matrix, "__call__", PRODUCTS),
    (ops.Matrix, "gated", PRODUCTS),
    (AttentionPlan, "attend", ATTENTION),
    (op, "apply", LORA),
    (op, "bind_epilogue", LORA),
)
"""(owner, function, part) of all that is timed. What a function returns to be called later is timed
as well; inside another part it counts as its own."""


@contextmanager
def clocked() -> Iterator[dict[str, float]]:
    """Seconds spent in each part since it was entered; for one thread."""
    spent = dict.fromkeys(PARTS, 0.0)

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            inside = sum(spent.values())
            started = time.perf_counter()
            try:
                found = function(*args, **more)
            finally:
                seconds = time.perf_counter() - started
                spent[part] += seconds - (sum(spent.values()) - inside)
            return timed(found, part) if isinstance(found, partial) else found

        return call

    with ExitStack() as stack:
        for owner, name, part in _PLACES:
            stack.enter_context(patch.object(owner, name, timed(getattr(owner, name), part)))
        yield spent
