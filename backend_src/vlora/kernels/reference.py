"""The kernels' twins in plain torch: written to be read, and the oracle of every other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight.float(), bias)


def embed(
    tokens: torch.Tensor,
    table: torch.Tensor,
    images: Sequence[tuple[int, torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    known = tokens.clone()
    for first, which, _ in images:
        known[first : first + len(which)][which >= 0] = 0
    hidden = F.embedding(known, table).float()
    for first, which, features in images:
        at = torch.nonzero(which >= 0).flatten()
        hidden[first + at] = features[which[at]]
    return hidden


def add_norm(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    if delta is not None:
        hidden += delta
    return F.rms_norm(hidden, (hidden.shape[-1],), weight, eps)


def gate(x: torch.Tensor) -> torch.Tensor:
    gates, ups = x.chunk(2, dim=1)
    return F.silu(gates) * ups


def largest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.argmax(dim=1), torch.isfinite(x).all(dim=1)


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, dim]; cosines, sines: [T, dim / 2] → halves of each head, turned."""
    cos, sin = cosines[:, None], sines[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
