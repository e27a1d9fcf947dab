"""RMS norms of a step: of its rows, and of query and key heads. `ops.py` has the other kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vlora import backends, native
from vlora.backends import Backend
from vlora.kernels import on_gpu, reference
from vlora.kernels.ops import alloc_out, copy_out


def add_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Add `delta` to `hidden` in place and return the RMS norm of the sum, [T, width] fp32.

    Semantics: hidden += delta; return hidden / sqrt(mean(hidden²) + eps) · weight, for each row.

    hidden: [T, width] fp32, contiguous.
    delta: tensor of the same shape, or None to add nothing.
    weight: [width] fp32.
    out, backend: as in `ops.py`.

    Raises ValueError for a wrong shape, type or layout.
    """
    chosen = backend or backends.backend_of("kernels", hidden.device.type)
    if chosen == "gpu":
        return on_gpu.add_norm(hidden, delta, weight, eps, out)
    if chosen == "reference":
        return copy_out(reference.add_norm(hidden, delta, weight, eps), out)
    _check_norm(hidden, weight)
    if delta is not None:
        _check_norm(delta, weight)
        if delta.shape != hidden.shape:
            raise ValueError(
                f"delta {tuple(delta.shape)} must have the shape of hidden {tuple(hidden.shape)}"
            )
    out = alloc_out(out, *hidden.shape)
    native.kernels().gemm.add_norm(
        out.data_ptr(),
        hidden.data_ptr(),
        0 if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        *hidden.shape,
        eps,
        torch.get_num_threads(),
    )
    return out


class HeadNorms(NamedTuple):
    """Weights of the RMS norms of query heads and of key heads, each [dim] fp32, and their eps."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


def head_norm(
    qkv: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    heads: int,
    eps: float,
    *,
    backend: Backend | None = None,
) -> None:
    """Replace each query head and each key head by its RMS norm, in place.

    Semantics: head = head / sqrt(mean(head²) + eps) · weight.

    qkv: [T, (heads + 2 · kv_heads) · dim] fp32, contiguous: query heads, key heads, value heads.
    query_weight, key_weight: [dim] fp32.
    heads: number of query heads.

    Raises ValueError for a wrong shape, type or layout.
    """
    rows, width = qkv.shape
    dim = len(query_weight)
    kv_heads, rest = divmod(width - heads * dim, 2 * dim)
    chosen = backend or backends.backend_of("kernels", qkv.device.type)
    if chosen == "gpu":
        on_gpu.launches().head_norm(qkv, query_weight, key_weight, heads, kv_heads, eps)
        return
    if rest or kv_heads < 1 or qkv.dtype != torch.float32 or not qkv.is_contiguous():
        raise ValueError(
            f"qkv {tuple(qkv.shape)} {qkv.dtype} must be contiguous fp32 rows of {heads} query"
            f" heads of {dim} values, and of as many key as value heads"
        )
    if key_weight.shape != (dim,) or {query_weight.dtype, key_weight.dtype} != {torch.float32}:
        raise ValueError(f"norm weights must both be [{dim}] of fp32")
    if chosen == "reference":
        reference.head_norm(qkv, query_weight, key_weight, heads, kv_heads, eps)
        return
    native.kernels().gemm.head_norm(
        qkv.data_ptr(),
        query_weight.data_ptr(),
        key_weight.data_ptr(),
        rows,
        heads,
        kv_heads,
        dim,
        eps,
        torch.get_num_threads(),
    )


def _check_norm(rows: torch.Tensor, weight: torch.Tensor) -> None:
    fits = rows.dim() == 2 and rows.shape[1:] == weight.shape and rows.is_contiguous()
    if not fits or rows.dtype != torch.float32 or weight.dtype != torch.float32:
        raise ValueError(
            f"rows {tuple(rows.shape)} {rows.dtype} do not fit a norm weight"
            f" {tuple(weight.shape)} {weight.dtype}; both must be fp32 and the rows contiguous"
            " [rows, width]"
        )
