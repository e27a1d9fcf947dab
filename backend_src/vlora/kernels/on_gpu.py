"""The step's operations on a GPU: products by torch, and the kernels of `vlora.kernels.gpu`.

Each function computes what the function with the same name in `ops` computes, on rows of the dtype
of the weights. Arguments are checked only where a kernel would fail without a clear error.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F


@cache
def launches() -> Any:
    """Return `vlora.kernels.gpu.launch`. Raise ImportError if `triton` is not installed."""
    return importlib.import_module("vlora.kernels.gpu.launch")


@cache
def draws() -> Any:
    """Return `vlora.kernels.gpu.draws`. Raise ImportError if `triton` is not installed."""
    return importlib.import_module("vlora.kernels.gpu.draws")


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """Return x weightᵀ + bias, [T, d_out], computed in the dtype of the weight, as that of x.

    x: [T, d_in]. weight: [d_out, d_in]. bias: [d_out], or None.
    """
    rows = x.to(weight.dtype)
    bias = None if bias is None else bias.to(weight.dtype)
    if out is None or out.dtype != weight.dtype:
        product = F.linear(rows, weight, bias)
        return product.to(x.dtype) if out is None else out.copy_(product)
    if bias is None:
        return torch.mm(rows, weight.T, out=out)
    return torch.addmm(bias, rows, weight.T, out=out)


def gate(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Compute `ops.gate`."""
    if out is None:
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
    launches().gate(out, x)
    return out


def add_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `ops.add_norm`. Without `out`, the result has the type of `delta`."""
    if out is None:
        out = torch.empty_like(hidden if delta is None else delta)
    launches().add_norm(out, hidden, delta, weight, eps)
    return out


def embed(
    tokens: torch.Tensor,
    table: torch.Tensor,
    images: Sequence[tuple[int, torch.Tensor, torch.Tensor]],
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `ops.embed`. The row of a token that is not in the table becomes NaN.

    images: at most one range, which covers all rows and is on the device; else ValueError.
    """
    if out is None:
        out = torch.empty(len(tokens), table.shape[1], device=table.device)
    feature_rows = features = None
    if images:
        ((first_row, feature_rows, features), *others) = images
        if others or first_row or len(feature_rows) != len(tokens):
            raise ValueError(
                f"images has {len(images)} ranges; on a GPU, it must be one range of all rows"
            )
    launches().embed(out, tokens, table, feature_rows, features)
    return out
