"""Sampling of a step's tokens on a GPU, with random numbers from the host.

A draw is (row of the logits; top-k, below 1 for all tokens; temperature; min-p; top-p; random
number).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlora.kernels import on_gpu
from vlora.memory.uploads import upload

Draw = tuple[int, int, float, float, float, float]


def draw_parameters(draws: Sequence[Draw]) -> list[torch.Tensor]:
    """Return the parameters of draws as `draw_placed` takes them, in host memory."""
    if not draws:
        return []
    rows, top_ks, temperatures, min_ps, top_ps, uniforms = zip(*draws, strict=True)
    whole = torch.tensor([rows, [max(0, top_k) for top_k in top_ks]], dtype=torch.int32)
    single = torch.tensor([temperatures, min_ps])
    double = torch.tensor([top_ps, uniforms], dtype=torch.float64)
    return [*whole, *single, *double]


def draw_placed(logits: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the drawn tokens. Logits, parameters and result are on the same device."""
    tokens: torch.Tensor = on_gpu.draws().draw(logits, on_gpu.draws().Draws(*parameters))
    return tokens


def draw_on_gpu(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Return the drawn tokens. The parameters of all draws are copied in one transfer."""
    return draw_placed(logits, upload(draw_parameters(draws), logits.device))
