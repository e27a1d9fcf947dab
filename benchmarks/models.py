"""Whole models for benchmarks: types they are stored in, the work of a step, repeatable steps.

In the work of a step, every weight and every adapter counts once, and the keys and values of a
chunk's context once per request. Activations stay in the caches and do not count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.llava import Checkpoint, Sizes, prompt
from benchmarks.machine import DTYPES
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.plan import StepPlan
from vlora.engine.sequence import Sequence as EngineSequence
from vlora.ids import BASE
from vlora.kernels.formats import Format
from vlora.model.decoder_config import LM_HEAD_FORMAT
from vlora.request import Request
from vlora.sampling import SamplingParams

ENGINE_NAMES = {"fp32": "float32", "bf16": "bfloat16"}
"""Names of storage types in the engine's options."""
BLOCK = 16
FILL_ELEMENTS = 1 << 22
"""Number of distinct random values; they are repeated to fill the pages."""


@dataclass(frozen=True)
class ModelType:
    """Type in which a whole model is stored.

    dtype: key of DTYPES, the type of everything that is not quantized, and of products.
    quantization: "int8" or "int4", the type of the decoder's linear layers; None if they are not
        quantized. With either type, the LM head is int8.
    form: quantized format of the linear layers, or None.
    """

    dtype: str
    quantization: str | None = None
    form: Format | None = None

    @property
    def itemsize(self) -> int:
        """Number of bytes of a value that is not quantized."""
        return DTYPES[self.dtype].itemsize

    @property
    def options(self) -> dict[str, Any]:
        """Options of the engine that store a model in this type."""
        options: dict[str, Any] = {"dtype": ENGINE_NAMES[self.dtype]}
        return options | ({"quantization": self.quantization} if self.quantization else {})


INT8, INT4 = Format(8, None), Format(4, 32, zeros=True)
MODEL_TYPES: Mapping[str, ModelType] = {
    "fp32": ModelType("fp32"),
    "bf16": ModelType("bf16"),
    "int8": ModelType("fp32", "int8", INT8),
    "int4": ModelType("fp32", "int4", INT4),
    "int8-bf16": ModelType("bf16", "int8", INT8),
    "int4-bf16": ModelType("bf16", "int4", INT4),
}


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
    """Floating-point operations of one piece of work, and the bytes it moves by kind."""

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
    head_shape = sizes.vocabulary, sizes.hidden
    lm_head = math.prod(head_shape)
    if form is None:
        lm_head_bytes, slab_bytes = itemsize * lm_head, itemsize * slab_elements(sizes)
    else:
        lm_head_bytes = LM_HEAD_FORMAT.matrix_bytes(*head_shape)
        slab_bytes = sizes.layers * sum(form.matrix_bytes(*s) for s in _layer_shapes(sizes))
    rows = sum(chunk.rows for chunk in chunks)
    sampled = sum(chunk.logits for chunk in chunks)
    # Row i of a chunk attends to context + i + 1 positions: a product with keys, one with values.
    pairs = sum(c.rows * c.context + c.rows * (c.rows + 1) // 2 for c in chunks)
    last_layer_pairs = sum(c.context + c.rows for c in chunks if c.logits)
    # In the last layer, rows without logits need only keys and values, not these elements.
    skipped = 2 * sizes.hidden**2 + 3 * sizes.hidden * sizes.inner
    # Elements of an adapter of rank 1: d_in + d_out, over q, k, v and o of all layers.
    width = sizes.layers * (6 * sizes.hidden + 2 * sizes.kv_heads * head)
    lora = sum(2 * c.rows * rank_of(c.adapter, sizes) * width for c in chunks)
    flops = 2 * (rows * slab_elements(sizes) - (rows - sampled) * skipped)
    flops += 2 * sampled * lm_head + lora
    flops += 4 * (pairs * (sizes.layers - 1) + last_layer_pairs) * sizes.heads * head
    # The context is read. New positions are written and read.
    positions = sum(c.context + 2 * c.rows for c in chunks)
    used = {c.adapter for c in chunks if c.adapter is not None}
    return Work(
        flops=float(flops),
        weights=slab_bytes + lm_head_bytes * (sampled > 0),
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


def slab_elements(sizes: Sizes) -> int:
    """Return the number of elements of all target matrices of all layers."""
    return sizes.layers * sum(rows * depth for rows, depth in _layer_shapes(sizes))


def _layer_shapes(sizes: Sizes) -> tuple[tuple[int, int], ...]:
    """Return the shapes (d_out, d_in) of a layer's matrices: qkv, o, gate with up, and down."""
    hidden, inner = sizes.hidden, sizes.inner
    kv = sizes.kv_heads * (hidden // sizes.heads)
    return (hidden + 2 * kv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)


def rank_of(adapter: int | None, sizes: Sizes) -> int:
    """Return the rank of the adapter with this index; 0 for None."""
    return 0 if adapter is None else sizes.ranks[adapter % len(sizes.ranks)]


class SyntheticModel:
    """Engine of one checkpoint that repeats a step on sequences whose context was never computed.

    It calls `Engine.step` and then sets each sequence back, so that the step can be timed again.

    dtype: key of MODEL_TYPES.
    kv_tokens: number of positions that its pages must hold.
    max_rows: maximum number of rows in a step.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        kv_tokens: int,
        max_rows: int,
        adapters: bool = True,
        device: str = "cpu",
    ) -> None:
        self.sizes = checkpoint.sizes
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
            text = prompt(length - 1, number, self.sizes)
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
        return [self.slots[i % distinct] if distinct else BASE for i in range(requests)]


def fill_with_random(cache: torch.Tensor) -> None:
    """Fill all pages with random values. Untouched pages would not be in memory at all."""
    flat = cache.view(-1)
    drawn = torch.randn(min(FILL_ELEMENTS, flat.numel())).to(cache.dtype)
    for start in range(0, flat.numel(), FILL_ELEMENTS):
        part = flat[start : start + FILL_ELEMENTS]
        part.copy_(drawn[: part.numel()])
