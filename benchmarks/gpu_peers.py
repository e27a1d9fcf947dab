"""LoRA kernels of vLLM and SGLang as baselines of `gpu_kernels`, if they can be imported.

Their interfaces change between versions. A kernel with an unknown interface is left out, with the
reason. Every result is compared with float64 before it is timed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from benchmarks.lora_operators import KernelCell, LoraCall, LoraOperator
from vlora.atmm.types import LoraPair


class Vllm(LoraOperator):
    """vllm.lora.ops.triton_ops, which sorts rows by adapter on the GPU, shrinks and expands."""

    name: ClassVar[str] = "vllm"

    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        ops: Any = importlib.import_module("vllm.lora.ops.triton_ops")
        a, b = _stacked(pairs)
        device, rows, rank = a.device, cell.total_rows, a.shape[1]
        meta = ops.LoRAKernelMeta.make(len(pairs), rows, device)
        slots = torch.tensor(cell.slots, device=device, dtype=torch.int32)
        meta.prepare_tensors(slots.repeat_interleave(cell.rows))
        more = len(inspect.signature(meta.meta_args).parameters) - 1
        if more > 1:
            raise RuntimeError("meta_args has unknown parameters")
        arguments = meta.meta_args(rows, *([False] * more))
        low = torch.empty(1, rows, rank, device=device, dtype=torch.float32)

        def call(y: torch.Tensor, x: torch.Tensor) -> None:
            low.zero_()
            ops.lora_shrink(x, [a], low, *arguments, 1.0)
            ops.lora_expand(low, [b], y, *arguments, offset_start=0, add_inputs=True)

        return call


class Sglang(LoraOperator):
    """sglang.srt.lora.triton_ops: segmented products with one segment per adapter."""

    name: ClassVar[str] = "sglang"

    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        ops: Any = importlib.import_module("sglang.srt.lora.triton_ops")
        info: Any = importlib.import_module("sglang.srt.lora.utils").LoRABatchInfo
        a, b = _stacked(pairs)
        device = a.device
        segments = cell.segments

        def ints(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, device=device, dtype=torch.int32)

        known: dict[str, Any] = {
            "bs": len(segments),
            "num_segments": len(segments),
            "use_cuda_graph": False,
            "seg_lens": ints([s.length for s in segments]),
            "seg_indptr": ints([0, *(s.start + s.length for s in segments)]),
            "max_len": max(s.length for s in segments),
            "weight_indices": ints([s.slot for s in segments]),
            "lora_ranks": ints([pair.rank for pair in pairs]),
            "scalings": torch.ones(len(pairs), device=device),
            "permutation": None,
        }
        wanted = inspect.signature(info).parameters
        # A parameter that is not known here raises TypeError, so the baseline is left out.
        batch = info(**{name: value for name, value in known.items() if name in wanted})

        def call(y: torch.Tensor, x: torch.Tensor) -> None:
            low = ops.sgemm_lora_a_fwd(x, a, batch)
            ops.sgemm_lora_b_fwd(low, b, batch, y)

        return call


PEERS: tuple[LoraOperator, ...] = (Vllm(), Sglang())


def _stacked(pairs: Sequence[LoraPair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [adapters, r, d_in] and B [adapters, d_out, r] with ranks padded with zeros."""
    rank = max(16, *(pair.rank for pair in pairs))
    pad = torch.nn.functional.pad
    a = torch.stack([pad(pair.a, (0, 0, 0, rank - pair.rank)) for pair in pairs])
    b = torch.stack([pad(pair.b, (0, rank - pair.rank)) for pair in pairs])
    return a, b
