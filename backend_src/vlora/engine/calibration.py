"""Measurement of the cost model's profile (`engine/cost.py`), which is then stored on disk.

The measured steps run on the engine's runner and switcher and overwrite pages of the pool. They
must therefore run before the first request. A row of a step is one token of one request.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vlora import backends, native
from vlora.adapters.residency import Slots
from vlora.atmm.cpu import Cpu
from vlora.atmm.tiles import DTYPE_NAMES
from vlora.atomic_file import replace_text
from vlora.engine.cost import AdapterSize, CostModel, Profile
from vlora.ids import BASE, order_of
from vlora.memory.kv_cache import pages_for
from vlora.model.chunk import Chunk
from vlora.model.inputs import text_prompt
from vlora.model.runner import Runner
from vlora.model.switcher import Switcher

log = logging.getLogger(__name__)

# Version of the profile's format and of a step's products. Other versions are measured again.
VERSION = 4
# Numbers of rows of the steps that measure the matrix products, in this order.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REPEATS = 3
MAX_STEP_SECONDS = 0.5  # Total time of one step's measurements after which it is not repeated.
BUDGET_SECONDS = 4.0  # Time of measuring after which the rest of `ROWS` is skipped.
DECODE_REQUESTS = 16
DISTINCT_ADAPTERS = 8  # Maximum rows of the step in which each has a different adapter.
SHORT_CONTEXT, LONG_CONTEXT = 16, 512  # Contexts, in tokens, for the cost of attention.
CHUNK_ROWS = 64


def cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vlora" / "cost"


def load_or_measure(
    key: Sequence[object],
    measure: Callable[[], Profile],
    root: Path | None = None,
    *,
    force: bool = False,
) -> Profile:
    """Return the stored profile for `key`, or measure and store it.

    A profile is valid for one machine, number of threads and choice of kernels. A file that cannot
    be read or written is logged and otherwise ignored.

    key: JSON values that identify the model and the adapters.
    """
    machine = (Cpu.here().name, torch.get_num_threads(), *_kernels())
    name = hashlib.sha256(json.dumps([VERSION, *machine, *key]).encode()).hexdigest()[:16]
    path = (root or cache_root()) / f"{name}.json"
    try:
        if not force:
            return read_profile(json.loads(path.read_text()))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("the cost profile %s is measured again: %r", path, error)
    profile = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(asdict(profile)))
    except OSError as error:
        log.warning("the cost profile is not stored: %s", error)
    return profile


def _kernels() -> list[str]:
    served = [backends.backend_of("atmm"), backends.backend_of("kernels")]
    if "cpu" not in served:
        return [*served]
    runtime = native.kernels().runtime
    return [*served, runtime.isa(), *(runtime.isa(dtype) for dtype in DTYPE_NAMES)]


def read_profile(value: Any) -> Profile:
    """Return the profile in a JSON object. Raise ValueError, TypeError or KeyError if invalid."""
    fields = dict(value)
    products = tuple((int(rows), float(seconds)) for rows, seconds in fields.pop("products"))
    fixed, per_product = (float(number) for number in fields.pop("merge"))
    if len(products) < 2 or min(seconds for _, seconds in products) <= 0:
        raise ValueError("a profile needs the times of at least two steps, all above 0")
    numbers = {name: float(number) for name, number in fields.items()}
    return Profile(products, merge=(fixed, per_product), **numbers)


class AdapterSizes:
    """Callable that returns the size of the adapter in a slot. Each size is computed once."""

    def __init__(self, adapters: Slots) -> None:
        self._adapters = adapters
        self._by_digest: dict[str, AdapterSize] = {}

    def __call__(self, slot: int) -> AdapterSize:
        adapter = self._adapters.adapter(slot)
        size = self._by_digest.get(adapter.info.digest)
        if size is None:
            pairs = adapter.pairs.values()
            factors = sum(a.numel() + b.numel() for a, b in pairs)
            product = sum(b.numel() * a.shape[1] for a, b in pairs)
            size = self._by_digest[adapter.info.digest] = AdapterSize(factors, product)
        return size


class SyntheticSteps:
    """Times steps of synthetic requests, which overwrite the given pages of `block` tokens."""

    def __init__(
        self, runner: Runner, switcher: Switcher, pages: Sequence[int], block: int, max_rows: int
    ) -> None:
        self._runner = runner
        self._switcher = switcher
        self._pages = pages
        self._block = block
        self.max_rows = max_rows

    def step(self, slots: Sequence[int], rows: int, context: int) -> float:
        """Return the shortest time in seconds of up to REPEATS repeats of a step, after a warm-up.

        slots: slot of each request's adapter, or BASE.
        rows, context: numbers of new and of earlier tokens of each request.
        """
        chunks = self._chunks(sorted(slots, key=lambda s: order_of(s, BASE)), rows, context)
        self._runner.compute(chunks)
        times: list[float] = []
        while len(times) < REPEATS and sum(times) < MAX_STEP_SECONDS:
            started = time.perf_counter()
            self._runner.compute(chunks)
            times.append(time.perf_counter() - started)
        return min(times)

    def max_context(self, requests: int) -> int:
        """Return the maximum context in tokens if `requests` requests share the pages equally."""
        return len(self._pages) // requests * self._block

    def merge(self, slot: int, other: int) -> float:
        """Merge the adapter in `slot` REPEATS times and return the shortest time in seconds.

        other: slot of another adapter, which is merged before each repeat so that the merged
            weights of `slot` are not reused. If equal to `slot`, preparing the merge is timed too.
        """
        times = []
        for _ in range(REPEATS):
            self._switcher.switch(other)
            self._switcher.switch(BASE)
            if slot == other:
                self._switcher.forget(slot)
            started = time.perf_counter()
            self._switcher.switch(slot)
            times.append(time.perf_counter() - started)
            self._switcher.switch(BASE)
        return min(times)

    def _chunks(self, slots: Sequence[int], rows: int, context: int) -> list[Chunk]:
        pages_each = pages_for(context + rows, self._block)
        chunks = []
        for i, slot in enumerate(slots):
            ids = [(7 * i + n) % 97 for n in range(rows)]
            first = i * pages_each
            assert first + pages_each <= len(self._pages), "the pool is too small for this step"
            chunks.append(
                Chunk(
                    sequence_id=f"calibration {i}",
                    slot=slot,
                    row=i * rows,
                    start=context,
                    tokens=tuple(ids),
                    prompt=text_prompt(range(context + rows)),
                    pages=tuple(self._pages[first : first + pages_each]),
                    completes=True,
                )
            )
        return chunks


@dataclass(frozen=True)
class Calibration:
    """Measures a profile of the machine with synthetic steps.

    slots, mergeable: slots of all adapters, and of those that may be merged.
    head: number of weights in the LM head, divided by the number of all other weights.
    max_context: maximum context of a request, in tokens.
    """

    steps: SyntheticSteps
    slots: Sequence[int]
    mergeable: Sequence[int]
    sizes: Callable[[int], AdapterSize]
    head: float
    max_context: int

    def load_or_measure(self, model: object, *, force: bool) -> Profile:
        """Return the stored profile for these adapters and the model's `repr`, or measure it."""
        sizes = [sorted(self.sizes(s) for s in slots) for slots in (self.slots, self.mergeable)]
        return load_or_measure((repr(model), self.steps.max_rows, sizes), self.measure, force=force)

    def measure(self) -> Profile:
        started = time.perf_counter()
        knots: list[tuple[int, float]] = []
        largest = min(self.steps.max_rows, self.max_context, self.steps.max_context(1))
        for rows in ROWS:
            late = time.perf_counter() - started > BUDGET_SECONDS
            if len(knots) > 1 and (rows > largest or late):
                break
            knots.append((rows, self.steps.step([BASE], rows, 0)))
        profile = self._add_attention(Profile(_ascending(knots), self.head))
        profile = self._add_adapters(profile)
        return self._add_merges(profile)

    def _add_attention(self, profile: Profile) -> Profile:
        """Measure `position`, `pair` and `answer` by pairs of steps that differ in the context."""
        steps, short, largest = self.steps, SHORT_CONTEXT, profile.products[-1][0]
        requests = min(DECODE_REQUESTS, largest)
        rows = max(1, min(CHUNK_ROWS, largest, self.max_context - 1, steps.max_context(1) - 1))
        long = min(LONG_CONTEXT, self.max_context - rows, steps.max_context(requests) - rows)
        if long <= short:
            return profile
        decode = [steps.step([BASE] * requests, 1, context) for context in (short, long)]
        chunk = [steps.step([BASE], rows, context) for context in (short, long)]
        # One more token of context adds `position` and, for each row of the request, `pair`.
        per_decode_row = (decode[1] - decode[0]) / (requests * (long - short))
        per_chunk = (chunk[1] - chunk[0]) / (long - short)
        pair = max(0.0, (per_chunk - per_decode_row) / max(1, rows - 1))
        profile = replace(profile, position=max(0.0, per_decode_row - pair), pair=pair)
        # The steps that measured `products` include the attention of their rows to each other.
        costs = CostModel(profile, _no_size)
        knots = [(n, seconds - costs.attention(n, 0)) for n, seconds in profile.products]
        profile = replace(profile, products=_ascending(knots))
        costs = CostModel(profile, _no_size)
        rest = decode[0] - costs.products(requests, requests) - requests * costs.attention(1, short)
        return replace(profile, answer=max(0.0, rest / requests))

    def _add_adapters(self, profile: Profile) -> Profile:
        """Measure `lora_calls` (c), `adapter_element` (e) and `adapter_element_row` (r).

        Adapters of n elements in all, each applied to R rows, add c + n · (e + R · r) to a step.
        """
        most_rows = profile.products[-1][0]
        rows = min(CHUNK_ROWS, most_rows)
        elements = {slot: self.sizes(slot).factors for slot in self.slots}
        by_size = sorted(self.slots, key=lambda slot: -elements[slot])
        several = by_size[: min(DISTINCT_ADAPTERS, most_rows)]
        if not several or rows < 2:
            return profile
        smallest = min(self.slots, key=lambda slot: elements[slot])
        few, many = elements[smallest], sum(elements[slot] for slot in several)
        # With one row each, the line through both measurements begins at c and has the slope e + r.
        of_few, of_many = self._above_base([smallest], 1), self._above_base(several, 1)
        slope = max(0.0, of_many - of_few) / (many - few) if many > few else 0.0
        calls = max(0.0, of_few - slope * few)
        slope = (of_many - calls) / many if of_many > calls else 0.0
        slope_of_rows = (self._above_base(several[:1], rows) - calls) / elements[several[0]]
        row = max(0.0, (slope_of_rows - slope) / (rows - 1))
        element = max(0.0, slope - row)
        return replace(profile, lora_calls=calls, adapter_element=element, adapter_element_row=row)

    def _above_base(self, slots: Sequence[int], rows: int) -> float:
        """Return the seconds that these adapters add to a step with `rows` rows per request."""
        pairs = [
            (self.steps.step(slots, rows, 0), self.steps.step([BASE] * len(slots), rows, 0))
            for _ in range(REPEATS)
        ]
        return max(0.0, min(own for own, _ in pairs) - min(base for _, base in pairs))

    def _add_merges(self, profile: Profile) -> Profile:
        by_work = sorted((self.sizes(slot).product, slot) for slot in self.mergeable)
        if not by_work:
            return profile
        (low, first), (high, last) = by_work[0], by_work[-1]
        shortest, longest = self.steps.merge(first, last), self.steps.merge(last, first)
        per_product = max(0.0, (longest - shortest) / (high - low)) if high > low else 0.0
        return replace(profile, merge=(max(0.0, shortest - per_product * low), per_product))


def _ascending(knots: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Raise seconds so that they never decrease with the rows."""
    ascending, longest = [], 1e-9
    for rows, seconds in knots:
        longest = max(longest, seconds)
        ascending.append((rows, longest))
    return tuple(ascending)


def _no_size(slot: int) -> AdapterSize:
    return AdapterSize(0, 0)
