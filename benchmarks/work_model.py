"""Flops and bytes of a step, which determine its roofline.

Every weight and every adapter counts once per step, and the keys and values of a chunk's context
once per request. Activations stay in the caches and do not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.llava import Sizes
from vlora.kernels.quantized import Format
from vlora.model.decoder_config import LM_HEAD_FORMAT

ADAPTED_TARGETS = 4
"""Number of adapted projections per layer: q, k, v, o."""


@dataclass(frozen=True)
class ChunkWork:
    """Consecutive positions of one request in a step.

    rows: number of positions.
    context: number of positions computed before them.
    adapter: index of the adapter, or None.
    logits: whether the step samples from the last position.
    """

    rows: int
    context: int
    adapter: int | None = None
    logits: bool = True


@dataclass(frozen=True)
class Work:
    """One piece of work.

    flops: number of floating-point operations.
    weights, kv, adapters: bytes that are moved: weights, keys and values, and adapters.
    """

    flops: float
    weights: int
    kv: int
    adapters: int

    @property
    def moved(self) -> int:
        """Total number of bytes: weights, keys and values, and adapters."""
        return self.weights + self.kv + self.adapters

    def seconds(self, peak: float, rate: float) -> float:
        """Return the roofline in seconds, for a peak in flop/s and a rate in bytes/s."""
        return max(self.flops / peak, self.moved / rate)


def step_work(
    chunks: Sequence[ChunkWork], sizes: Sizes, itemsize: int, form: Format | None = None
) -> Work:
    """Return the work of one step.

    itemsize: number of bytes of a value.
    form: format of the target matrices of all layers if they are quantized at load, as the LM head
        then is.

    In the last layer all rows compute keys and values. Only rows with logits compute the rest.
    """
    head = sizes.hidden // sizes.heads
    slab = slab_elements(sizes)
    head_shape = sizes.vocabulary, sizes.hidden
    lm_head = math.prod(head_shape)
    lm_head_bytes = itemsize * lm_head if form is None else LM_HEAD_FORMAT.matrix_bytes(*head_shape)
    rows = sum(chunk.rows for chunk in chunks)
    sampled = sum(chunk.logits for chunk in chunks)
    # Row i of a chunk attends to context + i + 1 positions: a product with keys, one with values.
    pairs = sum(c.rows * c.context + c.rows * (c.rows + 1) // 2 for c in chunks)
    last_layer_pairs = sum(c.context + c.rows for c in chunks if c.logits)
    # In the last layer, rows without logits need only keys and values, not these elements.
    skipped = 2 * sizes.hidden**2 + 3 * sizes.hidden * sizes.inner
    width = adapter_width(sizes)
    lora = sum(2 * c.rows * rank_of(c.adapter, sizes) * width for c in chunks)
    flops = 2 * (rows * slab - (rows - sampled) * skipped) + 2 * sampled * lm_head + lora
    flops += 4 * (pairs * (sizes.layers - 1) + last_layer_pairs) * sizes.heads * head
    # The context is read. New positions are written and read.
    positions = sum(c.context + 2 * c.rows for c in chunks)
    used = {c.adapter for c in chunks if c.adapter is not None}
    return Work(
        flops=float(flops),
        weights=slab_bytes(sizes, itemsize, form) + lm_head_bytes * (sampled > 0),
        kv=itemsize * positions * 2 * sizes.kv_heads * head * sizes.layers,
        adapters=itemsize * width * sum(rank_of(index, sizes) for index in used),
    )


def tower_work(images: int, sizes: Sizes) -> Work:
    """Return the work of encoding images in fp32, in the vision tower and its connector."""
    patches, hidden = sizes.image_tokens, sizes.tower_hidden
    layer = 4 * hidden**2 + 2 * hidden * sizes.tower_inner
    # The features come from the second-last layer. The connector has two matrices.
    elements = (sizes.tower_layers - 1) * layer + 3 * sizes.patch**2 * hidden
    elements += hidden * sizes.hidden + sizes.hidden**2
    attention = 4 * patches**2 * hidden * (sizes.tower_layers - 1)
    return Work(images * (2.0 * patches * elements + attention), 4 * elements, 0, 0)


def combined_work(parts: Iterable[Work]) -> Work:
    """Return the work of all parts together, as if every weight and adapter were read only once.

    Keys and values do not count.
    """
    parts = list(parts)
    return Work(
        flops=sum(part.flops for part in parts),
        weights=max(part.weights for part in parts),
        kv=0,
        adapters=max(part.adapters for part in parts),
    )


def slab_elements(sizes: Sizes) -> int:
    """Return the number of elements of all target matrices of all layers."""
    return sizes.layers * sum(rows * depth for rows, depth in _layer_shapes(sizes))


def slab_bytes(sizes: Sizes, itemsize: int, form: Format | None) -> int:
    """Return the number of bytes of all target matrices of all layers."""
    if form is None:
        return itemsize * slab_elements(sizes)
    return sizes.layers * sum(form.matrix_bytes(*shape) for shape in _layer_shapes(sizes))


def _layer_shapes(sizes: Sizes) -> tuple[tuple[int, int], ...]:
    """Return the shapes (d_out, d_in) of a layer's matrices: qkv, o, gate with up, and down."""
    kv = sizes.kv_heads * (sizes.hidden // sizes.heads)
    return (
        (sizes.hidden + 2 * kv, sizes.hidden),
        (sizes.hidden, sizes.hidden),
        (2 * sizes.inner, sizes.hidden),
        (sizes.hidden, sizes.inner),
    )


def adapter_width(sizes: Sizes) -> int:
    """Return the number of elements of an adapter of rank 1: d_in + d_out, over all its targets."""
    kv = sizes.kv_heads * (sizes.hidden // sizes.heads)
    return sizes.layers * (ADAPTED_TARGETS * sizes.hidden + 2 * sizes.hidden + 2 * kv)


def rank_of(adapter: int | None, sizes: Sizes) -> int:
    """Return the rank of the adapter with this index; 0 for None."""
    return 0 if adapter is None else sizes.ranks[adapter % len(sizes.ranks)]
