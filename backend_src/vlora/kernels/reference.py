"""Reference implementations of the kernels in plain torch. Tests compare the compiled kernels with
them.
"""

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
    """Compute `ops.embed`."""
    # A token that an image feature replaces need not be in the table.
    in_table = tokens.clone()
    for first_row, feature_rows, _ in images:
        in_table[first_row : first_row + len(feature_rows)][feature_rows >= 0] = 0
    hidden = F.embedding(in_table, table).float()
    for first_row, feature_rows, features in images:
        shown = torch.nonzero(feature_rows >= 0).flatten()
        hidden[first_row + shown] = features[feature_rows[shown]]
    return hidden


def add_norm(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Compute `ops.add_norm`."""
    if delta is not None:
        hidden += delta
    return F.rms_norm(hidden, (hidden.shape[-1],), weight, eps)


def head_norm(
    qkv: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
) -> None:
    """Compute `ops.head_norm`."""
    values = qkv.view(len(qkv), heads + 2 * kv_heads, len(query_weight))
    queries, keys = values[:, :heads], values[:, heads : heads + kv_heads]
    for part, weight in ((queries, query_weight), (keys, key_weight)):
        part.copy_(F.rms_norm(part, weight.shape, weight, eps))


def gate(x: torch.Tensor) -> torch.Tensor:
    """Compute `ops.gate`."""
    gates, ups = x.chunk(2, dim=1)
    return F.silu(gates) * ups


def argmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `ops.argmax`."""
    return x.argmax(dim=1), torch.isfinite(x).all(dim=1)


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Return the heads with each pair (i, i + dim / 2) of values rotated by an angle.

    x: [T, heads, dim].
    cosines, sines: [T, dim / 2], cosines and sines of the angles of each row.
    """
    cos, sin = cosines[:, None], sines[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
