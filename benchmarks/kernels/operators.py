"""The LoRA operators that are compared with ATMM.

Semantics of every operator: for each segment (start, length, slot, +1) with rows R:
y[R] += (x[R] Aᵀ) Bᵀ, where (A, B) is the slot's pair, with the scale folded into B.

Work that a baseline would do once per adapter (stacking, packing) or once per step (sorting,
computing row numbers) is done before the timed calls. The figures favour the baselines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from benchmarks.dtypes import DTYPES
from benchmarks.kernels.cells import KernelCell
from vlora.atmm.types import LoraPair

LoraCall = Callable[[torch.Tensor, torch.Tensor], None]
"""Function of y and x that adds the LoRA products to y, for fixed adapters and segments."""

MAX_EINSUM_BYTES = 1 << 30
"""Maximum size of the einsum baseline's gathered weights. Larger cells leave it out."""


class LoraOperator(ABC):
    """One named LoRA operator."""

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype | None] = None
    """Type of the operator's rows; None for the cell's type."""

    def why_not(self, cell: KernelCell) -> str | None:
        """Return the reason why this operator cannot run the cell, or None."""
        return None

    @abstractmethod
    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        """Return a call that uses copies of these adapters, so that operators share no weights."""


class PeftLoop(LoraOperator):
    """PEFT's mixed-batch forward (peft/tuners/lora/layer.py, _mixed_batch_forward).

    For each adapter it gathers the requests' rows, applies two linear modules, multiplies by the
    scale, and adds the result to the rows of y.
    """

    name = "peft_loop"

    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        modules = {str(i): (_linear(pair.a), _linear(pair.b)) for i, pair in enumerate(pairs)}
        dropout = torch.nn.Identity()
        scaling = 1.0  # B already contains the scale, but PEFT always multiplies by one.
        adapter_names = [str(slot) for slot in cell.slots]
        shape = (cell.requests, cell.rows, cell.width)

        def call(y: torch.Tensor, x: torch.Tensor) -> None:
            inputs, result = x.view(shape), y.view(shape)
            unique_adapters = set(adapter_names)
            sub_batches = [
                [index for index, item in enumerate(adapter_names) if item == adapter]
                for adapter in unique_adapters
            ]
            for i, adapter in enumerate(unique_adapters):
                lora_a, lora_b = modules[adapter]
                sub_batch = inputs[sub_batches[i]].to(lora_a.weight.dtype)
                output = lora_b(lora_a(dropout(sub_batch))) * scaling
                result[sub_batches[i]] += output.to(result.dtype)

        return call


class SliceLoop(LoraOperator):
    """Operator that computes two matrix products for each adapter; the second one adds to y.

    The rows of an adapter must be adjacent.
    """

    name = "slice_loop"

    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        ready = [(pair.a.clone().T, pair.b.clone().T) for pair in pairs]
        parts = [(slice(s.start, s.start + s.length), *ready[s.slot]) for s in cell.segments]

        def call(y: torch.Tensor, x: torch.Tensor) -> None:
            for rows, a, b in parts:
                y[rows].addmm_(x[rows] @ a, b)

        return call


class Einsum(LoraOperator):
    """dLoRA's operator: it pads all ranks to the largest, gathers the weights of each row, and
    computes two einsums.
    """

    name = "einsum"

    def why_not(self, cell: KernelCell) -> str | None:
        gathered = 2 * cell.total_rows * max(cell.ranks) * cell.width * DTYPES[cell.dtype].itemsize
        if gathered > MAX_EINSUM_BYTES:
            return f"gathers {gathered / 2**30:.1f} GiB, above {MAX_EINSUM_BYTES / 2**30:.0f}"
        return None

    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        a, b = _stacked(pairs)
        index = torch.tensor(cell.slots).repeat_interleave(cell.rows)

        def call(y: torch.Tensor, x: torch.Tensor) -> None:
            low_rank = torch.einsum("td,trd->tr", x, a[index])
            y.add_(torch.einsum("tr,tor->to", low_rank, b[index]))

        return call


class Padded(LoraOperator):
    """Operator that computes batched matrix products over all segments.

    Each segment is padded to the length of the longest, and each rank to the largest.
    """

    name = "padded"

    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        a, b = _stacked(pairs)
        a, b = a.transpose(1, 2), b.transpose(1, 2)
        segments = cell.segments
        longest = max(segment.length for segment in segments)
        equal = all(segment.length == longest for segment in segments)
        shape = (len(segments), longest, cell.width)
        padded_rows = torch.cat([torch.arange(s.length) + s.slot * longest for s in segments])

        def call(y: torch.Tensor, x: torch.Tensor) -> None:
            if equal:
                y.view(shape).baddbmm_(torch.bmm(x.view(shape), a), b)
                return
            inputs = x.new_zeros(shape)
            inputs.view(-1, cell.width)[padded_rows] = x
            y.add_(torch.bmm(torch.bmm(inputs, a), b).view(-1, cell.width)[padded_rows])

        return call


class InFloat32(LoraOperator):
    """Baseline with fp32 weights and rows for a bf16 cell.

    A program on a CPU without bf16 instructions would use the baseline in this way.
    """

    dtype: ClassVar[torch.dtype | None] = torch.float32

    def __init__(self, inner: LoraOperator) -> None:
        self._inner = inner
        self.name = f"{inner.name}_in_fp32"  # type: ignore[misc]

    def why_not(self, cell: KernelCell) -> str | None:
        return "the cell is fp32" if cell.dtype == "fp32" else self._inner.why_not(cell)

    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        return self._inner.prepare([LoraPair(p.a.float(), p.b.float()) for p in pairs], cell)


BASELINES: tuple[LoraOperator, ...] = (PeftLoop(), SliceLoop(), Einsum(), Padded())


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    return module


def _stacked(pairs: Sequence[LoraPair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [adapters, r, d_in] and B [adapters, d_out, r], with ranks padded by zeros."""
    rank = max(pair.rank for pair in pairs)
    a = pairs[0].a.new_zeros(len(pairs), rank, pairs[0].a.shape[1])
    b = pairs[0].b.new_zeros(len(pairs), pairs[0].b.shape[0], rank)
    for i, pair in enumerate(pairs):
        a[i, : pair.rank] = pair.a
        b[i, :, : pair.rank] = pair.b
    return a, b
