"""What a step has to do, in flops and bytes: the other side of its roofline.

Pure arithmetic over sizes. Every weight is read once a step, every key and value of a row's
context once a request, every adapter once; activations stay in the caches and count nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.llava import Sizes

TARGETS = 4
"""Adapted projections of a layer: q, k, v, o."""


@dataclass(frozen=True)
class Rows:
    """`count` consecutive positions of one request, `context` positions computed before them,
    through the adapter of this index, or None; logits: whether the last one is answered."""

    count: int
    context: int
    adapter: int | None = None
    logits: bool = True


@dataclass(frozen=True)
class Work:
    """flops; bytes of weights, of keys and values, of adapters."""

    flops: float
    weights: int
    kv: int
    adapters: int

    @property
    def moved(self) -> int:
        return self.weights + self.kv + self.adapters


def of_step(rows: Sequence[Rows], sizes: Sizes, itemsize: int) -> Work:
    """The work of one step. In the last layer every row gives keys and values, and only those that
    are answered do more."""
    head = sizes.hidden // sizes.heads
    slab = slab_elements(sizes)
    lm_head = sizes.vocabulary * sizes.hidden
    total = sum(part.count for part in rows)
    answered = sum(part.logits for part in rows)
    # Row i of a part sees context + i + 1 positions: a product with keys, one with values.
    seen = sum(p.count * p.context + p.count * (p.count + 1) // 2 for p in rows)
    seen_last = sum(p.context + p.count for p in rows if p.logits)
    beyond = 2 * sizes.hidden**2 + 3 * sizes.hidden * sizes.inner  # keys and values
    width = adapter_width(sizes)
    lora = sum(2 * p.count * rank_of(p.adapter, sizes) * width for p in rows)
    flops = 2 * (total * slab - (total - answered) * beyond) + 2 * answered * lm_head + lora
    flops += 4 * (seen * (sizes.layers - 1) + seen_last) * sizes.heads * head
    positions = sum(p.context + 2 * p.count for p in rows)  # read; written and read
    used = {p.adapter for p in rows if p.adapter is not None}
    return Work(
        flops=float(flops),
        weights=itemsize * (slab + lm_head * (answered > 0)),
        kv=itemsize * positions * 2 * sizes.kv_heads * head * sizes.layers,
        adapters=itemsize * width * sum(rank_of(index, sizes) for index in used),
    )


def of_tower(images: int, sizes: Sizes) -> Work:
    """Encoding images: the tower, its connector, fp32."""
    patches, hidden = sizes.image_tokens, sizes.tower_hidden
    layer = 4 * hidden**2 + 2 * hidden * sizes.tower_inner
    # The features come from the last layer but one; the connector has two.
    elements = (sizes.tower_layers - 1) * layer + 3 * sizes.patch**2 * hidden
    elements += hidden * sizes.hidden + sizes.hidden**2
    attention = 4 * patches**2 * hidden * (sizes.tower_layers - 1)
    return Work(images * (2.0 * patches * elements + attention), 4 * elements, 0, 0)


def together(parts: Iterable[Work]) -> Work:
    """All of it, were every weight read only once: the limit of the whole work at once."""
    parts = list(parts)
    return Work(
        flops=sum(part.flops for part in parts),
        weights=max(part.weights for part in parts),
        kv=0,
        adapters=max(part.adapters for part in parts),
    )


def slab_elements(sizes: Sizes) -> int:
    """Of all target matrices of all layers."""
    kv = sizes.kv_heads * (sizes.hidden // sizes.heads)
    attention = 2 * sizes.hidden**2 + 2 * kv * sizes.hidden
    return sizes.layers * (attention + 3 * sizes.hidden * sizes.inner)


def adapter_width(sizes: Sizes) -> int:
    """Elements of an adapter per rank: inputs and outputs of its targets in all layers."""
    kv = sizes.kv_heads * (sizes.hidden // sizes.heads)
    return sizes.layers * (TARGETS * sizes.hidden + 2 * sizes.hidden + 2 * kv)


def rank_of(adapter: int | None, sizes: Sizes) -> int:
    return 0 if adapter is None else sizes.ranks[adapter % len(sizes.ranks)]
