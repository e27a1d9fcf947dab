"""Products with the weights, and what lies between them. Attention's are in its plan.

Rows are fp32 everywhere; weights are stored as fp32 or bf16. Every function takes `backend` to
override the default for one call.
"""

from __future__ import annotations

import torch

from vlora import native
from vlora.kernels import backends, reference
from vlora.kernels.backends import Backend


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """x weightᵀ + bias.

    x: [T, d_in] fp32, rows may be strided; weight: [d_out, d_in], contiguous, fp32 or bf16; bias:
    [d_out] fp32 → [T, d_out] fp32. Where the CPU multiplies pairs of bf16, x is rounded to bf16
    for it; else bf16 is widened on its way. Raises ValueError for what does not fit.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    if x.dtype != torch.float32 or weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"x must be fp32 and weight fp32 or bf16, not {x.dtype}, {weight.dtype}")
    if (backend or backends.default()) == "reference":
        return reference.linear(x, weight, bias)
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("columns of x and all of weight must lie side by side")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != torch.float32):
        raise ValueError(f"bias {tuple(bias.shape)} {bias.dtype} does not fit {weight.shape[0]}")
    (rows, depth), width = x.shape, weight.shape[0]
    y = torch.empty(rows, width)
    native.kernels().linear.multiply(
        y.data_ptr(),
        width,
        x.data_ptr(),
        x.stride(0),
        rows,
        weight.data_ptr(),
        weight.dtype == torch.bfloat16,
        width,
        depth,
        0 if bias is None else bias.data_ptr(),
        torch.get_num_threads(),
    )
    return y


def add_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """hidden += delta, in place, where there is one; → hidden / rms(hidden) · weight, by row.

    hidden, delta: [T, width] fp32, contiguous; weight: [width] fp32. rms: the root of the mean
    square plus eps. Raises ValueError for what does not fit.
    """
    if (backend or backends.default()) == "reference":
        return reference.add_norm(hidden, delta, weight, eps)
    _check(hidden, weight)
    if delta is not None:
        _check(delta, weight)
        if delta.shape != hidden.shape:
            raise ValueError(f"{tuple(delta.shape)} cannot be added to {tuple(hidden.shape)}")
    out = torch.empty_like(hidden)
    native.kernels().linear.add_norm(
        out.data_ptr(),
        hidden.data_ptr(),
        0 if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        *hidden.shape,
        eps,
        torch.get_num_threads(),
    )
    return out


def gate(x: torch.Tensor, *, backend: Backend | None = None) -> torch.Tensor:
    """x: [T, 2 · width] fp32, contiguous → silu(its left half) · its right half, [T, width]."""
    if (backend or backends.default()) == "reference":
        return reference.gate(x)
    if x.dim() != 2 or x.shape[1] % 2 or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"{tuple(x.shape)} {x.dtype} is no contiguous pair of fp32 halves")
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width)
    native.kernels().linear.gate(out.data_ptr(), x.data_ptr(), rows, width, torch.get_num_threads())
    return out


def _check(rows: torch.Tensor, weight: torch.Tensor) -> None:
    fits = rows.dim() == 2 and rows.shape[1:] == weight.shape and rows.is_contiguous()
    if not fits or rows.dtype != torch.float32 or weight.dtype != torch.float32:
        raise ValueError(
            f"rows {tuple(rows.shape)} {rows.dtype} do not fit a norm of"
            f" {tuple(weight.shape)} {weight.dtype}, or do not lie side by side"
        )
