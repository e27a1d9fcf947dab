"""The operators that are compared: ATMM and the baselines, each with one semantics.

Semantics of every operator: for each segment (start, length, slot, +1), with rows R:
y[R] += (x[R] Aᵀ) Bᵀ, (A, B) = the slot's pair, the scale folded into B.

What a real user of a baseline would do once per adapter (stacking, packing) or once per step
(sorting, row numbers) is done once here, outside the clock: the figures favour the baselines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from benchmarks.kernels.cells import DTYPES, Cell
from vlora.atmm.types import LoraPair

Call = Callable[[torch.Tensor, torch.Tensor], None]
"""(y, x) → y += …, for the adapters and segments it was made for."""

EINSUM_BYTES = 1 << 30
"""The einsum baseline is left out where its gathered weights would take more than this."""


class Baseline(ABC):
    """One operator under its name."""

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype | None] = None
    """Of its rows, where it is not the cell's."""

    def why_not(self, cell: Cell) -> str | None:
        """The reason to leave a cell out, or None."""
        return None

    @abstractmethod
    def prepare(self, pairs: Sequence[LoraPair], cell: Cell) -> Call:
        """Load the adapters (copies: no operator finds what another has brought to the cache)."""


class PeftLoop(Baseline):
    """What PEFT's mixed-batch forward does (peft/tuners/lora/layer.py, _mixed_batch_forward):
    per adapter, gather the requests, two linear modules, scale, scatter-add."""

    name = "peft_loop"

    def prepare(self, pairs: Sequence[LoraPair], cell: Cell) -> Call:
        modules = {str(i): (_linear(pair.a), _linear(pair.b)) for i, pair in enumerate(pairs)}
        dropout = torch.nn.Identity()
        scaling = 1.0  # folded into B; PEFT multiplies all the same
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


class SliceLoop(Baseline):
    """Rows sorted by adapter, one slice each: two GEMMs, the second accumulating in place."""

    name = "slice_loop"

    def prepare(self, pairs: Sequence[LoraPair], cell: Cell) -> Call:
        ready = [(pair.a.clone().T, pair.b.clone().T) for pair in pairs]
        parts = [(slice(s.start, s.start + s.length), *ready[s.slot]) for s in cell.segments]

        def call(y: torch.Tensor, x: torch.Tensor) -> None:
            for rows, a, b in parts:
                y[rows].addmm_(x[rows] @ a, b)

        return call


class Einsum(Baseline):
    """dLoRA's: the weights of every row's adapter gathered, then two einsums; ranks padded."""

    name = "einsum"

    def why_not(self, cell: Cell) -> str | None:
        gathered = 2 * cell.total_rows * max(cell.ranks) * cell.width * DTYPES[cell.dtype].itemsize
        if gathered > EINSUM_BYTES:
            return f"gathers {gathered / 2**30:.1f} GiB, above {EINSUM_BYTES / 2**30:.0f}"
        return None

    def prepare(self, pairs: Sequence[LoraPair], cell: Cell) -> Call:
        a, b = _stacked(pairs)
        index = torch.tensor(cell.slots).repeat_interleave(cell.rows)

        def call(y: torch.Tensor, x: torch.Tensor) -> None:
            low_rank = torch.einsum("td,trd->tr", x, a[index])
            y.add_(torch.einsum("tr,tor->to", low_rank, b[index]))

        return call


class Padded(Baseline):
    """Batched GEMM: each adapter's rows padded to the longest segment, ranks to the largest."""

    name = "padded"

    def prepare(self, pairs: Sequence[LoraPair], cell: Cell) -> Call:
        a, b = _stacked(pairs)
        a, b = a.transpose(1, 2), b.transpose(1, 2)
        segments = cell.segments
        longest = max(segment.length for segment in segments)
        even = all(segment.length == longest for segment in segments)
        shape = (len(segments), longest, cell.width)
        places = torch.cat([torch.arange(s.length) + s.slot * longest for s in segments])

        def call(y: torch.Tensor, x: torch.Tensor) -> None:
            if even:
                y.view(shape).baddbmm_(torch.bmm(x.view(shape), a), b)
                return
            inputs = x.new_zeros(shape)
            inputs.view(-1, cell.width)[places] = x
            y.add_(torch.bmm(torch.bmm(inputs, a), b).view(-1, cell.width)[places])

        return call


class InFloat32(Baseline):
    """A baseline on fp32 weights for a bf16 cell: what a CPU without bf16 instructions would use.

    Its rows must be fp32 too: `dtype` says so to whoever draws them.
    """

    dtype: ClassVar[torch.dtype | None] = torch.float32

    def __init__(self, inner: Baseline) -> None:
        self._inner = inner
        self.name = f"{inner.name}_in_fp32"  # type: ignore[misc]

    def why_not(self, cell: Cell) -> str | None:
        return "the cell is fp32" if cell.dtype == "fp32" else self._inner.why_not(cell)

    def prepare(self, pairs: Sequence[LoraPair], cell: Cell) -> Call:
        return self._inner.prepare([LoraPair(p.a.float(), p.b.float()) for p in pairs], cell)


BASELINES: tuple[Baseline, ...] = (PeftLoop(), SliceLoop(), Einsum(), Padded())


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    return module


def _stacked(pairs: Sequence[LoraPair]) -> tuple[torch.Tensor, torch.Tensor]:
    """[adapters, r, d_in] and [adapters, d_out, r], ranks padded with zeros."""
    rank = max(pair.rank for pair in pairs)
    a = pairs[0].a.new_zeros(len(pairs), rank, pairs[0].a.shape[1])
    b = pairs[0].b.new_zeros(len(pairs), pairs[0].b.shape[0], rank)
    for i, pair in enumerate(pairs):
        a[i, : pair.rank] = pair.a
        b[i, :, : pair.rank] = pair.b
    return a, b
