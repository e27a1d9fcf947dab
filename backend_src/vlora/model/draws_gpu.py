"""Sampling of a step's tokens on a GPU, with random numbers from the host.

A draw is a tuple: row of the logits, top-k (below 1 for all tokens), temperature, min-p, top-p, and
random number in [0, 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlora.kernels import on_gpu
from vlora.memory.uploads import upload

DrawKey = tuple[int, int, float, float, float, float]


def draw_parameters(draws: Sequence[DrawKey]) -> list[torch.Tensor]:
    """Return the parameters of draws in the form that `draw_placed` takes.

    The result is one tensor per parameter, each [draws], in host memory.
    """
    if not draws:
        return []
    rows, top_ks, temperatures, min_ps, top_ps, uniforms = zip(*draws, strict=True)
    whole = torch.tensor([rows, [max(0, top_k) for top_k in top_ks]], dtype=torch.int32)
    single = torch.tensor([temperatures, min_ps])
    double = torch.tensor([top_ps, uniforms], dtype=torch.float64)
    return [*whole, *single, *double]


def draw_placed(logits: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the drawn tokens, [draws].

    logits: [rows, vocabulary] fp32, on the GPU.
    parameters: result of `draw_parameters`, copied to the GPU.
    """
    tokens: torch.Tensor = on_gpu.draws().draw(logits, on_gpu.draws().Draws(*parameters))
    return tokens


def draw_on_gpu(logits: torch.Tensor, draws: Sequence[DrawKey]) -> torch.Tensor:
    """Return the drawn tokens, [draws]. The parameters of all draws are copied in one transfer.

    logits: [rows, vocabulary] fp32, on the GPU.
    """
    return draw_placed(logits, upload(draw_parameters(draws), logits.device))
