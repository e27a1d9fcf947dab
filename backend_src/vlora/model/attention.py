"""Paged attention: keys and values are stored in pages, and each sequence has a block table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from vlora import backends, native
from vlora.atmm.types import DTYPES, Segments
from vlora.backends import Backend
from vlora.kernels import ops
from vlora.kernels.ops import HeadNorms
from vlora.memory.kv_cache import KVCache
from vlora.model.attention_gpu import DecodeShape, GpuPlan
from vlora.model.attention_reference import ReferencePlan
from vlora.model.chunk import Chunk
from vlora.model.inputs import row_positions
from vlora.model.rotary import Rotary


class AttentionPlan:
    """Pages that the rows of a step write and read, for all layers.

    chunks: chunks of the step, in the order of their rows.
    heads: number of query heads. `heads / kv_heads` adjacent ones share one key and value head.
    padded: size to which a step of decoding rows is padded on a GPU; None for no padding.
    fixed_order: let the bits of a row depend on its sequence and position only, not on the chunks
        and threads; for the compiled kernels of the CPU.

    Raises ValueError, here or at the first `attend`, if the chunks do not fit their pages.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        kv_cache: KVCache,
        heads: int,
        *,
        padded: DecodeShape | None = None,
        fixed_order: bool = False,
        backend: Backend | None = None,
    ) -> None:
        self._fixed_order = fixed_order
        self._kv_cache = kv_cache
        self._heads = heads
        self._backend = backend or backends.backend_of("kernels", kv_cache.cache.device.type)
        self.positions = row_positions(chunks)  # Positions of the rows, in host memory.
        if padded is not None:
            self.positions = _padded(self.positions, padded)
        self.placed_positions = self.positions  # Positions of the rows on the device.
        self._gpu = GpuPlan(chunks, kv_cache, padded) if self._backend == "gpu" else None
        # The GPU's plan needs no chunks. A plan in a captured graph outlives its step and must not
        # keep the prompts of the chunks in memory.
        self._chunks = () if self._backend == "gpu" else chunks
        # Computed once per step. Reading them from a tensor in every layer would take a tenth of
        # the time of attention for a row with a short context.
        self._shape = self.positions.shape[-1], (heads + 2 * kv_cache.kv_heads) * kv_cache.head_dim
        self._layer_bytes = kv_cache.cache.stride(1) * kv_cache.cache.itemsize
        self._checked_rotary: Rotary | None = None

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of the pages. Recorded steps contain them."""
        return (self._kv_cache.cache.data_ptr(),)

    @property
    def is_compiled(self) -> bool:
        """True if the compiled kernels of the CPU compute attention."""
        return self._backend == "cpu"

    @cached_property
    def _native(self) -> Any:
        kv_cache = self._kv_cache
        chunks: list[tuple[int, int, int, int]] = []
        pages: list[int] = []
        for chunk in self._chunks:
            chunks.append((chunk.row, chunk.length, chunk.start, len(pages)))
            pages += chunk.pages[: -(-chunk.end // kv_cache.block)]
        cache, heads = kv_cache.cache, (self._heads, kv_cache.kv_heads, kv_cache.head_dim)
        layout = (DTYPES[cache.dtype], kv_cache.block, *heads, cache.stride(0), cache.shape[0])
        threads = torch.get_num_threads()
        return native.kernels().attention.Plan(*layout, chunks, pages, threads, self._fixed_order)

    @cached_property
    def _reference(self) -> ReferencePlan:
        return ReferencePlan(self._chunks, self._kv_cache)

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Tensors to upload to the device, in host memory; [] on the CPU."""
        return [] if self._gpu is None else [self.positions, *self._gpu.inputs]

    def place(self, uploaded: Sequence[torch.Tensor]) -> None:
        """Store the copies of `inputs` on the device, before the first `attend`."""
        if self._gpu is not None:
            self.placed_positions, *tables = uploaded
            self._gpu.place(tables)

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        rotary: Rotary,
        out: torch.Tensor | None = None,
        head_norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """Write the keys and values of all rows to their pages, and return each row's causal
        attention, softmax(q kᵀ / √dim) v over the positions of the row's sequence up to its own.

        qkv: [T, (heads + 2 · kv_heads) · dim], contiguous, before rotation. It may be overwritten.
        rotary: angles by which queries and keys are rotated.
        out: [T, heads · dim] for the result; allocated if None.
        head_norms: norms of query and key heads, computed before their rotation, or None.

        Tensors are fp32 on a CPU, and `qkv` and the result of the weights' dtype on a GPU. Raises
        ValueError if `qkv` or `rotary` does not fit the plan.
        """
        kv_cache = self._kv_cache
        if qkv.shape != self._shape or not qkv.is_contiguous():
            rows, width = self._shape
            found = f"qkv {tuple(qkv.shape)} with strides {qkv.stride()}"
            expected = f"contiguous [{rows}, {width}] for the chunks of this plan"
            raise ValueError(f"{found} must be {expected}")
        self._check_rotary(rotary)
        if self._gpu is not None:
            return self._gpu.attend(layer, self._heads, qkv, rotary, head_norms, out)
        if head_norms is not None:
            ops.head_norm(qkv, head_norms.query, head_norms.key, self._heads, head_norms.eps)
        if self._backend == "reference":
            return ops.copy_out(self._reference.attend(layer, self._heads, qkv, rotary), out)
        out = ops.alloc_out(out, self._shape[0], self._heads * kv_cache.head_dim)
        cache = kv_cache.cache.data_ptr() + layer * self._layer_bytes
        angles = (rotary.cosines.data_ptr(), rotary.sines.data_ptr())
        addresses = (cache, out.data_ptr(), qkv.data_ptr(), *angles)
        self._native.attend(*addresses, kv_cache.head_dim**-0.5, torch.get_num_threads())
        return out

    def _check_rotary(self, rotary: Rotary) -> None:
        # The kernels read the tables by address. All layers of a step have the same ones.
        if rotary is self._checked_rotary:
            return
        shape = self._shape[0], self._kv_cache.head_dim // 2
        for name, table in (("cosines", rotary.cosines), ("sines", rotary.sines)):
            if table.shape != shape or table.dtype != torch.float32 or not table.is_contiguous():
                raise ValueError(
                    f"{name} {tuple(table.shape)} {table.dtype} with strides {table.stride()} must"
                    f" be contiguous {list(shape)} {torch.float32}"
                )
        self._checked_rotary = rotary

    def repeat(self, recording: Any, rotary: Rotary, segments: Segments) -> None:
        """Make the calls of a complete recording again, with the pages of this plan.

        The recorded step must have had as many rows as this plan.

        Raises ValueError if `rotary` does not fit the plan.
        """
        self._check_rotary(rotary)
        recording.repeat(
            self._native,
            rotary.cosines.data_ptr(),
            rotary.sines.data_ptr(),
            Segments.of(segments).native,
            torch.get_num_threads(),
        )


def _padded(positions: torch.Tensor, shape: DecodeShape) -> torch.Tensor:
    if shape.axes > 1 and positions.ndim == 1:
        positions = positions.expand(shape.axes, -1)
    return F.pad(positions, (0, shape.rows - positions.shape[-1]))
