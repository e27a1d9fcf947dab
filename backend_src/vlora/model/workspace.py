"""Intermediate results of a forward pass, in memory that every layer and every step reuses.

Freshly allocated tensors of some megabytes are returned to the system when they are freed, and each
page of the next ones is a page fault: a third of the time of a prefill of 1024 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlora.memory import hugepages
from vlora.model.decoder_config import DecoderConfig

FP32_BYTES = 4


@dataclass(frozen=True)
class StepBuffers:
    """Intermediate results of a step, each [T, width] fp32, contiguous, initially of any values.

    qkv and gate_up share their memory, as do normed, attended and gated: each is read for the last
    time before the next is written.
    delta: output of a layer's attention or MLP, to be added to `hidden`.
    hidden: the residual stream.
    """

    qkv: torch.Tensor
    gate_up: torch.Tensor
    normed: torch.Tensor
    attended: torch.Tensor
    gated: torch.Tensor
    delta: torch.Tensor
    hidden: torch.Tensor


def _groups(config: DecoderConfig) -> tuple[dict[str, int], ...]:
    """Return the widths of the buffers by name; those of one group share their memory."""
    attended, inner = config.heads * config.head_dim, config.intermediate
    qkv = attended + 2 * config.kv_heads * config.head_dim
    return (
        {"qkv": qkv, "gate_up": 2 * inner},
        {"normed": config.hidden, "attended": attended, "gated": inner},
        {"delta": config.hidden},
        {"hidden": config.hidden},
    )


def workspace_bytes(config: DecoderConfig, rows: int) -> int:
    """Return the size of the buffers of a step with this many rows."""
    return sum(max(group.values()) * rows * FP32_BYTES for group in _groups(config))


class Workspace:
    """Buffers of one forward pass at a time. Holds memory for the largest step so far."""

    def __init__(self, config: DecoderConfig) -> None:
        self._groups = _groups(config)
        self._memory: list[torch.Tensor] = []
        self._max_rows = -1
        self._buffers: StepBuffers | None = None

    def buffers(self, rows: int) -> StepBuffers:
        """Return buffers of `rows` rows; the contents of earlier buffers are lost."""
        if self._buffers is not None and len(self._buffers.delta) == rows:
            return self._buffers
        if rows > self._max_rows:
            self._memory = [
                hugepages.hugepage_zeros(max(1, rows), max(group.values()), dtype=torch.float32)
                for group in self._groups
            ]
            self._max_rows = rows
        self._buffers = StepBuffers(
            **{
                name: memory.view(-1)[: rows * width].view(rows, width)
                for group, memory in zip(self._groups, self._memory, strict=True)
                for name, width in group.items()
            }
        )
        return self._buffers
