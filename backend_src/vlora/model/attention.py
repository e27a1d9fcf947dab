"""Paged attention: keys and values are stored in pages, with one block table per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from vlora import backends, native
from vlora.atmm.types import DTYPES
from vlora.backends import Backend
from vlora.kernels import ops
from vlora.memory.kv_cache import KVCache
from vlora.model.attention_reference import ReferencePlan
from vlora.model.chunk import Chunk
from vlora.model.rotary import Rotary


class AttentionPlan:
    """Pages that the rows of a step write and read. Made once per step and used by every layer.

    chunks: in the order of their rows.
    heads: number of query heads; each `heads / kv_heads` adjacent ones share a head of keys and
        values.

    Raises ValueError, at the first use, for chunks that do not fit their pages.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        kv_cache: KVCache,
        heads: int,
        *,
        backend: Backend | None = None,
    ) -> None:
        self._chunks = chunks
        self._kv_cache = kv_cache
        self._heads = heads
        self._backend = backend or backends.backend_of("kernels")
        self.positions = torch.tensor(
            [position for chunk in chunks for position in range(chunk.start, chunk.end)]
        )
        # Read once per step: reading them from a tensor in every layer would cost a tenth of the
        # attention of a row with a short context.
        self._shape = len(self.positions), (heads + 2 * kv_cache.kv_heads) * kv_cache.head_dim
        self._layer_bytes = kv_cache.cache.stride(1) * kv_cache.cache.itemsize

    @cached_property
    def _native(self) -> Any:
        kv_cache = self._kv_cache
        chunks: list[tuple[int, int, int, int]] = []
        pages: list[int] = []
        for chunk in self._chunks:
            chunks.append((chunk.row, chunk.length, chunk.start, len(pages)))
            pages += chunk.pages[: -(-chunk.end // kv_cache.block)]
        return native.kernels().attention.Plan(
            DTYPES[kv_cache.cache.dtype],
            kv_cache.block,
            self._heads,
            kv_cache.kv_heads,
            kv_cache.head_dim,
            kv_cache.cache.stride(0),
            kv_cache.cache.shape[0],
            chunks,
            pages,
            torch.get_num_threads(),
        )

    @cached_property
    def _reference(self) -> ReferencePlan:
        return ReferencePlan(self._chunks, self._kv_cache)

    def attend(
        self, layer: int, qkv: torch.Tensor, rotary: Rotary, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write the rows' keys and values to their pages and return each row's causal attention.

        Semantics: softmax(q kᵀ / √dim) v over the positions of the row's sequence up to its own.

        qkv: [T, (heads + 2 kv_heads) · dim] fp32, contiguous, not yet rotated.
        out: [T, heads · dim] fp32 for the result; None allocates it.
        """
        kv_cache = self._kv_cache
        if qkv.shape != self._shape or not qkv.is_contiguous():
            rows, width = self._shape
            raise ValueError(
                f"qkv {tuple(qkv.shape)} with strides {qkv.stride()} must be contiguous"
                f" [{rows}, {width}], as the plan's chunks say"
            )
        if self._backend == "reference":
            attended = self._reference.attend(layer, self._heads, qkv, rotary)
            return ops.copy_out(attended, out)
        out = ops.alloc_out(out, self._shape[0], self._heads * kv_cache.head_dim)
        self._native.attend(
            kv_cache.cache.data_ptr() + layer * self._layer_bytes,
            out.data_ptr(),
            qkv.data_ptr(),
            rotary.cosines.data_ptr(),
            rotary.sines.data_ptr(),
            kv_cache.head_dim**-0.5,
            torch.get_num_threads(),
        )
        return out
