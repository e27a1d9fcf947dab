"""Changes of a weight that differ from a plain product B·A."""

from __future__ import annotations

import torch

from vlora.atmm.types import LoraPair


def dora_change(weight: torch.Tensor, pair: LoraPair, magnitude: torch.Tensor) -> torch.Tensor:
    """Return the change that a DoRA makes to a matrix, m (W + B A) / |W + B A| - W, [d_out, d_in].

    weight: W [d_out, d_in].
    pair: A and B.
    magnitude: m [d_out].

    |·| is the norm of each row. All tensors are fp32.
    """
    changed = weight + pair.b @ pair.a
    factor: torch.Tensor = magnitude / torch.linalg.norm(changed, dim=1)
    return factor[:, None] * changed - weight


def with_initial_change(pair: LoraPair, weight: torch.Tensor, kind: str, scale: float) -> LoraPair:
    """Return A and B that fit the unchanged base, for a LoRA whose initialization changed the base.

    pair: A and B of that LoRA, for the changed base.
    weight: W [d_out, d_in] fp32 of the unchanged base.
    kind: `pissa`, which subtracts the part of W with the largest singular values, or `olora`, which
        subtracts `scale` times the product of the first columns of Q and the first rows of R, where
        W = Q R.
    scale: scale of the LoRA, which is folded into the resulting B.
    """
    rank = pair.a.shape[0]
    if kind == "pissa":
        u, s, vt = torch.linalg.svd(weight, full_matrices=False)
        initial = LoraPair(vt[:rank], u[:, :rank] * s[:rank])
    else:
        q, r = torch.linalg.qr(weight)
        initial = LoraPair(r[:rank], scale * q[:, :rank])
    return LoraPair(torch.cat([pair.a, initial.a]), torch.cat([pair.b, -initial.b], dim=1))
