"""What lies between a layer's matrices, in memory that every layer and every step uses again.

Fresh tensors of some megabytes go back to the system when they are dropped, and every page of the
next ones is a fault: a third of the time of a prefill of 1024 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlora.memory import hugepages
from vlora.model.decoder_config import DecoderConfig


@dataclass(frozen=True)
class Rows:
    """Places for a step's rows, [T, width] fp32, contiguous, of any values.

    qkv and gate_up share their memory, as do normed, attended and gated: each is done with before
    the next is written. delta: what a layer's attention or MLP says. hidden: what
    all of these are added to.
    """

    qkv: torch.Tensor
    gate_up: torch.Tensor
    normed: torch.Tensor
    attended: torch.Tensor
    gated: torch.Tensor
    delta: torch.Tensor
    hidden: torch.Tensor


class Workspace:
    """Rows for one forward pass at a time. Keeps memory for the most that were asked for."""

    def __init__(self, config: DecoderConfig) -> None:
        heads, inner = config.heads * config.head_dim, config.intermediate
        qkv = heads + 2 * config.kv_heads * config.head_dim
        self._wide = {"qkv": qkv, "gate_up": 2 * inner}
        self._narrow = {"normed": config.hidden, "attended": heads, "gated": inner}
        self._delta = {"delta": config.hidden}
        self._hidden = {"hidden": config.hidden}
        self._memory: list[torch.Tensor] = []
        self._most = -1
        self._rows: Rows | None = None

    def rows(self, count: int) -> Rows:
        """Places for `count` rows; what was there before is lost."""
        if self._rows is not None and len(self._rows.delta) == count:
            return self._rows
        groups = (self._wide, self._narrow, self._delta, self._hidden)
        if count > self._most:
            self._memory = [
                hugepages.hugepage_zeros(max(1, count), max(g.values()), dtype=torch.float32)
                for g in groups
            ]
            self._most = count
        self._rows = Rows(
            **{
                name: memory.view(-1)[: count * width].view(count, width)
                for group, memory in zip(groups, self._memory, strict=True)
                for name, width in group.items()
            }
        )
        return self._rows
