"""Measures a cost profile on the engine's own runner, and keeps it for the next start.

Steps that no request asked for: they write to pages that nobody holds yet, so it runs before the
first request. Knows the runner and the switcher; nothing of policies.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from vlora.atmm.device import Device
from vlora.engine.cost import AdapterSize, CostModel, Profile
from vlora.ids import BASE, order_of
from vlora.lora.store import AdapterStore
from vlora.lora.switcher import Switcher
from vlora.memory.block_table import pages_for
from vlora.model.chunk import Chunk
from vlora.model.inputs import Prompt
from vlora.model.runner import Runner

log = logging.getLogger(__name__)

VERSION = 2
"""Of what is measured: another version measures anew."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REPEATS = 3
BUDGET = 4.0
"""Seconds after which no larger step is tried."""
DECODING, DISTINCT = 16, 8
"""Requests of the decoding steps, and adapters of the one that has some."""
FEW_POSITIONS, MANY_POSITIONS = 16, 512
MANY_ROWS = 64


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vlora" / "cost"


def kept(
    key: Sequence[object],
    measure: Callable[[], Profile],
    root: Path | None = None,
    *,
    anew: bool = False,
) -> Profile:
    """The profile of this machine under `key`, measured where it is not kept yet, or `anew`.

    A cache that cannot be read or written is none: what is wrong is logged.
    """
    described = json.dumps([VERSION, Device.here().name, torch.get_num_threads(), *key])
    name = hashlib.sha256(described.encode()).hexdigest()[:16]
    path = (root or cache_root()) / f"{name}.json"
    try:
        if not anew:
            return read(json.loads(path.read_text()))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s is measured anew: %r", path, error)
    profile = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(asdict(profile), file)
        Path(file.name).replace(path)
    except OSError as error:
        log.warning("the cost profile is not kept: %s", error)
    return profile


def read(given: Any) -> Profile:
    """A profile from its JSON; raises ValueError, TypeError or KeyError for what is none."""
    whole = dict(given)
    products = tuple((int(rows), float(seconds)) for rows, seconds in whole.pop("products"))
    fixed, per_product = (float(value) for value in whole.pop("merged"))
    if len(products) < 2 or min(seconds for _, seconds in products) <= 0:
        raise ValueError("a profile needs two positive steps")
    numbers = {name: float(value) for name, value in whole.items()}
    return Profile(products, merged=(fixed, per_product), **numbers)


class AdapterSizes:
    """Sizes by slot, counted once for each adapter."""

    def __init__(self, adapters: AdapterStore) -> None:
        self._adapters = adapters
        self._known: dict[str, AdapterSize] = {}

    def __call__(self, slot: int) -> AdapterSize:
        adapter = self._adapters.adapter(slot)
        found = self._known.get(adapter.info.digest)
        if found is None:
            pairs = adapter.pairs.values()
            factors = sum(a.numel() + b.numel() for a, b in pairs)
            product = sum(b.numel() * a.shape[1] for a, b in pairs)
            found = self._known[adapter.info.digest] = AdapterSize(factors, product)
        return found


def calibrated(
    bed: Bed,
    model: object,
    slots: Sequence[int],
    mergeable: Sequence[int],
    size: Callable[[int], AdapterSize],
    head: float,
    most_context: int,
    *,
    anew: bool,
) -> Profile:
    """The profile of this machine for this model and these adapters, measured where it is not kept
    yet. model: what tells it from others, printed. mergeable: slots that may be merged. head: the
    LM head's weights over all other products'. most_context: of a request."""
    sizes = [sorted(size(slot) for slot in these) for these in (slots, mergeable)]
    return kept(
        (repr(model), bed.rows, sizes),
        lambda: measure(bed, slots, mergeable, size, head, most_context),
        anew=anew,
    )


class Bed:
    """Steps of made-up requests. pages: of the pool, the bed's to write to. rows: of a step, at
    most."""

    def __init__(
        self,
        runner: Runner,
        switcher: Switcher,
        pages: Sequence[int],
        block: int,
        rows: int,
    ) -> None:
        self._runner = runner
        self._switcher = switcher
        self._pages = pages
        self._block = block
        self.rows = rows

    def step(self, slots: Sequence[int], rows: int, context: int) -> float:
        """Seconds of `rows` rows behind `context` positions for a request of each slot, at best:
        whoever else is on the machine only adds to it."""
        chunks = self._chunks(sorted(slots, key=lambda s: order_of(s, BASE)), rows, context)
        self._runner.forward(chunks)
        found: list[float] = []
        while len(found) < REPEATS and sum(found) < 0.5:
            started = time.perf_counter()
            self._runner.forward(chunks)
            found.append(time.perf_counter() - started)
        return min(found)

    def most_context(self, requests: int) -> int:
        """Positions that each of so many requests finds pages for."""
        return len(self._pages) // requests * self._block

    def merge(self, slot: int, other: int) -> float:
        """Seconds of merging a slot after another; what its first merge prepares is not counted
        where there is another."""
        found = []
        for _ in range(REPEATS):
            self._switcher.switch(other)
            started = time.perf_counter()
            self._switcher.switch(slot)
            found.append(time.perf_counter() - started)
            self._switcher.switch(BASE)
            if slot == other:
                break
        return min(found)

    def _chunks(self, slots: Sequence[int], rows: int, context: int) -> list[Chunk]:
        each = pages_for(context + rows, self._block)
        chunks = []
        for i, slot in enumerate(slots):
            ids = [(7 * i + n) % 97 for n in range(rows)]
            first = i * each
            assert first + each <= len(self._pages), "the pool is too small for this step"
            chunks.append(
                Chunk(
                    sequence_id=f"calibration {i}",
                    slot=slot,
                    row=i * rows,
                    start=context,
                    tokens=tuple(ids),
                    prompt=Prompt.of_text(range(context + rows)),
                    pages=tuple(self._pages[first : first + each]),
                    completes=True,
                )
            )
        return chunks


