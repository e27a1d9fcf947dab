"""Truncated singular value decomposition, which turns the change of a matrix into A and B of a
LoRA.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlora.atmm.types import LoraPair

EXACT_SIDE = 1024
"""Maximum length of the smaller side of a matrix that is decomposed fully, in about a second.

Larger matrices are decomposed by random projection, which takes as long as a few products.
"""
OVERSAMPLING, POWER_ITERATIONS = 16, 4
"""Parameters of the random projection: additional dimensions, and number of power iterations.

With these, the error is within 1 % of the minimum even if the singular values decrease slowly.
"""
ROUNDING = 1e-5
"""Singular values below this share of the largest one are treated as rounding errors."""


@dataclass(frozen=True)
class LowRank:
    """A and B that approximate the change of a matrix.

    error: Frobenius norm of the error, relative to that of the change.
    change: Frobenius norm of the change.
    """

    pair: LoraPair
    error: float
    change: float

    @property
    def rank(self) -> int:
        return self.pair.a.shape[0]


def factorize(change: torch.Tensor, max_rank: int) -> LowRank:
    """Return A and B, of rank `max_rank` at most, whose product B·A approximates a change.

    change: [d_out, d_in] fp32. If its rank is below `max_rank`, the result has this lower rank.
    """
    norm = float(torch.linalg.norm(change))
    u, s, vt = _decompose(change, min(max_rank, *change.shape))
    rank = max(1, int((s > ROUNDING * s[0]).sum()))
    root = s[:rank].sqrt()
    pair = LoraPair((root[:, None] * vt[:rank]).contiguous(), (u[:, :rank] * root).contiguous())
    error = float(torch.linalg.norm(change - pair.b @ pair.a)) / norm if norm else 0.0
    return LowRank(pair, error, norm)


def sufficient_rank(change: torch.Tensor, max_error: float) -> int:
    """Return the smallest rank at which the error of `factorize` is at most `max_error`.

    All singular values are computed, which takes a minute for a matrix of 8192 rows.
    """
    values = change if change.shape[0] <= change.shape[1] else change.T
    squares = torch.linalg.eigvalsh(values.double() @ values.double().T).flip(0).clamp(min=0)
    left = (squares.sum() - squares.cumsum(0)).clamp(min=0).sqrt()
    kept = torch.nonzero(left <= max_error * squares.sum().sqrt())
    return int(kept[0]) + 1 if len(kept) else len(squares)


def _decompose(change: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the truncated SVD: U [d_out, rank], S [rank] in descending order, and Vᵀ [rank,
    d_in].
    """
    if min(change.shape) <= EXACT_SIDE:
        u, s, vt = torch.linalg.svd(change, full_matrices=False)
    else:
        wanted = min(rank + OVERSAMPLING, *change.shape)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            u, s, v = torch.svd_lowrank(change, wanted, POWER_ITERATIONS)
        vt = v.T
    return u[:, :rank], s[:rank], vt[:rank]
