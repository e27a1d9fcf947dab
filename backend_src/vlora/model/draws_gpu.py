"""Draws of a step on a GPU, with the random numbers of the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlora.kernels import on_gpu
from vlora.memory.device import upload


def draw_on_gpu(
    logits: torch.Tensor, draws: Sequence[tuple[int, int, float, float, float, float]]
) -> torch.Tensor:
    """Return the drawn tokens. The parameters of all draws are copied in one transfer.

    draws: for each draw (row of the logits; top-k, below 1 for all tokens; temperature; min-p;
        top-p; random number).
    """
    rows, top_ks, temperatures, min_ps, top_ps, uniforms = zip(*draws, strict=True)
    whole = torch.tensor([rows, [max(0, top_k) for top_k in top_ks]], dtype=torch.int32)
    single = torch.tensor([temperatures, min_ps])
    double = torch.tensor([top_ps, uniforms], dtype=torch.float64)
    columns = [*whole, *single, *double]
    parameters = on_gpu.draws().Draws(*upload(columns, logits.device))
    tokens: torch.Tensor = on_gpu.draws().draw(logits, parameters)
    return tokens