def measure(
    bed: Bed,
    slots: Sequence[int],
    mergeable: Sequence[int],
    size: Callable[[int], AdapterSize],
    head: float,
    most_context: int,
) -> Profile:
    """slots: adapters that can be asked for. mergeable: those that may be merged."""
    started = time.perf_counter()
    knots: list[tuple[int, float]] = []
    for rows in ROWS:
        fits = rows <= min(bed.rows, most_context, bed.most_context(1))
        if len(knots) > 1 and (not fits or time.perf_counter() - started > BUDGET):
            break
        knots.append((rows, bed.step([BASE], rows, 0)))
    profile = _attention(bed, Profile(_rising(knots), head), most_context)
    profile = _adapters(bed, profile, slots, size)
    return _merges(bed, profile, mergeable, size)


def _attention(bed: Bed, profile: Profile, most_context: int) -> Profile:
    """position and pair, from steps that differ in context alone; answer, from what the LM head's
    product does not explain. The products' knots lose the attention that was among them."""
    largest = profile.products[-1][0]
    requests = min(DECODING, largest)
    rows = max(1, min(MANY_ROWS, largest, most_context - 1, bed.most_context(1) - 1))
    near = FEW_POSITIONS
    far = min(MANY_POSITIONS, most_context - rows, bed.most_context(requests) - rows)
    if far <= near:
        return profile
    few = [bed.step([BASE] * requests, 1, context) for context in (near, far)]
    many = [bed.step([BASE], rows, context) for context in (near, far)]
    one = (few[1] - few[0]) / (requests * (far - near))
    all_rows = (many[1] - many[0]) / (far - near)
    pair = max(0.0, (all_rows - one) / max(1, rows - 1))
    found = replace(profile, position=max(0.0, one - pair), pair=pair)
    plain = CostModel(found, _no_size)
    knots = [(n, seconds - plain.attention(n, 0)) for n, seconds in found.products]
    found = replace(found, products=_rising(knots))
    plain = CostModel(found, _no_size)
    left = few[0] - plain.products(requests, requests) - requests * plain.attention(1, near)
    return replace(found, answer=max(0.0, left / requests))


def _adapters(
    bed: Bed,
    profile: Profile,
    slots: Sequence[int],
    size: Callable[[int], AdapterSize],
) -> Profile:
    """calls, brought and applied: what one small adapter costs, distinct large ones for a row each,
    and one for many rows."""
    count = min(DISTINCT, profile.products[-1][0])
    largest = sorted(slots, key=lambda slot: -size(slot).factors)[:count]
    rows = min(MANY_ROWS, profile.products[-1][0])
    if not largest or rows < 2:
        return profile
    smallest = min(slots, key=lambda slot: size(slot).factors)
    least, most = size(smallest).factors, sum(size(slot).factors for slot in largest)
    one, distinct = _beyond_base(bed, [smallest], 1), _beyond_base(bed, largest, 1)
    each = max(0.0, distinct - one) / (most - least) if most > least else 0.0
    calls = max(0.0, one - each * least)
    each = (distinct - calls) / most if distinct > calls else 0.0
    many = (_beyond_base(bed, largest[:1], rows) - calls) / size(largest[0]).factors
    applied = max(0.0, (many - each) / (rows - 1))
    return replace(profile, calls=calls, brought=max(0.0, each - applied), applied=applied)


def _beyond_base(bed: Bed, slots: Sequence[int], rows: int) -> float:
    """Seconds by which a step with these adapters is longer than the base model's, in turns."""
    pairs = [
        (bed.step(slots, rows, 0), bed.step([BASE] * len(slots), rows, 0)) for _ in range(REPEATS)
    ]
    return max(0.0, min(own for own, _ in pairs) - min(base for _, base in pairs))


def _merges(
    bed: Bed, profile: Profile, slots: Sequence[int], size: Callable[[int], AdapterSize]
) -> Profile:
    """slots: those that may be merged; without any no memory is taken for it."""
    by_work = sorted((size(slot).product, slot) for slot in slots)
    if not by_work:
        return profile
    (low, first), (high, last) = by_work[0], by_work[-1]
    least, most = bed.merge(first, last), bed.merge(last, first)
    per_product = max(0.0, (most - least) / (high - low)) if high > low else 0.0
    return replace(profile, merged=(max(0.0, least - per_product * low), per_product))


def _rising(knots: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """No step is shorter than one of fewer rows: what says so is noise."""
    found, most = [], 1e-9
    for rows, seconds in knots:
        most = max(most, seconds)
        found.append((rows, most))
    return tuple(found)


def _no_size(slot: int) -> AdapterSize:
    return AdapterSize(0, 0)
