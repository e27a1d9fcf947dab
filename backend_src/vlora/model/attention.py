"""Paged attention: keys and values live in pages, one block table a sequence."""

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
from vlora.model import attention_reference
from vlora.model.chunk import Chunk
from vlora.model.rotary import Rotary


class AttentionPlan:
    """Where a step's rows write and read. Made once a step, used by every layer.

    chunks: in the order of their rows. heads: of queries; each `heads / kv_heads` neighbours share
    a head of keys and values. Raises ValueError for chunks that do not fit their pages.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        store: KVCache,
        heads: int,
        *,
        backend: Backend | None = None,
    ) -> None:
        self._chunks = chunks
        self._store = store
        self._heads = heads
        self._backend = backend or backends.backend_of("kernels")
        self.positions = torch.tensor(
            [position for chunk in chunks for position in range(chunk.start, chunk.end)]
        )
        # Once a step: asked of a tensor in every layer it costs a tenth of a short row's attention.
        self._shape = len(self.positions), (heads + 2 * store.kv_heads) * store.head_dim
        self._layer_bytes = store.cache.stride(1) * store.cache.itemsize

    @cached_property
    def _native(self) -> Any:
        store = self._store
        chunks: list[tuple[int, int, int, int]] = []
        pages: list[int] = []
        for chunk in self._chunks:
            chunks.append((chunk.row, chunk.length, chunk.start, len(pages)))
            pages += chunk.pages[: -(-chunk.end // store.block)]
        return native.kernels().attention.Plan(
            DTYPES[store.cache.dtype],
            store.block,
            self._heads,
            store.kv_heads,
            store.head_dim,
            store.cache.stride(0),
            store.cache.shape[0],
            chunks,
            pages,
            torch.get_num_threads(),
        )

    @cached_property
    def _reference(self) -> attention_reference.Plan:
        return attention_reference.Plan(self._chunks, self._store)

    def attend(
        self, layer: int, qkv: torch.Tensor, rotary: Rotary, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """qkv: [T, (heads + 2 kv_heads) · dim] fp32, contiguous, not yet rotated.

        Writes rotated keys, and values, to their pages, then lets every row see its sequence up
        to itself: softmax(q kᵀ / √dim) v → [T, heads · dim] fp32. out: where it goes; None: a
        tensor of its own.
        """
        store = self._store
        if qkv.shape != self._shape or not qkv.is_contiguous():
            rows, width = self._shape
            raise ValueError(
                f"rows {tuple(qkv.shape)} are not the {rows} of the plan, {width} wide, side by"
                " side"
            )
        if self._backend == "reference":
            found = self._reference.attend(layer, self._heads, qkv, rotary.cosines, rotary.sines)
            return ops.given(found, out)
        out = ops.place(out, self._shape[0], self._heads * store.head_dim)
        self._native.attend(
            store.cache.data_ptr() + layer * self._layer_bytes,
            out.data_ptr(),
            qkv.data_ptr(),
            rotary.cosines.data_ptr(),
            rotary.sines.data_ptr(),
            store.head_dim**-0.5,
            torch.get_num_threads(),
        )
        return out
